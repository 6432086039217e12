"""What a run trains: all in which training diffusion and training an autoencoder differ.

A task holds networks, the weights that stay as they are, losses and measures. The loop, the state and the
checkpoints are train.py's, whatever the task.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff import sharding
from maxdiff.config import Config, Model
from maxdiff.diffusion.objective import Objective, timestep_probabilities
from maxdiff.diffusion.sampler_config import with_zero_snr
from maxdiff.diffusion.schedule import NoiseSchedule, noise_schedule
from maxdiff.gradients import Losses, Measures
from maxdiff.losses import diffusion_losses, reconstruction_losses, reconstruction_measures
from maxdiff.models import flops
from maxdiff.models.attention import kernel, takes_long
from maxdiff.models.gpus import has_triton
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params
from maxdiff.pipeline import Part, Pipeline, check_fit, save_config, save_part
from maxdiff.sharding import Layout
from maxdiff.weights.checkpoint import TOKENIZERS
from maxdiff.weights.origins import open_origins
from maxdiff.weights.tokenizer import CLIPTokenizer

# Whose results spare the most time for the memory that they take, see docs/PERFORMANCE.md.
COSTLY = jax.checkpoint_policies.save_from_both_policies(
    takes_long, lambda primitive, *_, **__: primitive.name == "conv_general_dilated"
)
REMAT = {
    "none": lambda block: block,
    "full": jax.checkpoint,
    "selective": functools.partial(jax.checkpoint, policy=COSTLY),
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and what training it needs.

    Attributes:
        networks: all that take part, by name.
        trained: the names of those that are trained.
        initial: the trained networks' weights before the first step, read or drawn when called.
        constants: what losses and measures get besides the trained weights, whole on every device: `frozen` weights,
            and the tokens of the empty caption.
        tokenizers: one or, for SDXL, two; none for an autoencoder.
        losses: of each example of a batch, which training lessens.
        measures: of each held-out example, alike whatever training does to its examples.
        flops: floating-point operations of training on one example.
        scheduler: diffusers' scheduler_config.json, which the noise schedule was made from.
        index: the model_index.json of the pipeline that it began with.
    """

    networks: dict[str, Network]
    trained: tuple[str, ...]
    initial: Callable[[], dict[str, Params]]
    constants: dict[str, Any]
    tokenizers: dict[str, CLIPTokenizer]
    losses: Losses
    measures: Measures
    flops: float
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)
    index: dict[str, Any] = dataclasses.field(default_factory=dict)

    def pipeline(self, weights: dict[str, Params]) -> Pipeline:
        """The pipeline with these weights of the trained networks."""
        params = {**self.constants["frozen"], **weights}
        parts: Any = {name: Part(network, params[name]) for name, network in self.networks.items()}
        tokenizers: Any = self.tokenizers
        return Pipeline(scheduler=self.scheduler, index=self.index, **parts, **tokenizers)

    def save_frozen(self, folder: Path) -> None:
        """Write all of the pipeline but the trained weights: frozen networks, tokenizers, scheduler, configurations."""
        for name, network in self.networks.items():
            if name in self.trained:
                save_config(folder, name, network)
            else:
                save_part(folder, name, Part(network, self.constants["frozen"][name]))
        if "unet" in self.networks:
            self.pipeline({name: {} for name in self.trained}).save_small(folder)

    def save_trained(self, folder: Path, weights: dict[str, Params], dtype: Any = None) -> None:
        """Write the trained networks; each file appears whole or not at all."""
        for name in self.trained:
            save_part(folder, name, Part(self.networks[name], weights[name]), dtype=dtype)

    def from_encoded(self, empty: Mapping[str, Any], resolution: int, *, text: bool) -> "Task":
        """The task that is trained from what is encoded.

        Args:
            empty: the text of no words, see EncodedSource.
            resolution: of the images, pixels.
            text: whether texts are encoded, and not latents alone.
        """
        whole = jax.tree.leaves(self.constants)[0].sharding
        texts = {f"empty_{name}": x for name, x in empty.items()}
        cost = flops.training(self.networks, self.trained, resolution, has_latents=True, has_text=text).total
        return dataclasses.replace(self, constants={**self.constants, **jax.device_put(texts, whole)}, flops=cost)

    def without_frozen(self, *, text: bool) -> "Task":
        """The task that is trained from what frozen networks have encoded: they are gone, and their memory is free.

        Args:
            text: whether texts are encoded, so that text encoders go too.
        """
        frozen, kept = self.constants["frozen"], self.frozen_still(text=text)
        jax.tree.map(lambda leaf: leaf.delete(), {name: frozen[name] for name in frozen.keys() - kept.keys()})
        return dataclasses.replace(self, constants={**self.constants, "frozen": kept})

    def frozen_still(self, *, text: bool) -> dict[str, Params]:
        """The frozen networks that a step from what is encoded runs all the same: text encoders, unless `text` is."""
        return {name: params for name, params in self.constants["frozen"].items() if name != "vae" and not text}

    def with_latent_scale(self, factor: float) -> "Task":
        """The task whose autoencoder has this scaling_factor."""
        vae = self.networks["vae"]
        scaled = Network(vae.module, dataclasses.replace(vae.config, scaling_factor=factor))
        return dataclasses.replace(self, networks={**self.networks, "vae": scaled})


