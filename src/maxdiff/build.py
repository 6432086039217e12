"""From a configuration to the parts of a run that train.py puts together."""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff import bucket
from maxdiff.checkpoint import Checkpoints, has_checkpoints, restore_latest
from maxdiff.config import SECTIONS, Config, flat, load_config
from maxdiff.diffusion.sampler_config import KEYS, sampler_name, with_zero_snr
from maxdiff.draw import Draw, DrawConfig, draw_function
from maxdiff.gradients import BATCH_AXES, gradient_function, norm_function, outputs_function
from maxdiff.health import Guard
from maxdiff.metrics import METRICS, read_metrics
from maxdiff.models.network import Network, Params, unflatten
from maxdiff.models.unet import UNetConfig
from maxdiff.optim import Schedule, learning_rate_schedule, make_optimizer
from maxdiff.peers import Peers
from maxdiff.processes import say
from maxdiff.profiler import Profiler
from maxdiff.sharding import Layout, make_mesh
from maxdiff.state import TrainState, abstract_state, make_state, state_shardings
from maxdiff.step import Ema, ShardedUpdate, make_train_step
from maxdiff.task import Task, fused_kernels
from maxdiff.watch import Watch

# Programs of a bucket each, which take gigabytes in the making.
COMPILED_AT_ONCE = 4
# Keys of where and on what a run goes on, which may be others each time.
HERE = {"output_dir", "jax_cache_dir", "resume_from", "skip_jax_distributed_system", "coordinator_address", "num_processes",
        "process_id", "libtpu_init_args"}  # fmt: skip
# Keys that say what its networks and its state are.
STORED = {field.name for field in dataclasses.fields(SECTIONS["model"])} | {"optimizer", "moment_dtype", "use_ema"}
STORED -= {"activations_dtype", "precision", "attention", "norms", "remat"}
# Keys that decide which examples and noise a step has, and what its loss is. Where the data lie is no part of it: whether they
# are the same is seen by their contents (`inputs.check_data`).
EXACT = {field.name for section in ("data", "objective") for field in dataclasses.fields(SECTIONS[section])}
EXACT -= {"train_data_dir", "dataset_type", "train_split", "dataset_save_location", "data_workers", "max_bad_fraction",
          "encoded_dir", "encoded_dtype", "cache_latents_text_encoder_outputs", "eval_data_dir", "eval_examples"}  # fmt: skip
EXACT |= {"seed", "global_batch_size"}


def require(config: Config, *keys: str) -> None:
    """Raise ValueError for one of these keys that has no value; data_mix serves for train_data_dir."""
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    for key in keys:
        if key == "train_data_dir" and config.data.data_mix:
            continue
        if not next(getattr(section, key) for section in sections if hasattr(section, key)):
            raise ValueError(f"{key} is required")


def use_cache(config: Config) -> None:
    """Have programs compiled once and for all, in jax_cache_dir if there is one."""
    if config.run.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.run.jax_cache_dir)


