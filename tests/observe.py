"""What the keys of a configuration bring about, through the product's own functions; for test_keys.py."""

import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxdiff import build, command, evaluate, generate, health, inputs, judge, measure, processes, rollback
from maxdiff.checkpoint import Checkpoints
from maxdiff.config import Config, write_config
from maxdiff.data import encode
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.pipeline import load_batch, load_example
from maxdiff.diffusion.objective import drop_caption, noisy_batch
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.metrics import read_metrics
from maxdiff.models.layers import Linear
from maxdiff.models.network import Network, flatten
from maxdiff.task import Task, make_objective, make_task
from maxdiff.train import train
from maxdiff.weights.tensors import open_tensors


def refusal(action: Callable[[], Any]) -> str:
    """What a user is told; "" where nothing is wrong."""
    try:
        action()
    except (ValueError, OSError) as error:
        return str(error)
    return ""


# --- Run ---------------------------------------------------------------------------------------------------------


def made_folder(config: Config) -> str:
    folder = build.make_folder(config)
    assert folder.is_dir()
    return str(folder)


def joined(config: Config) -> Any:
    with mock.patch("jax.distributed.initialize") as initialize:
        told = refusal(lambda: processes.start(config.run))
    return told, [call.kwargs for call in initialize.call_args_list]


def compiled_programs(config: Config) -> Any:
    """Where jax keeps them, once a run has begun; it fails soon after."""
    kept = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    try:
        assert refusal(lambda: train(config))
        return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


def flags(variable: str) -> Callable[[Config], str]:
    """What a command that is given the configuration finds set."""

    def observe(config: Config) -> str:
        found: list[str] = []
        path = config.run.folder / "given.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_config(config))
        with mock.patch.dict("os.environ", {variable: "--others"}):
            assert command.run("test", [str(path)], lambda _: found.append(os.environ[variable])) == 0
        return found[0]

    return observe


class One(nnx.Module):
    """[b 16] -> [b 16]."""

    def __init__(self, config: Any, compute: Any):
        self.linear = Linear(16, 16, compute, ("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def small_task(*names: str) -> Task:
    network = Network(One, None)
    losses = lambda params, constants, batch: jnp.square(network.apply(params["unet"], batch["x"]) - 1).mean(1)
    initial = lambda: {name: jax.tree.map(np.asarray, network.init(0)) for name in names}
    return Task(dict.fromkeys(names, network), names, initial, {}, {}, losses, lambda *_: {}, 1.0)


def begun(config: Config) -> int:
    layout, task = build.layout_of(config), small_task("unet")
    optimizer = build.make_adam(config, build.make_rates(config, task))
    abstract = build.abstract_of(config, layout, task, optimizer)
    folder = config.run.folder.parent / "another"
    with Checkpoints(folder / "checkpoints") as others, Checkpoints(config.run.folder / "none") as ours:
        if not others.steps():
            alone = dataclasses.replace(config, run=dataclasses.replace(config.run, resume_from=""))
            fresh = build.begin(alone, task, optimizer, abstract, ours)
            others.save(3, dataclasses.replace(fresh, step=fresh.step + 3))
            others.wait()
        return int(build.begin(config, task, optimizer, abstract, ours).step)


# --- Model -------------------------------------------------------------------------------------------------------


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float32) for _, leaf in flatten(tree)]


def task_of(config: Config) -> Task:
    return make_task(config, build.layout_of(config), None)


def task_refused(config: Config) -> str:
    return refusal(lambda: task_of(config))


def trained(config: Config) -> list[str]:
    return list(task_of(config).trained)


def empty_ids(config: Config) -> Any:
    constants = task_of(config).constants
    return [np.asarray(constants[name]) for name in sorted(constants) if name.startswith("empty_ids")]


def weights_dtypes(config: Config) -> set[str]:
    task = task_of(config)
    return {leaf.dtype.name for leaf in jax.tree.leaves((task.initial(), task.constants["frozen"]))}