def judges_images(config: Config) -> bool:
    """Whether a run encodes or draws images though it is trained from what was encoded before."""
    return bool(config.data.eval_data_dir or config.sampling.validation_prompts)


def make_task(config: Config, layout: Layout, stored: Path | None, *, abstract: bool = False) -> Task:
    """The task that a configuration asks for.

    Args:
        layout: where trained weights lie; frozen ones lie whole on every device.
        stored: the `pipeline/` of a run that goes on, from which its networks come; None for a new run.
        abstract: constants are jax.ShapeDtypeStructs, and no weights are looked for: to compile for devices that are not there.

    Raises:
        FileNotFoundError, ValueError: for what cannot be found or does not fit; no trained weights are read yet.
    """
    model = config.model
    options: dict[str, Any] = {"prediction_type": config.objective.prediction_type or None}
    if stored is None:
        options |= {"revision": model.revision or None, "variant": model.variant or None, "from_pt": model.from_pt,
                    "sources": model.sources, "new": model.new}  # fmt: skip
    origins = open_origins(stored or model.pretrained_model_name_or_path, **options)
    names = ["vae"] if model.train_vae else origins.names()
    trained = tuple(name for name in names if _is_trained(model, name))
    networks = origins.networks(names, make_compute(config, layout))
    tokenizers = {} if model.train_vae else {part: origins.tokenizer(part) for part in TOKENIZERS[: len(networks) - 2]}
    if not model.train_vae:
        check_fit(networks, tokenizers)
        check_trainable(networks)
    check_resolution(config, networks["vae"])
    # The configuration of a trained network is stored at the start, its weights at the end.
    if not abstract:
        origins.check({name: network for name, network in networks.items() if stored is None or name not in trained})

    whole = NamedSharding(layout.mesh, PartitionSpec())
    load = functools.partial(origins.load, dtype=jnp.dtype(model.weights_dtype), seed=config.run.seed)
    kept = {name: networks[name] for name in names if name not in trained}
    frozen = (
        sharding.abstract({name: network.abstract(jnp.dtype(model.weights_dtype)) for name, network in kept.items()}, whole)
        if abstract
        else load(kept, placement=lambda *_: whole)
    )
    scheduler: dict[str, Any] = {} if model.train_vae else origins.scheduler()
    if not model.train_vae and config.objective.rescale_zero_terminal_snr:
        scheduler = with_zero_snr(scheduler)  # the exported pipeline must sample with it
    losses, measures = _learnt(config, networks, scheduler)
    empty = empty_ids(tokenizers)
    return Task(
        networks=networks,
        trained=trained,
        initial=lambda: load({name: networks[name] for name in trained}, placement=layout.place),
        constants={"frozen": frozen, **(sharding.abstract(empty, whole) if abstract else jax.device_put(empty, whole))},
        tokenizers=tokenizers,
        losses=losses,
        measures=measures,
        flops=flops.training(networks, trained, config.data.resolution).total,
        scheduler=scheduler,
        index=origins.index(),
    )


def empty_ids(tokenizers: Mapping[str, CLIPTokenizer]) -> dict[str, np.ndarray]:
    """The tokens of the empty caption, as losses want them among their constants."""
    return {f"empty_ids{name.removeprefix('tokenizer')}": tokenizer("") for name, tokenizer in tokenizers.items()}


