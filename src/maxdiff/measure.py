"""What evaluate.py measures of a pipeline: features of real and drawn pictures, and the loss at each level of noise."""

import dataclasses
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiff import build, inputs
from maxdiff.checksums import digest
from maxdiff.config import Config
from maxdiff.data.examples import Source
from maxdiff.data.pipeline import BadTally, load_example, one_behind, step_examples
from maxdiff.diffusion.objective import Objective
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.draw import inpaints, requests
from maxdiff.features import CLIPEmbedder, FeatureNetwork
from maxdiff.judge import HELD_OUT, each_held_out_batch, held_out_plan, sums_of
from maxdiff.losses import diffusion_losses
from maxdiff.models.network import Params
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import Layout
from maxdiff.task import Task, empty_ids
from maxdiff.weights.tensors import write_atomically

READERS = 4  # threads that decode images
AT_ONCE = 32  # pictures that a network looks at: always as many, so that it is compiled once
SHOWN = 64  # drawings that are kept to be looked at

# Images uint8 [b h w 3], and a caption for each.
Captioned = tuple[np.ndarray, list[str]]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Real pictures, as a feature network sees them.

    Attributes:
        features: float32 [n d].
        captions: n of them.
        fingerprint: of pictures, captions and network.
    """

    features: np.ndarray
    captions: list[str]
    fingerprint: str


def make_reference(config: Config, source: Source, network: FeatureNetwork, folder: Path) -> Reference:
    """The first eval_examples of a source, their middle squares; kept in a folder, under a name of all that decides it.

    Raises:
        ValueError: if more than max_bad_fraction of them are bad.
    """
    count = min(config.data.eval_examples, len(source))
    plan = held_out_plan(config, AT_ONCE)
    columns = inputs.caption_columns(config)
    made_of = [source.fingerprint(), count, plan.resolution, plan.resizer, dataclasses.asdict(plan.captions), columns.names,
               dict(columns.labels or {}), network.fingerprint]  # fmt: skip
    fingerprint = digest(made_of)
    path = folder / f"reference-{fingerprint}.npz"
    if path.is_file():
        with np.load(path) as kept:
            return Reference(kept["features"], json.loads(str(kept["captions"])), fingerprint)
    seen = [(network.extract(images)[:some], captions) for images, captions, some in _groups(_pictures(config, source, count))]
    features, captions = np.concatenate([f for f, _ in seen]), [caption for _, some in seen for caption in some]
    file = io.BytesIO()
    np.savez(file, features=features, captions=json.dumps(captions))
    write_atomically(path, [file.getbuffer()])
    return Reference(features, captions, fingerprint)


def _pictures(config: Config, source: Source, count: int) -> Iterator[Captioned]:
    """The examples of the held-out loss, in its order, some at a time."""
    plan, tally = held_out_plan(config, AT_ONCE), BadTally(config.data.max_bad_fraction)
    load = lambda position, index: load_example(source, plan, int(position), int(index))
    with ThreadPoolExecutor(READERS) as readers:
        for number in range(math.ceil(count / AT_ONCE)):
            _, positions, indexes = step_examples(source, plan, number)
            wanted = count - number * AT_ONCE
            loaded = list(readers.map(load, positions[:wanted], indexes[:wanted]))
            tally.add(len(loaded), [one.bad[0] for one in loaded if one.bad])
            yield np.stack([one.picture.image for one in loaded]), [one.caption for one in loaded]


def _groups(parts: Iterable[Captioned]) -> Iterator[tuple[np.ndarray, list[str], int]]:
    """(AT_ONCE images, the captions of those that count, how many count); the last are filled up with the last image."""
    images, captions = [], []

    def group(count: int) -> tuple[np.ndarray, list[str], int]:
        some, texts = images[:count], captions[:count]
        del images[:count], captions[:count]
        return np.stack(some + some[-1:] * (AT_ONCE - len(some))), texts, len(texts)

    for some, texts in parts:
        images += list(some)
        captions += texts
        while len(images) >= AT_ONCE:
            yield group(AT_ONCE)
    if images:
        yield group(len(images))


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is seen of drawings: features float32 [n d], scores float32 [n] where CLIP looks, and the first, uint8 [m h w 3]."""

    features: np.ndarray
    scores: np.ndarray | None
    first: np.ndarray


def look(drawings: Iterable[Captioned], network: FeatureNetwork, clip: CLIPEmbedder | None) -> Seen:
    """Look at drawings beside what they are of.

    A score is 100 times the cosine of CLIP's embeddings, or 0 where that is less (Hessel et al. 2021; the factor is
    torchmetrics').
    """
    features, scores, first = [], [], []
    for images, captions, count in _groups(drawings):
        features.append(network.extract(images)[:count])
        if clip is not None:
            texts = clip.texts(captions + captions[-1:] * (AT_ONCE - count))
            scores.append(np.maximum(100 * (clip.images(images) * texts).sum(1), 0)[:count])
        first += list(images[: min(count, SHOWN - len(first))])
    return Seen(np.concatenate(features), np.concatenate(scores) if scores else None, np.stack(first))


