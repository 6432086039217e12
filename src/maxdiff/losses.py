"""What a batch costs: the loss of each example, as a pure function of parameters, frozen weights and batch.

A batch is a dict of [b ...] arrays: image uint8 [b h w 3], input_ids int32 [b 77], position int32 [b] (each
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

RECONSTRUCTION: dict[str, Callable[[jax.Array], jax.Array]] = {"l1": jnp.abs, "l2": jnp.square}


def diffusion_losses(networks: Mapping[str, Network], objective: Objective, schedule: NoiseSchedule) -> Losses:
    """losses(params, constants, batch) -> [b] of the denoising objective.

    Args:
        networks: unet, vae, text_encoder and, for SDXL, text_encoder_2. Which of them are trained is for the
            caller to say: those in `params` are, the others are in constants["frozen"].

    `constants` also holds `key`, the step's random key, and `empty_ids` (and `empty_ids_2`), int32 [1 77], the
    tokens of the empty caption that replaces a dropped one.
    """
    scaling_factor = networks["vae"].config.scaling_factor

    def losses(params: Params, constants: Mapping[str, Any], batch: Batch) -> jax.Array:
        weights = {**constants["frozen"], **params}
        key, position = constants["key"], batch["position"]
        latents = networks["vae"].apply(weights["vae"], from_uint8(batch["image"]), method="encode")
        noise = vae_noise(key, position, latents.mean.shape[1:])
        # The autoencoder is never trained here; nor need its activations be kept.
        x0 = lax.stop_gradient(latents.sample(noise) * scaling_factor)
        noisy = noisy_batch(objective, schedule, x0, key, position)
        dropped = drop_caption(objective, key, position)
        states, added = _text(networks, weights, constants, batch, dropped)
        prediction = networks["unet"].apply(weights["unet"], noisy.noisy, noisy.t, states, added)
        return mean_loss(prediction, noisy.target, noisy.weight)

    return losses


def _text(
    networks: Mapping[str, Network], weights: Params, constants: Mapping[str, Any], batch: Batch, dropped: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Text states [b 77 d], and SDXL's added conditioning; of the empty caption where `dropped`, bool [b]."""
    ids = {
        f"input_ids{suffix}": jnp.where(dropped[:, None], constants[f"empty_ids{suffix}"], batch[f"input_ids{suffix}"])
        for suffix in ("", "_2")
        if f"text_encoder{suffix}" in networks
    }
    states, pooled = encode_text(networks, weights, ids)
    if pooled is None:
        return states, None
    height, width = batch["image"].shape[1:3]
    return states, size_conditioning(pooled, batch["original_size"], batch["crop"], (height, width))