def make_folder(config: Config) -> Path:
    """The run's folder, made if need be; raises ValueError where nothing can be written, there or in its bucket."""
    folder = config.run.folder
    if bucket.is_bucket(config.run.output_dir):
        bucket.check_writable(config.run.place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except OSError as error:
        raise ValueError(f"output_dir={config.run.output_dir!r} cannot be written to: {error}") from error
    return folder


def mesh_of(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The devices, by default all, in the shape that the configuration asks for; raises ValueError as `make_mesh`."""
    section = config.mesh
    return make_mesh(section.mesh_axes, section.sizes("ici"), section.sizes("dcn"), devices=devices,
                     allow_split_physical_axes=section.allow_split_physical_axes)  # fmt: skip


def layout_of(config: Config, devices: Sequence[Any] | None = None) -> Layout:
    """What the configuration's rules make of its mesh; raises ValueError as `make_mesh` and `Layout`."""
    return Layout(mesh_of(config, devices), config.mesh.logical_axis_rules, config.mesh.max_replicated_mib)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where the examples of a batch lie: split over the mesh axes data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in mesh.shape)))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the examples of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.shape)


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """(which part of each batch this process loads, how many parts there are).

    Processes whose devices have the same examples, as with a tensor axis across them, load the same part. Where the
    mesh gives a process rows that don't follow each other, it still loads one part: each example carries its position.

    Raises:
        ValueError: if two processes share some of their examples and not all, or have different numbers of them.
    """
    held: dict[int, set[int]] = {}
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((batch_shards(mesh),)).items():
        held.setdefault(device.process_index, set()).add(rows.start or 0)
    parts = sorted({tuple(sorted(shards)) for shards in held.values()})
    if sum(map(len, parts)) != batch_shards(mesh) or len(set(map(len, parts))) > 1:
        raise ValueError(f"the mesh {dict(mesh.shape)} does not split a batch evenly over {len(held)} processes")
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def place(sharding: NamedSharding, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A global batch on its devices, from each process's part of it; `index` is for people and stays behind."""
    return {key: jax.make_array_from_process_local_data(sharding, x) for key, x in batch.items() if key != "index"}


def settle_batch(config: Config, mesh: Mesh) -> tuple[Config, int]:
    """(the configuration with its global batch written out, accumulation steps).

    A run keeps the global batch that its first start had, which is in its config.yml, on any number of devices.

    Raises:
        ValueError: if the global batch is no multiple of what the devices take at once.
    """
    batch, saved = config.batch, config.run.folder / "config.yml"
    if not batch.global_batch_size and saved.is_file() and has_checkpoints(config.run.checkpoints):
        batch = dataclasses.replace(batch, global_batch_size=load_config(saved).batch.global_batch_size)
    global_batch, accumulation = batch.split(batch_shards(mesh))
    return dataclasses.replace(config, batch=dataclasses.replace(batch, global_batch_size=global_batch)), accumulation


def check_restart(config: Config) -> None:
    """Say what has changed since the last start of a run that goes on.

    Raises:
        ValueError: for a key that says what the run's networks and state are: they are stored. And, without
            allow_config_change, for one that decides which examples and noise a step has, and what its loss is.
    """
    saved = config.run.folder / "config.yml"
    if not saved.is_file():
        return
    before, now = flat(load_config(saved)), flat(config)
    changed = {key: value for key, value in now.items() if value != before[key] and key not in HERE}
    if fixed := [key for key in changed if key in STORED]:
        key = fixed[0]
        raise ValueError(f"{key}={now[key]!r} is another than the run began with, {before[key]!r}; allowed: that, or another "
                         "run_name")  # fmt: skip
    if changed:
        say("\n".join(f"changed since the last start: {key}: {before[key]!r} -> {value!r}" for key, value in changed.items()))
    if not config.safety.allow_config_change and (exact := [key for key in changed if key in EXACT]):
        key = exact[0]
        raise ValueError(f"{key}={now[key]!r} is another than the run began with, {before[key]!r}: later steps would not be "
                         "what they would have been (allowed: that, or allow_config_change=true)")  # fmt: skip


def run_key(config: Config, mesh: Mesh) -> jax.Array:
    """The key of all of the run's randomness, whole on every device."""
    # Made there: a key cannot be sent to the devices of other processes.
    return jax.jit(jax.random.key, static_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))(config.run.seed)


def make_rates(config: Config, task: Task) -> dict[str, Schedule]:
    """The learning rate of each trained network, by optimizer steps made."""
    section, batch = config.optimizer, config.batch.global_batch_size
    total = config.batch.steps(batch)
    steps = total if section.learning_rate_schedule_steps < 0 else section.learning_rate_schedule_steps
    rates = {}
    for name in task.trained:
        key = "text_encoder_learning_rate" if name.startswith("text_encoder") else "learning_rate"
        peak = getattr(section, key)
        if section.scale_lr:
            say(f"{key} {peak:g} x {batch} / 256 = {peak * batch / 256:g}")
            peak *= batch / 256
        warmup = round(section.warmup_steps_fraction * steps)
        rates[name] = learning_rate_schedule(section.learning_rate_schedule, peak, warmup, steps)
    return rates


def make_adam(config: Config, rates: dict[str, Schedule]) -> optax.GradientTransformationExtraArgs:
    """The optimizer."""
    section = config.optimizer
    return make_optimizer(
        section.optimizer,
        rates,
        betas=(section.adam_b1, section.adam_b2),
        eps=section.adam_eps,
        weight_decay=section.adam_weight_decay,
        decay_norms_and_biases=section.decay_norms_and_biases,
        max_grad_norm=section.max_grad_norm,
        moment_dtypes=(section.moment_dtype, section.moment_dtype),
    )


def current_rates(rates: dict[str, Schedule], made: int) -> dict[str, float]:
    """The learning rates of the update after `made` others, as they are logged."""
    keys = {"text_encoder_learning_rate" if name.startswith("text_encoder") else "learning_rate": name for name in rates}
    return {key: float(rates[name](made)) for key, name in keys.items()}


def abstract_of(config: Config, layout: Layout, task: Task, optimizer: optax.GradientTransformationExtraArgs) -> TrainState:
    """The state's shapes and shardings; nothing is computed."""
    networks = {name: task.networks[name] for name in task.trained}
    dtype = jnp.dtype(config.model.weights_dtype)

    def make() -> TrainState:
        params: Params = {name: jax.tree.map(lambda s: jnp.zeros(s.shape, dtype), n.abstract()) for name, n in networks.items()}
        return make_state(params, optimizer, use_ema=config.optimizer.use_ema)

    stored: Params = {name: layout.shardings(network) for name, network in networks.items()}
    updates: Params = {name: layout.update_shardings(network) for name, network in networks.items()}
    return abstract_state(make, optimizer, stored, updates if config.optimizer.shard_optimizer else None)