@dataclasses.dataclass(frozen=True)
class Programs:
    """What is compiled once for all weights of the same networks.

    Attributes:
        drawings: guidance scale -> (weights, constants, request) -> images uint8 [n h w 3], whole on every device.
        task: the networks, all of them trained, so that their weights are given.
        sums: (weights, constants, batch) -> the sums of the examples' losses, and of `counted`.
        num_timesteps: of the noise schedule.
    """

    drawings: dict[float, Any]
    task: Task
    sums: Any
    num_timesteps: int


def make_programs(config: Config, layout: Layout, pipeline: Pipeline, scales: Sequence[float]) -> Programs:
    """The programs for these guidance scales; nothing is compiled yet.

    Raises:
        ValueError: for a pipeline that cannot be drawn with in this way, as `build.make_draw`.
    """
    networks = {name: part.network for name, part in pipeline.networks()}
    if inpaints(networks):
        raise ValueError("an inpainting model draws into images, and cannot be evaluated (allowed: one that draws prompts)")
    schedule = noise_schedule(pipeline.scheduler)
    # Unweighted, without whatever training does to its noise and captions.
    losses = diffusion_losses(networks, Objective(), schedule)
    tokenizers = {name: one for name in ("tokenizer", "tokenizer_2") if (one := getattr(pipeline, name)) is not None}
    whole = NamedSharding(layout.mesh, PartitionSpec())
    constants = {"frozen": {}, **jax.device_put(empty_ids(tokenizers), whole)}
    task = Task(networks, tuple(networks), dict, constants, tokenizers, losses,
                lambda *given: {"loss": losses(*given)}, 0.0)  # fmt: skip
    drawings = {scale: _drawing(config, layout, pipeline, scale) for scale in scales}
    return Programs(drawings, task, sums_of(task.measures, layout, task), schedule.num_timesteps)


def _drawing(config: Config, layout: Layout, pipeline: Pipeline, scale: float) -> Any:
    networks = {name: part.network for name, part in pipeline.networks()}
    section = dataclasses.replace(config.sampling, guidance_scale=scale)
    draw = build.make_draw(dataclasses.replace(config, sampling=section), networks, pipeline.scheduler)
    return jax.jit(build.drawing_on(layout, networks, draw), out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


def make_drawings(
    config: Config, layout: Layout, program: Any, pipeline: Pipeline, captions: Sequence[str]
) -> Iterator[Captioned]:
    """Drawings and what they are of, some at a time; the i-th is of the i-th caption, from the noise of seed + i.

    Every process draws, and gets all.
    """
    weights = _weights(pipeline)
    shards = build.batch_shards(layout.mesh)
    at_once = min(config.batch.per_device_batch_size, math.ceil(len(captions) / shards)) * shards

    def drawn(first: int) -> tuple[jax.Array, list[str]]:
        some = list(captions[first : first + at_once])
        filled = some + some[-1:] * (at_once - len(some))
        seeds = [(config.run.seed + first + i) % 2**32 for i in range(at_once)]
        request = requests(pipeline, filled, [config.sampling.negative_prompt] * at_once, seeds=seeds)
        return program(weights, {}, build.whole_request(layout.mesh, request)), some

    for images, some in one_behind(map(drawn, range(0, len(captions), at_once))):
        yield np.asarray(images)[: len(some)], some


def losses_by_timestep(config: Config, layout: Layout, programs: Programs, pipeline: Pipeline, source: Source,
                       key: jax.Array, times: Sequence[int]) -> dict[int, float]:  # fmt: skip
    """Timestep -> the mean loss there of the held-out examples, which has no unit: the mean squared error of a latent.

    Args:
        key: the run's, which decides the noise: at each timestep it is that of the held-out loss.
    """
    task, weights = programs.task, _weights(pipeline)
    whole, split = NamedSharding(layout.mesh, PartitionSpec()), build.batch_sharding(layout.mesh)
    constants = {**task.constants, "key": jax.random.fold_in(key, HELD_OUT)}
    levels = {t: jax.device_put(np.int32(t), whole) for t in times}
    total, examples = dict.fromkeys(times, 0.0), 0.0
    for batch in each_held_out_batch(config, layout, task, source):
        placed = build.place(split, batch)
        sums = jax.device_get([programs.sums(weights, {**constants, "t": t}, placed) for t in levels.values()])
        for t, found in zip(times, sums, strict=True):
            total[t] += float(found["loss"])
        examples += float(sums[0]["counted"])
    return {t: loss / examples for t, loss in total.items()}


def timesteps(total: int, count: int) -> list[int]:
    """The middles of `count` equal parts of 0 to total - 1; all of them if there are no more."""
    count = min(count, total)
    return [int((i + 0.5) * total / count) for i in range(count)]


def _weights(pipeline: Pipeline) -> dict[str, Params]:
    return {name: part.params for name, part in pipeline.networks()}
