"""The story of a run: configuration, mesh, networks, state, data, loop.

    python train.py configs/base14.yml run_name=my_run output_dir=runs train_data_dir='shards/*.tar'

The run lies in output_dir/run_name: config.yml, checkpoints/, metrics/metrics.jsonl and, when it has ended, pipeline/,
a diffusers folder. Starting the same command again goes on from the last checkpoint.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiff.checkpoint import Checkpoints
from maxdiff.config import KEYS, Config, load_config, write_config
from maxdiff.data.pipeline import BatchPlan, batches, prefetch
from maxdiff.data.sources import open_source
from maxdiff.diffusion.objective import Objective, timestep_probabilities
from maxdiff.diffusion.schedule import NoiseSchedule, noise_schedule
from maxdiff.gradients import BATCH_AXES, gradient_function
from maxdiff.losses import diffusion_losses
from maxdiff.metrics import Metrics
from maxdiff.models import flops
from maxdiff.models.attention import kernel
from maxdiff.models.layers import Compute
from maxdiff.models.network import unflatten
from maxdiff.optim import learning_rate_schedule, make_optimizer
from maxdiff.pipeline import Part, Pipeline
from maxdiff.sharding import Layout, make_mesh
from maxdiff.state import TrainState, abstract_state, make_state, state_shardings
from maxdiff.step import Ema, make_train_step
from maxdiff.weights.tensors import write_atomically

REMAT = {
    "none": lambda block: block,
    "full": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


def main(argv: Sequence[str]) -> int:
    """The command line; a user's mistake is one line on stderr and exit status 2."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python train.py CONFIG.yml [key=value ...]\n\nconfigs/base.yml documents the keys:\n" + "\n".join(KEYS))
        return 0
    try:
        train(load_config(argv[0], argv[1:]))
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