def weights(part: str) -> Callable[[Config], Any]:
    def observe(config: Config) -> Any:
        task = task_of(config)
        return numbers(task.initial()[part] if part in task.trained else task.constants["frozen"][part])

    return observe


def shapes(part: str) -> Callable[[Config], Any]:
    return lambda config: [spec.shape for spec in task_of(config).networks[part].specs.values()]


def computed(config: Config) -> str:
    """The UNet's program, forward and backward, or why there is none."""
    network = task_of(config).networks["unet"]
    inputs = (jnp.zeros((1, 8, 8, 4)), jnp.zeros(1, jnp.int32), jnp.zeros((1, 77, 32)))
    total = lambda params: network.apply(params, *inputs).astype(jnp.float32).sum()
    try:
        program = str(jax.make_jaxpr(jax.grad(total))(network.abstract()))
        return re.sub("0x[0-9a-f]+", "", program)  # of Python's functions
    except ValueError as error:
        return str(error)


# --- Data, length and batch --------------------------------------------------------------------------------------


def examples(config: Config) -> Any:
    source = inputs.open_examples(config, "train_data_dir")
    return len(source), source[0].texts


def encoded(config: Config) -> Any:
    """What training reads: where it is encoded, and in which dtype."""
    source, _ = encode.settle(config, task_of(config), inputs.open_training(config))
    return (source.folder, source.shapes()["mean"][1]) if isinstance(source, EncodedSource) else None


def encoded_new(config: Config) -> Any:
    """As `encoded`, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        _, dtype = encoded(dataclasses.replace(config, data=dataclasses.replace(config.data, encoded_dir=folder)))
        return dtype


def opened(config: Config) -> str:
    return refusal(lambda: inputs.open_examples(config, "train_data_dir"))


def captions(config: Config) -> Any:
    """The first example's captions at several positions."""
    source, plan = inputs.open_examples(config, "train_data_dir"), inputs.make_plan(config)
    return [load_example(source, plan, position, 0).caption for position in range(20)]


def index_files(config: Config) -> list[Path]:
    inputs.open_examples(config, "train_data_dir")
    return sorted(config.run.folder.parent.parent.rglob("indexes/*"))


def batch(config: Config) -> np.ndarray:
    source = inputs.open_examples(config, "train_data_dir")
    made, _ = load_batch(source, [], inputs.with_buckets(config, inputs.make_plan(config), source), 0)
    return made["image"]


def indexes(config: Config) -> np.ndarray:
    made, _ = load_batch(inputs.open_examples(config, "train_data_dir"), [], inputs.make_plan(config), 0)
    return made["index"]


def workers(config: Config) -> int:
    source, plan = inputs.open_examples(config, "train_data_dir"), inputs.make_plan(config)
    with mock.patch("subprocess.Popen", wraps=subprocess.Popen) as started:
        made: Any = inputs.make_batches(config, source, [], plan)
        next(made)
        made.close()
    return started.call_count


def many_batches(config: Config) -> str:
    source, plan = inputs.open_examples(config, "train_data_dir"), inputs.make_plan(config)
    made: Any = inputs.make_batches(config, source, [], plan)
    told = refusal(lambda: [next(made) for _ in range(20)])
    made.close()
    return told


def held_out(config: Config) -> float:
    layout, source = build.layout_of(config), inputs.open_examples(config, "train_data_dir")
    config, _ = build.settle_batch(config, layout.mesh)
    batches = judge.held_out_batches(config, layout, small_task("unet"), source)
    return sum(float(batch["counted"].sum()) for batch in batches)


def settled(config: Config) -> Any:
    mesh = build.mesh_of(config)
    config, accumulation = build.settle_batch(config, mesh)
    return accumulation, inputs.abstract_batch(inputs.make_plan(config), [], build.batch_sharding(mesh))["image"].shape


# --- Optimizer ---------------------------------------------------------------------------------------------------


