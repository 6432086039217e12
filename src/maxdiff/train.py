"""The story of a run: configuration, mesh, task, state, data, step, loop.

    python train.py configs/base14.yml run_name=my_run output_dir=runs train_data_dir='shards/*.tar'

The run lies in output_dir/run_name: config.yml, data.json, checkpoints/, metrics/metrics.jsonl, tensorboard/, samples/ and
pipeline/, a diffusers folder. Starting the same command again goes on from the last checkpoint.
"""

import functools
import time
from collections.abc import Sequence

import jax

from maxdiff import build, command, inputs
from maxdiff.accelerators import peak_flops
from maxdiff.checkpoint import Checkpoints, has_checkpoints
from maxdiff.config import Config, write_config
from maxdiff.data.encode import settle
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.examples import Source
from maxdiff.data.pipeline import prefetch
from maxdiff.judge import exported, latent_scale, make_judge
from maxdiff.metrics import Metrics
from maxdiff.processes import check_shared, gather, say, start, wait_for_all
from maxdiff.sharding import Layout
from maxdiff.state import TrainState, describe
from maxdiff.task import Task, make_task
from maxdiff.weights.tensors import write_atomically


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def action(config: Config) -> None:
        start(config.run)
        train(config)

    return command.run("train.py", argv, action)


def train(config: Config) -> TrainState:
    """Run, or go on with, the training that a configuration describes; returns the last state.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before any training.
    """
    build.require(config, "run_name", "output_dir", "train_data_dir")
    folder = build.make_folder(config)
    check_shared(folder)
    build.use_cache(config)

    # Mesh: which devices, and how examples and parameters are split over them.
    layout = build.layout_of(config)
    mesh = layout.mesh
    config, accumulation = build.settle_batch(config, mesh)
    global_batch = config.batch.global_batch_size
    writes = jax.process_index() == 0  # the first of several processes does
    source = inputs.open_training(config)

    # Task: the networks, and the weights of those that are not trained. A run that goes on has them in pipeline/.
    goes_on = has_checkpoints(folder / "checkpoints")
    if goes_on:
        build.check_restart(config)
    task = make_task(config, layout, folder / "pipeline" if goes_on else None)
    source, task = settle(config, task, source)
    inputs.check_data(folder, source)
    for name in task.trained:
        say("\n".join([f"{name}:", *layout.describe(task.networks[name])]))
    key = build.run_key(config, mesh)
    judge = make_judge(config, layout, task, key)

    with Checkpoints(folder / "checkpoints", keep_last=config.output.checkpoints_to_keep) as checkpoints:
        # State: trained parameters, their average and moments, where the mesh has them.
        rates = build.make_rates(config, task)
        optimizer = build.make_adam(config, rates)
        abstract = build.abstract_of(config, layout, task, optimizer)
        say("\n".join(describe(abstract)))
        state = build.begin(config, task, optimizer, abstract, checkpoints)
        first, last = int(state.step), config.batch.steps(global_batch)
        if writes:
            write_atomically(folder / "config.yml", [write_config(config).encode()])
            if not goes_on:
                task.save_frozen(folder / "pipeline")

        if first >= last:
            say(f"nothing is left to train: the run has made {first} of {last} steps")
            export(config, layout, task, state, source, key)
            return state

        # Data: from this step on, whatever came before.
        plan = inputs.with_buckets(config, inputs.make_plan(config, build.batch_part(mesh)), source)
        if plan.buckets:
            say("\n".join(plan.buckets.describe(global_batch)))
        tokenizers = list(task.tokenizers.values())
        split = build.batch_sharding(mesh)
        made = inputs.make_batches(config, source, tokenizers, plan, first)

        peak = peak_flops(mesh.devices.flat[0])
        with (
            Metrics(folder if writes else None, global_batch=global_batch, devices=mesh.size, flops=task.flops,
                    peak_flops=peak, first=first, last=last) as metrics,
            prefetch(made, functools.partial(build.place, split)) as batches,
        ):  # fmt: skip
            # Step: one program, compiled while the first batches are made.
            metrics.text("configuration", write_config(config))
            with metrics.untimed():
                started = time.perf_counter()
                step = build.make_step(config, layout, task, optimizer, abstract, accumulation)
                sizes = plan.buckets.shapes if plan.buckets else (None,)
                shapes = [inputs.abstract_batch(plan, tokenizers, split, source, size) for size in sizes]
                step = build.compile_step(step, abstract, task.constants, shapes, key)
                say(f"compiled in {time.perf_counter() - started:.1f} s")
                if first == 0:
                    judge(0, state, metrics)

            # Loop: nothing here waits for the device but the log steps.
            profiler = build.make_profiler(config, first)
            scalars, waited = None, 0.0
            for number in range(first + 1, last + 1):
                profiler.step(number, scalars)
                state, scalars = step(state, task.constants, next(batches), key)
                judged = number == last or (config.output.eval_every > 0 and number % config.output.eval_every == 0)
                if judged or number == first + 1 or number % config.output.log_period == 0:
                    values = {**jax.device_get(scalars), **build.current_rates(rates, number - 1)}
                    metrics.log(number, values, batches.seconds_waited - waited)
                    waited = batches.seconds_waited
                if number == last or due(number, global_batch, config.output.checkpoint_every):
                    checkpoints.save(number, state)
                if number == last:
                    checkpoints.wait()  # what is judged and exported after it may fail, and nothing is lost
                if judged:
                    with metrics.untimed():
                        judge(number, state, metrics)
            profiler.close()
    export(config, layout, task, state, source, key)
    return state


def due(step: int, global_batch: int, every: int) -> bool:
    """Whether this step is the first past a multiple of `every` examples."""
    return every > 0 and step * global_batch // every > (step - 1) * global_batch // every


def export(
    config: Config, layout: Layout, task: Task, state: TrainState, source: Source | EncodedSource, key: jax.Array
) -> None:
    """Write the trained networks, their average if there is one, into the run's `pipeline/`, a diffusers folder."""
    weights = exported(layout, task, state)
    if "vae" in config.model.new and config.model.train_vae and "scaling_factor" not in config.model.vae:
        assert not isinstance(source, EncodedSource)  # which trains no autoencoder
        task = task.with_latent_scale(latent_scale(config, layout, task, weights, source, key))
    weights = gather(weights)
    if jax.process_index() == 0:
        task.save_trained(config.run.folder / "pipeline", weights, config.output.export_dtype or config.model.weights_dtype)
        print(f"wrote {config.run.folder / 'pipeline'}", flush=True)
    wait_for_all("exported")