def train(config: Config) -> TrainState:
    """Run, or go on with, the training that a configuration describes; returns the last state.

    Raises:
        ValueError, FileNotFoundError: for what is wrong with the configuration, before any training.
    """
    for key in ("run_name", "output_dir"):
        if not getattr(config.run, key):
            raise ValueError(f"{key} is required")
    for key, value in (("train_data_dir", config.data.train_data_dir),
                       ("pretrained_model_name_or_path", config.model.pretrained_model_name_or_path)):  # fmt: skip
        if not value:
            raise ValueError(f"{key} is required")
    if config.run.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.run.jax_cache_dir)

    # Mesh: which devices, and how examples and parameters are split over them.
    mesh = make_mesh(config.mesh.mesh_axes, config.mesh.sizes("ici"), config.mesh.sizes("dcn"),
                     allow_split_physical_axes=config.mesh.allow_split_physical_axes)  # fmt: skip
    layout = Layout(mesh, config.mesh.logical_axis_rules, config.mesh.max_replicated_mib)
    shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.shape]))
    global_batch, accumulation = config.batch.split(shards)
    source = open_source(config.data.train_data_dir, config.data.caption_column, config.data.dataset_save_location or None)

    # Networks: the pipeline to begin with.
    pipeline = load_pipeline(config, layout)
    networks = {name: part.network for name, part in pipeline.networks()}
    print("\n".join(layout.describe(networks["unet"])), flush=True)

    # State: the UNet's parameters, their average and moments, where the mesh has them; or the last checkpoint.
    rate = make_rate(config, global_batch)
    optimizer = make_adam(config, rate)
    make = lambda: make_state({"unet": pipeline.unet.params}, optimizer, use_ema=config.optimizer.use_ema)
    abstract = abstract_state(make, optimizer, {"unet": layout.shardings(networks["unet"])})
    folder = config.run.folder
    write_atomically(folder / "config.yml", [write_config(config).encode()])
    with Checkpoints(folder / "checkpoints", keep_last=config.output.checkpoints_to_keep) as checkpoints:
        saved = checkpoints.steps()
        if saved:
            print(f"going on from step {saved[-1]} in {folder / 'checkpoints'}", flush=True)
            state = checkpoints.restore(saved[-1], abstract)
        else:
            copy = jax.jit(lambda s: jax.tree.map(jnp.copy, s), out_shardings=state_shardings(abstract))
            state = copy(make())  # the step donates its state, and the pipeline's weights are still wanted

        # Step: one compiled program.
        whole = NamedSharding(mesh, PartitionSpec())
        frozen = {name: part.params for name, part in pipeline.networks() if name != "unet"}
        constants = {"frozen": frozen, "empty_ids": pipeline.tokenizer("")}
        tokenizers = [pipeline.tokenizer]
        if pipeline.tokenizer_2 is not None:
            constants["empty_ids_2"] = pipeline.tokenizer_2("")
            tokenizers.append(pipeline.tokenizer_2)
        constants = jax.device_put(constants, whole)
        step = make_step(config, layout, networks, make_schedule(config, pipeline), accumulation, optimizer, abstract)

        # Data: from this step on, whatever came before.
        first, last = int(state.step), config.batch.max_train_steps
        plan = BatchPlan(config.run.seed, global_batch, config.data.resolution, config.data.center_crop,
                         config.data.random_flip, jax.process_index(), jax.process_count())  # fmt: skip
        made = batches(source, tokenizers, plan, start_step=first, workers=config.data.data_workers,
                       max_bad_fraction=config.data.max_bad_fraction)  # fmt: skip
        split = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in mesh.shape)))
        place = lambda batch: {
            key: jax.make_array_from_process_local_data(split, x) for key, x in batch.items() if key != "index"
        }
        metrics = Metrics(folder / "metrics" if jax.process_index() == 0 else None, global_batch=global_batch,
                          devices=mesh.size, flops=training_flops(networks, config), first=first, last=last)  # fmt: skip
        key = jax.device_put(jax.random.key(config.run.seed), whole)

        # Loop: nothing here waits for the device but the log steps.
        with prefetch(made, place) as input_batches:
            waited, started = 0.0, time.perf_counter()
            for number in range(first + 1, last + 1):
                state, scalars = step(state, constants, next(input_batches), key)
                if number == first + 1:
                    jax.block_until_ready(scalars)
                    print(f"first step after {time.perf_counter() - started:.1f} s of compilation", flush=True)
                if number % config.output.log_period == 0 or number in (first + 1, last):
                    scalars = {**jax.device_get(scalars), "learning_rate": rate(number - 1)}
                    metrics.log(number, scalars, input_batches.seconds_waited - waited)
                    waited = input_batches.seconds_waited
                if due(number, global_batch, config.output.checkpoint_every) or number == last:
                    checkpoints.save(number, state)
        metrics.close()
    export(pipeline, state, folder / "pipeline")
    return state


def load_pipeline(config: Config, layout: Layout) -> Pipeline:
    """The pretrained pipeline on the mesh, its networks computing as the configuration says."""
    model = config.model
    sharded = layout.mesh.shape.get("tensor", 1) > 1  # then the networks place their own collectives, see gradients.py
    hooks = {"constrain": layout.constrain, "gather": layout.gather} if sharded else {}
    compute = Compute(
        dtype=jnp.dtype(model.activations_dtype),
        precision=jax.lax.Precision[model.precision],
        attention=kernel(model.attention),
        remat=REMAT[model.remat],
        **hooks,
    )
    pipeline = Pipeline.load(
        model.pretrained_model_name_or_path,
        revision=model.revision or None,
        variant=model.variant or None,
        from_pt=model.from_pt,  # pyright: ignore[reportArgumentType]
        sources=model.sources,
        prediction_type=config.objective.prediction_type or None,
        dtype=jnp.dtype(model.weights_dtype),
        compute=compute,
        placement=layout.place,
    )
    if not model.train_new_unet:
        return pipeline
    network = pipeline.unet.network
    init = jax.jit(
        functools.partial(network.init, dtype=jnp.dtype(model.weights_dtype)), out_shardings=layout.shardings(network)
    )
    return dataclasses.replace(pipeline, unet=Part(network, init(jax.random.key(config.run.seed))))


def make_schedule(config: Config, pipeline: Pipeline) -> NoiseSchedule:
    """The checkpoint's noise schedule, with what the configuration changes."""
    changed = {"rescale_betas_zero_snr": True} if config.objective.rescale_zero_terminal_snr else {}
    pipeline.scheduler.update(changed)  # the exported pipeline must sample with it
    return noise_schedule(pipeline.scheduler)


