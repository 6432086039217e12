"""How good a run is by now: held-out examples measured always at the same noise, and pictures."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiff import build, inputs
from maxdiff.config import Config
from maxdiff.data.examples import Source
from maxdiff.data.pipeline import Batch, BatchPlan, load_batch
from maxdiff.draw import requests
from maxdiff.gradients import Measures, outputs_function, sums_function
from maxdiff.images import grid, write_png
from maxdiff.losses import from_uint8, latent_moments, reconstruct, to_uint8
from maxdiff.metrics import METRICS, Metrics, read_metrics
from maxdiff.models.network import Params
from maxdiff.sharding import Layout
from maxdiff.state import TrainState
from maxdiff.task import Task

# Folded into the seed's key, where training folds in the number of a step.
HELD_OUT = 2**32 - 1
# How many images an autoencoder shows, above what it makes of them.
SHOWN = 8

Judge = Callable[[int, TrainState, Metrics], None]
# weights -> images uint8 [n h w 3] for a grid of so many columns
Draw = Callable[[Params], tuple[np.ndarray, int | None]]


def make_judge(config: Config, layout: Layout, task: Task, key: jax.Array) -> Judge:
    """judge(step, state, metrics): measure, log and draw, with the average weights if there are any.

    Args:
        key: the run's, whole on every device.

    Raises:
        ValueError, OSError: if the held-out examples cannot be read, or a drawing is not possible.
    """
    examples: list[Batch] = []
    if config.data.eval_data_dir:
        examples = held_out_batches(config, layout, task, inputs.open_examples(config, "eval_data_dir"))
    if config.model.train_vae:
        draw = _reconstructions(layout, task, examples) if examples else None
    else:
        draw = _drawings(config, layout, task) if config.sampling.validation_prompts else None
    sums = sums_of(task.measures, layout, task)

    def judge(step: int, state: TrainState, metrics: Metrics) -> None:
        weights = exported(layout, task, state)
        if examples:
            metrics.log_held_out(step, mean_of(sums, weights, task, examples, layout, key))
        if draw is not None and is_drawn(config, step):
            images, columns = draw(weights)
            sheet = grid(images, columns)
            metrics.image(step, "samples", sheet)
            if jax.process_index() == 0:
                path = picture(config, step)
                write_png(path, sheet, {"step": str(step), "prompts": "\n".join(config.sampling.validation_prompts)})
                print(f"wrote {config.run.shown(path)}", flush=True)

    return judge


def is_due(config: Config, step: int, last: int) -> bool:
    """Whether the run is judged after this step; 0: before the first, to compare with."""
    every = config.output.eval_every
    return step in (0, last) or (every > 0 and step % every == 0)


def is_judged(config: Config, step: int) -> bool:
    """Whether the run's folder has what the judge says of this step."""
    folder = config.run.folder
    if config.data.eval_data_dir:
        records = read_metrics(folder) if (folder / METRICS).is_file() else []
        return any(record["step"] == step and any(key.startswith("held_out_") for key in record) for record in records)
    return not (config.sampling.validation_prompts and is_drawn(config, step)) or picture(config, step).is_file()


def is_drawn(config: Config, step: int) -> bool:
    """Whether pictures of a step show anything: before the first, weights that are trained already do, random ones don't."""
    return step > 0 or not {"unet", "vae"} & config.model.new.keys()


def picture(config: Config, step: int) -> Path:
    """Where the judge draws."""
    return config.run.folder / "samples" / f"step-{step:06d}.png"


def exported(layout: Layout, task: Task, state: TrainState) -> Params:
    """The weights that a run is judged by and ends with: the average if there is one, lying as the parameters do."""
    if state.ema is None:
        return state.params
    # It may be split further than they are, see shard_optimizer.
    return jax.device_put(state.ema, {name: layout.shardings(task.networks[name]) for name in task.trained})


def held_out_batches(config: Config, layout: Layout, task: Task, source: Source) -> list[Batch]:
    """As `each_held_out_batch`, all in memory: they are measured again and again."""
    return list(each_held_out_batch(config, layout, task, source))


