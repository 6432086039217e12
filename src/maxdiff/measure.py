"""What evaluate.py measures of a pipeline: features of real and drawn pictures, and the loss at each level of noise."""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiff import build
from maxdiff.config import Config
from maxdiff.data.examples import Source
from maxdiff.data.pipeline import load_example, one_behind, step_examples
from maxdiff.diffusion.objective import Objective
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.draw import requests
from maxdiff.features import FeatureNetwork
from maxdiff.gradients import outputs_function
from maxdiff.judge import held_out_batches, held_out_plan, mean_of, sums_of
from maxdiff.losses import diffusion_losses
from maxdiff.models.network import Params, unflatten
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import Layout
from maxdiff.task import Task
from maxdiff.weights.tensors import write_atomically

READERS = 4  # threads that decode images


@dataclasses.dataclass(frozen=True)
class Reference:
    """Real pictures, as a feature network sees them: features float32 [n d], and a caption each."""

    features: np.ndarray
    captions: list[str]


def make_reference(config: Config, source: Source, network: FeatureNetwork, folder: Path) -> Reference:
    """The first eval_examples of a source, cropped as for training; kept in a folder, under a name made of all that decides it."""
    count, side = min(config.data.eval_examples, len(source)), config.data.resolution
    made_of = [source.fingerprint(), str(count), str(side), network.fingerprint]
    path = folder / f"reference-{hashlib.sha256(' '.join(made_of).encode()).hexdigest()[:16]}.npz"
    if path.is_file():
        with np.load(path) as kept:
            return Reference(kept["features"], json.loads(str(kept["captions"])))
    found = [(network.extract(images), captions) for images, captions in _pictures(config, source, count)]
    reference = Reference(np.concatenate([f for f, _ in found]), [caption for _, some in found for caption in some])
    file = io.BytesIO()
    np.savez(file, features=reference.features, captions=json.dumps(reference.captions))
    if jax.process_index() == 0:
        write_atomically(path, [file.getbuffer()])
    return reference


def _pictures(config: Config, source: Source, count: int) -> Iterator[tuple[np.ndarray, list[str]]]:
    """(images uint8 [b h w 3], their captions), some at a time: the examples of the held-out loss, in its order."""
    plan = held_out_plan(config, config.batch.per_device_batch_size)
    with ThreadPoolExecutor(READERS) as readers:
        for number in range(math.ceil(count / plan.global_batch)):
            _, positions, indexes = step_examples(source, plan, number)
            load = lambda position, index: load_example(source, plan, int(position), int(index))
            wanted = count - number * plan.global_batch
            loaded = list(readers.map(load, positions[:wanted], indexes[:wanted]))
            yield np.stack([one.picture.image for one in loaded]), [one.caption for one in loaded]


def make_drawings(
    config: Config, layout: Layout, pipeline: Pipeline, captions: Sequence[str], guidance_scale: float
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """(images uint8 [b h w 3], what they are of), some at a time; the i-th has the i-th caption, and seed + i."""
    networks = {name: part.network for name, part in pipeline.networks()}
    weights = {name: part.params for name, part in pipeline.networks()}
    section = dataclasses.replace(config.sampling, guidance_scale=guidance_scale)
    draw = build.make_draw(dataclasses.replace(config, sampling=section), networks, pipeline.scheduler)
    on_params: Any = lambda params, _, request: draw(params, request)
    program = jax.jit(outputs_function(on_params, layout.mesh, _specs(layout, networks)),
                      out_shardings=NamedSharding(layout.mesh, PartitionSpec()))  # fmt: skip
    shards = build.batch_shards(layout.mesh)
    at_once = min(config.batch.per_device_batch_size, math.ceil(len(captions) / shards)) * shards

    def drawn(first: int) -> tuple[jax.Array, list[str]]:
        some = list(captions[first : first + at_once])
        filled = some + some[-1:] * (at_once - len(some))
        seeds = [(config.run.seed + first + i) % 2**32 for i in range(at_once)]
        request = requests(pipeline, filled, [section.negative_prompt] * at_once, seeds=seeds)
        return program(weights, {}, build.whole_request(layout.mesh, request)), some

    for images, some in one_behind(map(drawn, range(0, len(captions), at_once))):
        yield np.asarray(images)[: len(some)], some


def losses_by_timestep(config: Config, layout: Layout, pipeline: Pipeline, source: Source, key: jax.Array) -> dict[int, float]:
    """timestep -> the mean loss of the held-out examples there, unweighted, at eval_timesteps levels that cover them all alike.

    Args:
        key: the run's, which decides the noise, as that of the held-out loss.
    """
    networks = {name: part.network for name, part in pipeline.networks()}
    schedule = noise_schedule(pipeline.scheduler)
    losses = diffusion_losses(networks, Objective(), schedule)
    tokenizers = {name: one for name in ("tokenizer", "tokenizer_2") if (one := getattr(pipeline, name)) is not None}
    whole = NamedSharding(layout.mesh, PartitionSpec())
    empty = {f"empty_ids{name.removeprefix('tokenizer')}": tokenizer("") for name, tokenizer in tokenizers.items()}
    # All of its weights lie where those that are trained do.
    task = Task(networks, tuple(networks), dict, {"frozen": {}, **jax.device_put(empty, whole)}, tokenizers, losses,
                lambda *given: {"loss": losses(*given)}, 0.0)  # fmt: skip
    batches, sums = held_out_batches(config, layout, task, source), sums_of(task.measures, layout, task)
    weights = {name: part.params for name, part in pipeline.networks()}
    found = {}
    for t in timesteps(schedule.num_timesteps, config.evaluation.eval_timesteps):
        at = dataclasses.replace(task, constants={**task.constants, "t": jax.device_put(np.int32(t), whole)})
        found[t] = mean_of(sums, weights, at, batches, layout, key)["loss"]
    return found


def timesteps(total: int, count: int) -> list[int]:
    """The middles of `count` equal parts of 0 to total - 1; all of them if there are no more."""
    count = min(count, total)
    return [int((i + 0.5) * total / count) for i in range(count)]


def _specs(layout: Layout, networks: dict[str, Any]) -> Params:
    return {name: unflatten(layout.specs(network).items()) for name, network in networks.items()}
