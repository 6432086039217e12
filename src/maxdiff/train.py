"""The story of a run: configuration, mesh, task, state, data, step, loop.

    python train.py configs/base14.yml run_name=my_run output_dir=runs train_data_dir='shards/*.tar'

The run lies in output_dir/run_name: config.yml, data.json, checkpoints/, metrics/metrics.jsonl, tensorboard/, samples/ and
pipeline/, a diffusers folder; lock.json and heartbeat.json say who trains it now. Starting the same command again goes on
from the last checkpoint that is whole. docs/RUNNING.md says what happens when something goes wrong.
"""

import contextlib
import errno
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from maxdiff import build, command, inputs
from maxdiff.accelerators import peak_flops
from maxdiff.checkpoint import has_checkpoints, newest_step
from maxdiff.command import Lost
from maxdiff.config import Config, write_config
from maxdiff.data.encode import settle
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.examples import Source
from maxdiff.data.pipeline import prefetch
from maxdiff.judge import exported, is_due, is_judged, latent_scale, make_judge
from maxdiff.lock import RunLock
from maxdiff.loop import Loop
from maxdiff.metrics import METRICS, Metrics
from maxdiff.mirror import Mirror
from maxdiff.processes import agree, check_shared, gather, say, start, wait_for_all
from maxdiff.rollback import REPORT, roll_back
from maxdiff.sharding import Layout
from maxdiff.state import TrainState, describe
from maxdiff.stop import Signals
from maxdiff.task import Task, judges_images, make_task
from maxdiff.watch import Watch
from maxdiff.weights.tensors import write_atomically

# What a run that goes on reads of what it has written, beside its checkpoints.
WRITTEN = ("config.yml", "data.json", "pipeline", str(METRICS), REPORT)
# Of several processes the first may still be writing into a bucket when the others have ended. One that is lost, or fails,
# is not waited for (peers.py).
LAST_UPLOAD_SECONDS = 3600
# Errors that, before training, are no mistakes of the user's.
NO_MISTAKES, NO_MISTAKE_NUMBERS = (TimeoutError, ConnectionError, ChildProcessError), (errno.EIO, errno.ESTALE)


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def action(config: Config) -> None:
        start(config.run, LAST_UPLOAD_SECONDS)
        train(config)

    return command.run("train.py", argv, action)


