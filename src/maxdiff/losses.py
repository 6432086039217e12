"""What a batch costs: the loss of each example, as a pure function of parameters, frozen weights and batch.

A batch is a dict of [b ...] arrays: image uint8 [b h w 3] (or, encoded before, mean and logvar [b h w c], and states [b 77 d]
and pooled [b p] for the tokens), input_ids int32 [b 77], position int32 [b] (each
example's place in the global batch, from which all its randomness comes) and, for SDXL, input_ids_2 and
original_size and crop int32 [b 2], in pixels, height first.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxdiff.conditioning import encode_text, size_conditioning
from maxdiff.diffusion.objective import Objective, drop_caption, mean_loss, noisy_batch, vae_noise
from maxdiff.diffusion.schedule import NoiseSchedule
from maxdiff.gradients import Batch, Losses, Measures
from maxdiff.models.network import Network, Params
from maxdiff.models.vae import Gaussian

RECONSTRUCTION: dict[str, Callable[[jax.Array], jax.Array]] = {"l1": jnp.abs, "l2": jnp.square}


def diffusion_losses(networks: Mapping[str, Network], objective: Objective, schedule: NoiseSchedule) -> Losses:
    """losses(params, constants, batch) -> [b] of the denoising objective.

    Args:
        networks: unet, vae, text_encoder and, for SDXL, text_encoder_2. Which of them are trained is for the
            caller to say: those in `params` are, the others are in constants["frozen"].

    `constants` also holds `key`, the step's random key, and `empty_ids` (and `empty_ids_2`), int32 [1 77], the tokens of
    the empty caption that replaces a dropped one; and `t`, int32 [], where all examples are to have that timestep.
    """
    scaling_factor = networks["vae"].config.scaling_factor

    def losses(params: Params, constants: Mapping[str, Any], batch: Batch) -> jax.Array:
        weights = {**constants["frozen"], **params}
        key, position = constants["key"], batch["position"]
        if "mean" in batch:  # encoded before, see data/encoded.py
            latents = Gaussian(batch["mean"].astype(jnp.float32), batch["logvar"].astype(jnp.float32))
        else:
            latents = networks["vae"].apply(weights["vae"], from_uint8(batch["image"]), method="encode")
        noise = vae_noise(key, position, latents.mean.shape[1:])
        # The autoencoder is never trained here; nor need its activations be kept.
        x0 = lax.stop_gradient(latents.sample(noise) * scaling_factor)
        noisy = noisy_batch(objective, schedule, x0, key, position, constants.get("t"))
        dropped = drop_caption(objective, key, position)
        states, added = _text(networks, weights, constants, batch, dropped)
        prediction = networks["unet"].apply(weights["unet"], noisy.noisy, noisy.t, states, added)
        return mean_loss(prediction, noisy.target, noisy.weight)

    return losses


def _text(
    networks: Mapping[str, Network], weights: Params, constants: Mapping[str, Any], batch: Batch, dropped: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Text states [b 77 d], and SDXL's added conditioning; of the empty caption where `dropped`, bool [b]."""
    if "image" in batch:
        height, width = batch["image"].shape[1:3]
    else:
        height, width = (side * networks["vae"].config.downscale for side in batch["mean"].shape[1:3])
    if "states" in batch:
        pick = lambda name: jnp.where(_beside(dropped, batch[name]), constants[f"empty_{name}"], batch[name])
        states = pick("states").astype(networks["unet"].compute.dtype)
        if "pooled" not in batch:
            return states, None
        pooled = pick("pooled").astype(networks["unet"].compute.dtype)
        return states, size_conditioning(pooled, batch["original_size"], batch["crop"], (height, width))
    ids = {
        f"input_ids{suffix}": jnp.where(dropped[:, None], constants[f"empty_ids{suffix}"], batch[f"input_ids{suffix}"])
        for suffix in ("", "_2")
        if f"text_encoder{suffix}" in networks
    }
    states, pooled = encode_text(networks, weights, ids)
    if pooled is None:
        return states, None
    return states, size_conditioning(pooled, batch["original_size"], batch["crop"], (height, width))


def _beside(flags: jax.Array, x: jax.Array) -> jax.Array:
    """bool [b] as [b 1 ...], to stand beside x [b ...]."""
    return flags.reshape(-1, *[1] * (x.ndim - 1))


def reconstruction_losses(vae: Network, kind: str, kl_weight: float) -> Losses:
    """losses(params, constants, batch) -> [b] of an autoencoder: reconstruction plus KL (Rombach et al. 2022, appendix G).

    The reconstruction error is the mean over pixels and channels; the KL divergence from a standard normal is summed
    over the latents and divided by the same number, so that `kl_weight` has the usual scale (1e-6).

    Args:
        kind: l1 or l2, in images from -1 to 1.
    """
    error = RECONSTRUCTION[kind]

    def losses(params: Params, constants: Mapping[str, Any], batch: Batch) -> jax.Array:
        images = from_uint8(batch["image"])
        latents = vae.apply(params["vae"], images, method="encode")
        noise = vae_noise(constants["key"], batch["position"], latents.mean.shape[1:])
        decoded = vae.apply(params["vae"], latents.sample(noise), method="decode").astype(jnp.float32)
        return error(decoded - images).mean((1, 2, 3)) + kl_weight * latents.kl() / math.prod(images.shape[1:])

    return losses


def reconstruct(vae: Network, params: Params, images: jax.Array) -> jax.Array:
    """Images decoded from the mean of their latents, clipped to -1 to 1; float32 [b h w 3] both."""
    latents = vae.apply(params, images, method="encode").mean
    return jnp.clip(vae.apply(params, latents, method="decode").astype(jnp.float32), -1.0, 1.0)


def reconstruction_measures(vae: Network, losses: Losses) -> Measures:
    """What is measured of an autoencoder's held-out example: its loss, and its PSNR in dB."""

    def measures(params: Params, constants: Mapping[str, Any], batch: Batch) -> dict[str, jax.Array]:
        images = from_uint8(batch["image"])
        error = jnp.square((reconstruct(vae, params["vae"], images) - images) / 2).mean((1, 2, 3))  # of images from 0 to 1
        return {"loss": losses(params, constants, batch), "psnr": -10.0 * jnp.log10(jnp.maximum(error, 1e-10))}

    return measures


def latent_moments(vae: Network, params: Params, constants: Mapping[str, Any], batch: Batch) -> dict[str, jax.Array]:
    """The mean and the mean square of each example's latents, unscaled, as they are sampled."""
    del constants
    latents = vae.apply(params["vae"], from_uint8(batch["image"]), method="encode")
    square = jnp.square(latents.mean) + jnp.exp(latents.logvar)
    return {"mean": latents.mean.mean((1, 2, 3)), "square": square.mean((1, 2, 3))}


def from_uint8(images: jax.Array) -> jax.Array:
    """uint8 -> float32 from -1 to 1."""
    return images.astype(jnp.float32) / 127.5 - 1.0


def to_uint8(images: jax.Array) -> jax.Array:
    """Float from -1 to 1, clipped -> uint8."""
    return jnp.round(jnp.clip(images / 2 + 0.5, 0, 1) * 255).astype(jnp.uint8)