def left_whole(config: Config, mesh: Mesh, task: Task, state: TrainState) -> list[str]:
    """What the configuration asks to be split, and the mesh's sizes do not divide; in a line each."""
    lines = []
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    whole = [leaf for leaf in moments if "data" not in jax.tree.leaves(tuple(leaf.sharding.spec))]
    share = sum(leaf.size for leaf in whole) / max(1, sum(leaf.size for leaf in moments))
    if config.optimizer.shard_optimizer and mesh.shape.get("data", 1) > 1 and share > 0.1:
        lines.append(f"shard_optimizer: {share:.0%} of the moments are not split over data={mesh.shape['data']}, which divides "
                     "none of their dimensions (a larger ici_fsdp_parallelism leaves less)")  # fmt: skip
    ways = mesh.shape.get("tensor", 1)
    for name, network in task.networks.items():
        counts = network.config.heads if isinstance(network.config, UNetConfig) else ()
        heads = sorted({count for count in counts if count % ways})
        if heads:
            lines.append(f"{name}: attention of {', '.join(map(str, heads))} heads is not split over tensor={ways}, which does "
                         "not divide them: each device of the axis computes all of it")  # fmt: skip
    return lines


def open_checkpoints(config: Config) -> Checkpoints:
    """The run's checkpoints, with what the configuration says of keeping them."""
    output, folder = config.output, config.run.folder
    checkpoints = Checkpoints(config.run.checkpoints, keep_last=output.checkpoints_to_keep,
                              keep_every=output.keep_checkpoint_every, keep_best=output.keep_best_checkpoint)  # fmt: skip
    if output.keep_best_checkpoint and (folder / METRICS).is_file():
        checkpoints.losses |= {r["step"]: r["held_out_loss"] for r in read_metrics(folder) if "held_out_loss" in r}
    return checkpoints


def begin(config: Config, task: Task, optimizer: optax.GradientTransformationExtraArgs, abstract: TrainState,
          checkpoints: Checkpoints) -> TrainState:  # fmt: skip
    """The state that this start goes on from.

    1. The run's own latest checkpoint that is whole.
    2. The checkpoint that `resume_from` names: its whole state, step included.
    3. Pretrained weights, where the configuration names some.
    4. Random weights.

    Raises:
        FileNotFoundError, ValueError: if none of the run's checkpoints is whole, or what is named cannot be read; nothing
            is passed over for the next of these.
    """
    if checkpoints.steps():
        step, state = restore_latest(checkpoints, abstract)
        say(f"going on from step {step} in {checkpoints.folder}")
        return state
    if config.run.resume_from:
        folder, step = find_checkpoint(config.run.resume_from)
        say(f"beginning with step {step} in {folder}")
        with Checkpoints(folder, read_only=True) as others:
            return others.restore(step, abstract)
    make = functools.partial(make_state, optimizer=optimizer, use_ema=config.optimizer.use_ema)
    return jax.jit(make, donate_argnums=0, out_shardings=state_shardings(abstract))(task.initial())


def find_checkpoint(path: str) -> tuple[Path, int]:
    """(folder of checkpoints, step) from a run's folder, its folder of checkpoints, or one of these.

    Raises:
        FileNotFoundError: if there is no checkpoint.
    """
    folder = bucket.place(path).expanduser()
    if bucket.is_bucket(folder):
        bucket.check(folder)
    if folder.name.isdigit() and folder.is_dir():
        return folder.parent, int(folder.name)
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = []
    if folder.is_dir():
        with Checkpoints(folder, read_only=True) as checkpoints:
            steps = checkpoints.steps()
    if not steps:
        raise FileNotFoundError(f"resume_from={path} has no checkpoint (allowed: a run's folder, or one of its checkpoints)")
    return folder, steps[-1]


def make_step(config: Config, layout: Layout, task: Task, optimizer: optax.GradientTransformationExtraArgs,
              abstract: TrainState, accumulation: int) -> Any:  # fmt: skip
    """The jitted training step (state, constants, batch, seed_key) -> (state, metrics); it donates its state."""
    update_specs, sharded = None, None
    if config.optimizer.shard_optimizer:
        networks = {name: task.networks[name] for name in task.trained}
        update_specs: Params | None = {name: unflatten(layout.update_specs(n).items()) for name, n in networks.items()}
        sharded = ShardedUpdate({name: layout.shardings(n) for name, n in networks.items()},
                                {name: layout.update_shardings(n) for name, n in networks.items()})  # fmt: skip
    specs, dtype = trained_specs(layout, task), jnp.dtype(config.model.activations_dtype)
    kernels = fused_kernels(config.model.norms, layout.mesh)
    turned = kernels.turned if kernels else None
    gradients = gradient_function(task.losses, layout.mesh, specs, accumulation, update_specs, dtype, turned)
    ema = Ema(config.optimizer.ema_decay, True, config.optimizer.ema_start_step) if config.optimizer.use_ema else None
    norm_of = norm_function(layout.mesh, update_specs or specs)
    step = make_train_step(gradients, optimizer, ema, sharded, make_guard(config), norm_of)
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(abstract), None))