def _learnt(config: Config, networks: dict[str, Network], scheduler: dict[str, Any]) -> tuple[Losses, Measures]:
    """(each example's loss, what is measured of held-out ones)."""
    if config.model.train_vae:
        losses = reconstruction_losses(networks["vae"], config.objective.reconstruction_loss, config.objective.kl_weight)
        return losses, reconstruction_measures(networks["vae"], losses)
    schedule = noise_schedule(scheduler)
    losses = diffusion_losses(networks, make_objective(config, schedule), schedule)
    plain = diffusion_losses(networks, Objective(config.objective.snr_gamma), schedule)
    return losses, lambda *arguments: {"loss": plain(*arguments)}


def _is_trained(model: Model, name: str) -> bool:
    if name == "vae":
        return model.train_vae
    return name == "unet" or model.train_text_encoder


def make_compute(config: Config, layout: Layout) -> Compute:
    """How networks compute."""
    model = config.model
    # Of activations only a tensor axis splits more than the examples, see gradients.py.
    split = layout.mesh.shape.get("tensor", 1) > 1
    hooks = {"constrain": layout.constrain} if split else {}
    # Of the mesh: when compiling ahead of time it is not JAX's default backend.
    attention = kernel(model.attention, layout.mesh.devices.flat[0])
    return Compute(
        dtype=jnp.dtype(model.activations_dtype),
        precision=jax.lax.Precision[model.precision],
        attention=layout.attend(attention) if split else attention,
        fused=fused_kernels(model.norms, layout.mesh),
        remat=REMAT[model.remat],
        **hooks,
    )


def fused_kernels(norms: str = "auto", mesh: Mesh | None = None) -> Any:
    """The module of kernels that compute norms and biases on this mesh, or None where XLA does.

    Args:
        norms: `fused`, `plain` or `auto`, as in configs/base.yml.
        mesh: by default JAX's first device.

    Raises:
        ValueError: for another `norms`, and for norms=fused where there are no kernels.
    """
    if norms not in ("auto", "fused", "plain"):
        raise ValueError(f"norms={norms!r} is not supported (allowed: auto, fused, plain)")
    if norms == "plain":
        return None
    if mesh is not None and mesh.shape.get("tensor", 1) > 1:
        reason = "kernels are not split over a tensor axis"
    elif not has_triton(jax.devices()[0] if mesh is None else mesh.devices.flat[0]):
        reason = "the kernels are for NVIDIA GPUs from Ampere (compute capability 8.0) on"
    else:
        # Imported here: Pallas costs a second of start-up.
        from maxdiff.models import fused

        return fused
    if norms == "fused":
        raise ValueError(f"norms=fused is not supported here: {reason} (allowed: auto, plain)")
    return None


def make_objective(config: Config, schedule: NoiseSchedule) -> Objective:
    """What is learnt."""
    section = config.objective
    bias = {"multiplier": 1.0, "begin": 0, "end": schedule.num_timesteps, "portion": 0.25, **section.timestep_bias}
    return Objective(section.snr_gamma, section.noise_offset, section.input_perturbation, section.caption_dropout,
                     timestep_probabilities(schedule.num_timesteps, **bias))  # fmt: skip


def check_trainable(networks: dict[str, Network]) -> None:
    """Raise ValueError for a model that denoises more than latents."""
    channels, latent = networks["unet"].config.in_channels, networks["vae"].config.latent_channels
    if channels != latent:
        raise ValueError(
            f"the unet's in_channels={channels} are those of a model that draws into an image (inpainting, editing), "
            f"which cannot be trained; allowed: the vae's latent_channels={latent}"
        )


def check_resolution(config: Config, vae: Network) -> None:
    """Raise ValueError unless images divide into latents."""
    down = vae.config.downscale
    if config.data.aspect_ratio_buckets and config.data.bucket_step % down:
        raise ValueError(f"bucket_step={config.data.bucket_step} is no multiple of the autoencoder's {down} pixels a latent")
    if config.data.resolution % vae.config.downscale:
        raise ValueError(
            f"resolution={config.data.resolution} is no multiple of the autoencoder's {vae.config.downscale} pixels a latent"
        )