def each_held_out_batch(config: Config, layout: Layout, task: Task, source: Source) -> Iterator[Batch]:
    """The first `eval_examples` of a source's order, for this process, in batches of what the devices take at once.

    The last is filled up with other examples, whose `counted` is 0.
    """
    at_once = config.batch.per_device_batch_size * build.batch_shards(layout.mesh)
    plan = held_out_plan(config, at_once, build.batch_part(layout.mesh))
    examples = min(config.data.eval_examples, len(source))
    for number in range(-(-examples // at_once)):
        batch, _ = load_batch(source, list(task.tokenizers.values()), plan, number)
        # Noise is drawn by position, so this is the one in the order: whatever the devices take at once, it is the same.
        position = batch["position"] + np.int32(number * at_once)
        yield {**batch, "position": position, "counted": (position < examples).astype(np.float32)}


def held_out_plan(config: Config, at_once: int, part: tuple[int, int] = (0, 1)) -> BatchPlan:
    """Which held-out examples there are, in which order: the same for whatever looks at them, and whatever the run's seed."""
    captions = dataclasses.replace(inputs.make_plan(config).captions, shuffle_tags=False, tag_dropout=0.0)
    return BatchPlan(0, at_once, config.data.resolution, captions=captions, process_index=part[0], process_count=part[1],
                     resizer=config.data.image_resizer)  # fmt: skip


def sums_of(measures: Measures, layout: Layout, task: Task) -> Any:
    """(weights, constants, batch) -> the sums of these measures, and of `counted`; jitted."""

    def counted(params: Params, constants: Any, batch: Any) -> dict[str, jax.Array]:
        return {**measures(params, constants, batch), "counted": batch["counted"]}

    return jax.jit(sums_function(counted, layout.mesh, build.trained_specs(layout, task)))


def mean_of(sums: Any, weights: Params, task: Task, batches: list[Batch], layout: Layout, key: jax.Array) -> dict[str, float]:
    """The mean of each measure over the examples that count, at noise that `key` alone decides."""
    total: dict[str, float] = {}
    constants = {**task.constants, "key": jax.random.fold_in(key, HELD_OUT)}
    for batch in batches:
        found = sums(weights, constants, build.place(build.batch_sharding(layout.mesh), batch))
        for name, value in jax.device_get(found).items():
            total[name] = total.get(name, 0.0) + float(value)
    examples = total.pop("counted")
    return {name: value / examples for name, value in total.items()}


def latent_scale(config: Config, layout: Layout, task: Task, weights: Params, source: Source, key: jax.Array) -> float:
    """The factor that gives an autoencoder's latents of a source's first examples a variance of 1."""
    batches = held_out_batches(config, layout, task, source)
    moments = functools.partial(latent_moments, task.networks["vae"])
    measured = mean_of(sums_of(moments, layout, task), weights, task, batches, layout, key)
    return float((measured["square"] - measured["mean"] ** 2) ** -0.5)


def _drawings(config: Config, layout: Layout, task: Task) -> Draw:
    """The validation prompts, each always from the same noise: that which generate.py draws it from."""
    sampling = config.sampling
    prompts = list(sampling.validation_prompts)
    # Filled up, so that every device draws as many.
    wanted = len(prompts) + -len(prompts) % build.batch_shards(layout.mesh)
    filled = prompts + prompts[-1:] * (wanted - len(prompts))
    request = requests(task.pipeline({name: {} for name in task.trained}), filled, [sampling.negative_prompt] * wanted,
                       seeds=[config.run.seed + i for i in range(wanted)])  # fmt: skip
    draw = build.make_draw(config, task.networks, task.scheduler)
    outputs = _outputs(lambda p, c, b: draw({**c["frozen"], **p}, b), layout, task)
    placed = build.whole_request(layout.mesh, request)
    return lambda weights: (np.asarray(outputs(weights, task.constants, placed))[: len(prompts)], None)


def _reconstructions(layout: Layout, task: Task, examples: list[Batch]) -> Draw:
    """The first held-out images and, below them, what the autoencoder makes of them."""

    def pair(params: Params, constants: Any, batch: Any) -> jax.Array:
        del constants
        images = from_uint8(batch["image"])
        return jnp.stack([batch["image"], to_uint8(reconstruct(task.networks["vae"], params["vae"], images))], 1)

    outputs = _outputs(pair, layout, task)
    placed = build.place(build.batch_sharding(layout.mesh), examples[0])

    def draw(weights: Params) -> tuple[np.ndarray, int]:
        pairs = np.asarray(outputs(weights, task.constants, placed))[:SHOWN]
        return np.concatenate([pairs[:, 0], pairs[:, 1]]), len(pairs)

    return draw


def _outputs(function: Any, layout: Layout, task: Task) -> Any:
    """(weights, constants, batch) -> what `function` makes of each example, whole on every device; jitted."""
    outputs = outputs_function(function, layout.mesh, build.trained_specs(layout, task))
    return jax.jit(outputs, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))