def train(config: Config) -> TrainState:
    """Run, or go on with, the training that a configuration describes; returns the last state.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before any training; and ValueError during it for
            data that are bad beyond bounds, with a note of step and last checkpoint.
        Lost: for a disk, a bucket or a data worker that fails in training, with the same note, or that does not answer before.
        Stopped: after a signal, when all is saved.
    """
    watch = build.make_watch(config)
    with contextlib.ExitStack() as around:
        around.enter_context(build.make_peers(config, watch))  # the last to be left: it may end the process
        build.require(config, "run_name", "output_dir", "train_data_dir")
        build.make_folder(config)
        check_shared(config.run.place)
        build.use_cache(config)
        signals = around.enter_context(Signals())
        if jax.process_index() == 0:
            around.enter_context(RunLock(config.run.place))
        mirror = around.enter_context(Mirror(config.run, WRITTEN, uploads=jax.process_index() == 0))
        around.enter_context(watch)
        try:
            return _train(config, mirror, signals, watch)
        except Exception as error:
            trains = watch.made is not None
            if trains:  # what is wrong before is told in one line
                with contextlib.suppress(OSError):  # what failed may be that
                    watch.saved(newest_step(config.run.checkpoints))
                error.add_note(watch.place())
            if isinstance(error, OSError) and (trains or isinstance(error, NO_MISTAKES) or error.errno in NO_MISTAKE_NUMBERS):
                raise Lost("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
            raise


def _train(config: Config, mirror: Mirror, signals: Signals, watch: Watch) -> TrainState:
    # Mesh: which devices, and how examples and parameters are split over them.
    layout = build.layout_of(config)
    mesh = layout.mesh
    config, accumulation = build.settle_batch(config, mesh)
    global_batch = config.batch.global_batch_size
    writes = jax.process_index() == 0  # the first of several processes does
    source, folder = inputs.open_training(config), config.run.folder

    # Task: the networks, and the weights of those that are not trained. A run that goes on has them in pipeline/.
    goes_on = has_checkpoints(config.run.checkpoints)
    if goes_on:
        build.check_restart(config)
    task = make_task(config, layout, folder / "pipeline" if goes_on else None)
    with watch.busy("encoding"):
        source, task = settle(config, task, source)
    inputs.check_data(folder, source, may_change=config.safety.allow_config_change or not goes_on)
    for name in task.trained:
        say("\n".join([f"{name}:", *layout.describe(task.networks[name])]))
    key = build.run_key(config, mesh)
    judge = make_judge(config, layout, task, key)

    with signals.held():
        opened = build.open_checkpoints(config)
    with opened as checkpoints:
        # State: trained parameters, their average and moments, where the mesh has them.
        rates = build.make_rates(config, task)
        optimizer = build.make_adam(config, rates)
        abstract = build.abstract_of(config, layout, task, optimizer)
        say("\n".join([*describe(abstract), *build.left_whole(config, mesh, task, abstract)]))
        with signals.held():
            state = build.begin(config, task, optimizer, abstract, checkpoints)
        first, last = int(state.step), config.batch.steps(global_batch)
        if checkpoints.steps():
            watch.saved(checkpoints.steps()[-1])
        if writes:
            write_atomically(folder / "config.yml", [write_config(config).encode()])
            if not goes_on:
                task.save_frozen(folder / "pipeline")
            with watch.busy("upload"):
                mirror.upload()  # no checkpoint without them

        logged = Metrics(folder if writes else None, global_batch=global_batch, devices=mesh.size, flops=task.flops,
                         peak_flops=peak_flops(mesh.devices.flat[0]), first=first, last=last)  # fmt: skip
        # A start before this one may have saved the step, and ended before it was judged.
        owes = is_due(config, first, last) and agree(not (writes and is_judged(config, first)))
        if isinstance(source, EncodedSource) and not judges_images(config):
            task = task.without_frozen(text=source.has_text)
        if first >= last:
            say(f"nothing is left to train: the run has made {first} of {last} steps")
            with logged as metrics, watch.busy("evaluation"):
                if owes:
                    judge(first, state, metrics)
            with watch.busy("export"):
                export(config, layout, task, state, source, key)
            return state

        # Data: from this step on, whatever came before.
        plan = inputs.with_buckets(config, inputs.make_plan(config, build.batch_part(mesh)), source)
        if plan.buckets:
            say("\n".join(plan.buckets.describe(global_batch)))
        tokenizers = list(task.tokenizers.values())
        split = build.batch_sharding(mesh)

        with logged as metrics, watch.reporting(metrics.age):
            metrics.text("configuration", write_config(config))
            profiler = build.make_profiler(config, first)
            loop, goes_back = None, True
            while goes_back:
                made = inputs.make_batches(config, source, tokenizers, plan, int(state.health.batch))
                with prefetch(made, functools.partial(build.place, split)) as batches:
                    # Step: one program, compiled while the first batches are made.
                    if loop is None:
                        with metrics.untimed(), watch.busy("compilation"):
                            started = time.perf_counter()
                            step = build.make_step(config, layout, task, optimizer, abstract, accumulation)
                            sizes = plan.buckets.shapes if plan.buckets else (None,)
                            shapes = [inputs.abstract_batch(plan, tokenizers, split, source, size) for size in sizes]
                            with ThreadPoolExecutor(1) as beside:
                                ready = beside.submit(checkpoints.prepare, abstract)
                                step = build.compile_step(step, abstract, task.constants, shapes, key)
                                ready.result()
                            say(f"compiled in {time.perf_counter() - started:.1f} s")
                            if owes:
                                judge(first, state, metrics)
                                checkpoints.losses |= metrics.held_out_losses
                        loop = Loop(config, step, task.constants, key, rates, last, checkpoints, metrics, judge, profiler,
                                    signals, watch)  # fmt: skip
                    # Loop: nothing in it waits for the device but the steps that are logged or saved.
                    signals.defer(int(state.health.batch))
                    state, goes_back = loop.run(state, batches)
                if goes_back:
                    with watch.busy("rollback"):
                        state = roll_back(config, checkpoints, abstract, state, source, plan)
                    metrics.go_back(int(state.step))
            profiler.close()
    with watch.busy("export"):
        export(config, layout, task, state, source, key)
    return state


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
        print(f"wrote {config.run.place / 'pipeline'}", flush=True)
    wait_for_all("exported")