def updates(config: Config) -> Any:
    """What the first updates do to a kernel and a bias of two networks, and in which dtypes the moments are kept."""
    rates = build.make_rates(config, small_task("unet", "text_encoder"))
    optimizer = build.make_adam(config, rates)
    params = {name: {"kernel": jnp.full((2, 2), 0.5), "bias": jnp.full(2, 0.3)} for name in rates}
    state, seen = optimizer.init(params), []
    for step in range(4):
        gradients = jax.tree.map(lambda p, step=step: (p - 0.1 * step) * 3, params)
        moved, state = optimizer.update(gradients, state, params)
        params = jax.tree.map(jnp.add, params, moved)
        seen += numbers(params)
    return seen, [leaf.dtype.name for leaf in jax.tree.leaves(state)]


def state_of(config: Config) -> Any:
    task = small_task("unet")
    optimizer = build.make_adam(config, build.make_rates(config, task))
    abstract = build.abstract_of(config, build.layout_of(config), task, optimizer)
    return [(leaf.shape, str(leaf.sharding.spec)) for leaf in jax.tree.leaves(abstract)]


def average(config: Config) -> Any:
    """The average's distance from the weights after three steps."""
    layout, task = build.layout_of(config), small_task("unet")
    optimizer = build.make_adam(config, build.make_rates(config, task))
    abstract = build.abstract_of(config, layout, task, optimizer)
    step = build.make_step(config, layout, task, optimizer, abstract, 1)
    with Checkpoints(config.run.folder / "none") as none:
        state = build.begin(config, task, optimizer, abstract, none)
    inputs = build.place(build.batch_sharding(layout.mesh), {"x": np.ones((8, 16), np.float32)})
    for _ in range(3):
        state, _ = step(state, {}, inputs, jax.random.key(0))
    return numbers(jax.tree.map(jnp.subtract, state.ema, state.params))


# --- Objective ---------------------------------------------------------------------------------------------------


def noised(config: Config) -> Any:
    schedule = noise_schedule(task_of(config).scheduler)
    objective = make_objective(config, schedule)
    key, positions = jax.random.key(0), jnp.arange(16)
    made = noisy_batch(objective, schedule, jnp.ones((16, 2, 2, 4)), key, positions)
    return [np.asarray(x) for x in (*made, drop_caption(objective, key, positions))]


def reconstruction_loss(config: Config) -> np.ndarray:
    task = task_of(config)
    images = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), np.uint8)
    inputs = {"image": jnp.asarray(images), "position": jnp.arange(2)}
    return np.asarray(task.losses(task.initial(), {"key": jax.random.key(0)}, inputs))


# --- Drawing -----------------------------------------------------------------------------------------------------


def drawn(config: Config) -> Any:
    """What generate.py asks of the sampler, and the files that it writes."""
    asked: list[Any] = []

    def sampler(networks: Any, scheduler: Any, settings: Any) -> Any:
        asked.append((scheduler.get("timestep_spacing"), scheduler.get("use_karras_sigmas"), dataclasses.astuple(settings)))
        size = (settings.height, settings.width, 3)
        return lambda weights, request: jnp.zeros((len(request["seed"]), *size), jnp.uint8)

    def request(*arguments: Any, **named: Any) -> Any:
        asked.append(requests(*arguments, **named))
        return asked[-1]

    def file(path: Any, *size: int) -> Any:
        asked.append(str(path))
        return np.zeros((*size, 1), np.float32)

    requests = generate.requests
    with (
        mock.patch.object(build, "draw_function", sampler),
        mock.patch.multiple(generate, requests=request, read_image=file, read_mask=file),
    ):
        return [path.name for path in generate.generate(config)], asked


def validated(config: Config) -> Any:
    """How many prompts a run's judge draws."""
    layout, task = build.layout_of(config), task_of(config)
    with mock.patch.object(judge, "requests", wraps=judge.requests) as asked:
        judge.make_judge(config, layout, task, jax.random.key(0))
    return [call.args[1] for call in asked.call_args_list]


# --- Evaluation --------------------------------------------------------------------------------------------------


def judged_by(config: Config) -> Any:
    """Which networks look at pictures, and whence they come."""
    names = ("inception", "efficientnet", "clip")
    with mock.patch.multiple(evaluate.features, **dict.fromkeys(names, mock.DEFAULT)) as made:
        evaluate.open_networks(config.evaluation)
        return {name: [call.args for call in one.call_args_list] for name, one in made.items()}


