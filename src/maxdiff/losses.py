"""What a batch costs: the loss of each example, as a pure function of parameters, frozen weights and batch.

A batch is a dict of [b ...] arrays: image uint8 [b h w 3], input_ids int32 [b 77], position int32 [b] (each
example's place in the global batch, from which all its randomness comes) and, for SDXL, input_ids_2 and
original_size and crop int32 [b 2], in pixels, height first.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxdiff.diffusion.objective import Objective, drop_caption, mean_loss, noisy_batch, vae_noise
from maxdiff.diffusion.schedule import NoiseSchedule
from maxdiff.gradients import Batch, Losses
from maxdiff.models.network import Network, Params


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
        images = batch["image"].astype(jnp.float32) / 127.5 - 1.0
        latents = networks["vae"].apply(weights["vae"], images, method="encode")
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
    """Text states [b 77 d], and SDXL's added conditioning."""

    def encode(suffix: str) -> Any:
        part = f"text_encoder{suffix}"
        ids = jnp.where(dropped[:, None], constants[f"empty_ids{suffix}"], batch[f"input_ids{suffix}"])
        return networks[part].apply(weights[part], ids)

    if "text_encoder_2" not in networks:
        return encode("").last_hidden_state, None
    first, second = encode(""), encode("_2")
    states = jnp.concatenate([first.hidden_states[-2], second.hidden_states[-2]], axis=-1)
    height, width = batch["image"].shape[1:3]
    target = jnp.broadcast_to(jnp.array([[height, width]], jnp.int32), batch["crop"].shape)
    time_ids = jnp.concatenate([batch["original_size"], batch["crop"], target], axis=-1)
    return states, {"text_embeds": second.text_embeds, "time_ids": time_ids.astype(jnp.float32)}