def make_guard(config: Config) -> Guard:
    """What counts as a bad step."""
    return Guard(config.safety.max_skipped_steps, config.safety.max_loss_spike)


def make_peers(config: Config, watch: Watch) -> Peers:
    """Who watches whether the other processes live."""
    return Peers(watch.place, config.safety.lost_process_seconds)


def make_watch(config: Config) -> Watch:
    """Who watches whether steps are made; the first of several processes says so in the run's folder."""
    folder = config.run.folder if jax.process_index() == 0 else None
    return Watch(folder, hang_timeout_seconds=config.safety.hang_timeout_seconds)


def compile_step(
    step: Any, abstract: TrainState, constants: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], key: jax.Array
) -> Any:
    """The jitted step, compiled for each of these abstract batches; called, it takes the program of the batch's shape."""
    one = lambda batch: step.lower(abstract, constants, batch, key).compile()
    if len(shapes) == 1:
        return one(shapes[0])
    with ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        programs = dict(zip((batch["image"].shape for batch in shapes), pool.map(one, shapes), strict=True))
    return lambda state, constants, batch, key: programs[batch["image"].shape](state, constants, batch, key)


def trained_specs(layout: Layout, task: Task) -> Params:
    """The PartitionSpec of every trained parameter."""
    return {name: unflatten(layout.specs(task.networks[name]).items()) for name in task.trained}


def make_draw(
    config: Config, networks: Mapping[str, Network], scheduler: Mapping[str, Any], strength: float | None = None
) -> Draw:
    """draw(weights, request), with what the configuration says of drawing; raises as `draw_function`."""
    return draw_function(networks, sampler_keys(config, scheduler), draw_config(config, strength))


def drawing_on(layout: Layout, networks: Mapping[str, Network], draw: Draw) -> Any:
    """(weights, {}, request) -> images, split as the request is: `draw` on a mesh, for weights that lie there; to be jitted."""
    specs: Params = {name: unflatten(layout.specs(network).items()) for name, network in networks.items()}
    on_params: Any = lambda weights, _, request: draw(weights, request)
    return outputs_function(on_params, layout.mesh, specs)


def draw_config(config: Config, strength: float | None = None) -> DrawConfig:
    """What the configuration says of drawing; `strength` is for images that begin with one."""
    section, side = config.sampling, config.data.resolution
    shared = ("num_inference_steps", "guidance_scale", "guidance_rescale", "eta", "clip_skip", "vae_slicing")
    return DrawConfig(section.height or side, section.width or side, sampler=section.sampler or None, strength=strength,
                      **{key: getattr(section, key) for key in shared})  # fmt: skip


def sampler_keys(config: Config, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler_config.json under the configuration's keys.

    Raises:
        ValueError: for a key that the sampler does not know.
    """
    section = config.sampling
    if config.objective.rescale_zero_terminal_snr:
        scheduler = with_zero_snr(scheduler)
    changed: dict[str, Any] = {"timestep_spacing": section.timestep_spacing} if section.timestep_spacing else {}
    if section.use_karras_sigmas != "auto":
        changed["use_karras_sigmas"] = section.use_karras_sigmas
    sampler = section.sampler or sampler_name(scheduler)
    for key, value in changed.items():
        if value and sampler in KEYS and key not in KEYS[sampler]:
            able = ", ".join(name for name, known in KEYS.items() if key in known)
            raise ValueError(f"{key}={value!r} is not for sampler={sampler}, which has no such choice (allowed with: {able})")
    return {**scheduler, **changed}


def whole_request(mesh: Mesh, request: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A request that every process has, split over the devices of all."""
    split = batch_sharding(mesh)
    return {name: jax.make_array_from_callback(x.shape, split, lambda at, x=x: x[at]) for name, x in request.items()}


def make_profiler(config: Config, first: int) -> Profiler:
    """The recorder of the steps that the configuration asks for, of a start that goes on from step `first`."""
    section = config.output
    folder = config.run.folder / "tensorboard" if section.enable_profiler and jax.process_index() == 0 else None
    return Profiler(folder, first=first, skip=section.skip_first_n_steps_for_profiler, steps=section.profiler_steps)