def judged(config: Config) -> Any:
    """What is drawn to be judged, and at which timesteps losses are measured."""
    times = measure.timesteps(1000, config.evaluation.eval_timesteps)
    return evaluate.wanted(config, ["a cat", "a dog"]), evaluate.guidance_scales(config), times


# --- Mesh --------------------------------------------------------------------------------------------------------


def mesh(config: Config) -> Any:
    try:
        made = build.mesh_of(config)
    except ValueError as error:
        return str(error)
    return list(made.shape.items())


@dataclasses.dataclass(frozen=True)
class Chip:
    """One of a TPU slice, as far as a mesh asks."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    core_on_chip: int = 0
    process_index: int = 0


def mesh_of_chips(config: Config) -> str:
    with mock.patch("jax.devices", return_value=[Chip(i, (i % 4, i // 4, 0)) for i in range(16)]):
        return refusal(lambda: build.mesh_of(config))


def split(config: Config) -> Any:
    layout, network = build.layout_of(config), Network(One, None)
    return [str(spec) for spec in layout.specs(network).values()]


def unsplit(config: Config) -> str:
    """Of a kernel of 1 KiB."""
    return refusal(lambda: build.layout_of(config).specs(Network(One, None)))


# --- Output ------------------------------------------------------------------------------------------------------


def traced(config: Config) -> list[int]:
    """The steps of ten that are recorded."""
    running, seen = [], []
    start = lambda folder: (running.append(1), (folder / "plugins" / "profile" / "1").mkdir(parents=True, exist_ok=True))
    with mock.patch("jax.profiler.start_trace", start), mock.patch("jax.profiler.stop_trace", running.clear):
        profiler = build.make_profiler(config, 0)
        for number in range(1, 11):
            profiler.step(number, None)
            seen += [number] * len(running)
        profiler.close()
    return seen


def saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def logged(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run) if "loss" in record]


def measured(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run) if "held_out_loss" in record]


def exported(run: Path) -> set[str]:
    return {
        str(tensor.dtype) for tensor in open_tensors(run / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors").values()
    }


def overdrawn(config: Config) -> str:
    """What becomes of an image of another way in the place of a new one."""
    drawn(dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, eta=0.5, overwrite=True)))
    try:
        drawn(config)
    except ValueError as error:
        return str(error)
    return "drawn"


def kept(config: Config) -> list[int]:
    """Of five checkpoints, the third the best."""
    shutil.rmtree(config.run.folder / "checkpoints", ignore_errors=True)
    with build.open_checkpoints(config) as checkpoints:
        checkpoints.losses |= {1: 0.5, 3: 0.1, 5: 0.2}
        for step in range(1, 8):
            checkpoints.save(step, {"x": jnp.zeros(2)})
        checkpoints.wait()
        return checkpoints.steps()


def bad_batch(config: Config) -> int:
    """The first bad one of a spike and three losses that are no number."""
    state = health.healthy()
    for loss in (*[1.0] * health.WARM_UP, 5.0, 1.0, np.nan, np.nan, np.nan):
        scalar = jnp.float32(loss)
        state = health.after_batch(state, build.make_guard(config), scalar, health.is_good(scalar, scalar))
    return int(state.bad_batch)


def rollback_limit(config: Config) -> str:
    return rollback.reached(config.safety, 2, [1])


def lost_after(config: Config) -> float:
    """Seconds after which another process is lost."""
    return build.make_peers(config, build.make_watch(config))._seconds


def watched(config: Config) -> int:
    """Threads that look after the run."""
    return len(build.make_watch(config)._threads)


def changed(config: Config) -> str:
    """Of a run that began with another seed."""
    config.run.folder.mkdir(parents=True, exist_ok=True)
    (config.run.folder / "config.yml").write_text(write_config(config).replace("seed: 0", "seed: 1"))
    return refusal(lambda: build.check_restart(config))