def make_rate(config: Config, global_batch: int) -> Any:
    """The learning rate by optimizer step."""
    section = config.optimizer
    peak = section.learning_rate * (global_batch / 256 if section.scale_lr else 1.0)
    if section.scale_lr:
        print(f"learning_rate {section.learning_rate:g} x {global_batch} / 256 = {peak:g}", flush=True)
    steps = config.batch.max_train_steps if section.learning_rate_schedule_steps < 0 else section.learning_rate_schedule_steps
    return learning_rate_schedule(section.learning_rate_schedule, peak, round(section.warmup_steps_fraction * steps), steps)


def make_adam(config: Config, rate: Any) -> Any:
    """The optimizer."""
    section = config.optimizer
    return make_optimizer(
        section.optimizer,
        rate,
        betas=(section.adam_b1, section.adam_b2),
        eps=section.adam_eps,
        weight_decay=section.adam_weight_decay,
        decay_norms_and_biases=section.decay_norms_and_biases,
        max_grad_norm=section.max_grad_norm,
        moment_dtypes=(section.moment_dtype, section.moment_dtype),
    )


def make_step(config: Config, layout: Layout, networks: dict, schedule: NoiseSchedule, accumulation: int,
              optimizer: Any, abstract: TrainState) -> Any:  # fmt: skip
    """The jitted training step; it donates its state."""
    section = config.objective
    bias = {"multiplier": 1.0, "begin": 0, "end": schedule.num_timesteps, "portion": 0.25, **section.timestep_bias}
    objective = Objective(section.snr_gamma, section.noise_offset, section.input_perturbation, section.caption_dropout,
                          timestep_probabilities(schedule.num_timesteps, **bias))  # fmt: skip
    specs: Any = {"unet": unflatten(layout.specs(networks["unet"]).items())}
    gradients = gradient_function(diffusion_losses(networks, objective, schedule), layout.mesh, specs, accumulation)
    ema = Ema(config.optimizer.ema_decay, True, config.optimizer.ema_start_step) if config.optimizer.use_ema else None
    step = make_train_step(gradients, optimizer, ema)
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(abstract), None))


def training_flops(networks: dict, config: Config) -> float:
    """Floating-point operations of training on one example: three forward passes of the UNet, one of the rest."""
    plain = {name: network.with_compute(Compute()) for name, network in networks.items()}
    shape = jax.ShapeDtypeStruct
    pixels = config.data.resolution
    latents = pixels // plain["vae"].config.downscale
    unet = plain["unet"]
    text = shape((1, 77, unet.config.cross_attention_dim), jnp.float32)
    added = None
    if unet.config.addition_embed_type:
        width = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        added = {"text_embeds": shape((1, width), jnp.float32), "time_ids": shape((1, 6), jnp.float32)}
    sample = shape((1, latents, latents, unet.config.in_channels), jnp.float32)
    total = 3 * flops.count(unet.apply, unet.abstract(), sample, shape((1,), jnp.int32), text, added).total
    encode = lambda p, x: plain["vae"].apply(p, x, method="encode").mean
    total += flops.count(encode, plain["vae"].abstract(), shape((1, pixels, pixels, 3), jnp.float32)).total
    for name in plain:
        if name.startswith("text_encoder"):
            total += flops.count(plain[name].apply, plain[name].abstract(), shape((1, 77), jnp.int32)).total
    return total


def due(step: int, global_batch: int, every: int) -> bool:
    """Whether this step is the first past a multiple of `every` examples."""
    return every > 0 and step * global_batch // every > (step - 1) * global_batch // every


def export(pipeline: Pipeline, state: TrainState, folder: Path) -> None:
    """Write the trained pipeline, its average if there is one, as a diffusers folder."""
    trained: Any = state.params if state.ema is None else state.ema
    if jax.process_index() == 0:
        dataclasses.replace(pipeline, unet=Part(pipeline.unet.network, trained["unet"])).save(folder)
        print(f"wrote {folder}", flush=True)
