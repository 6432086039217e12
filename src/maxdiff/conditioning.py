"""What an image is conditioned on, as the UNet wants it: for training and for drawing alike."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.models.network import Network, Params


def encode_text(
    networks: Mapping[str, Network], weights: Mapping[Any, Params], ids: Mapping[str, jax.Array], clip_skip: int = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Text states [b 77 d] and, for SDXL, the pooled text [b p].

    Args:
        networks: text_encoder and, for SDXL, text_encoder_2; `weights` has their parameters by the same names.
        ids: int32 [b 77] under input_ids and, for SDXL, input_ids_2.
        clip_skip: last layers that are passed over, besides SDXL's one.
    """

    def encode(suffix: str) -> Any:
        part = f"text_encoder{suffix}"
        return networks[part].apply(weights[part], ids[f"input_ids{suffix}"])

    if "text_encoder_2" not in networks:
        if not clip_skip:
            return encode("").last_hidden_state, None
        state = encode("").hidden_states[-1 - clip_skip]
        return networks["text_encoder"].apply(weights["text_encoder"], state, method="final_norm"), None
    # SDXL reads both encoders before their last layer (Podell et al. 2023, section 2.1).
    first, second = encode(""), encode("_2")
    return jnp.concatenate(
        [first.hidden_states[-2 - clip_skip], second.hidden_states[-2 - clip_skip]], axis=-1
    ), second.text_embeds


def size_conditioning(
    text_embeds: jax.Array, original_size: jax.Array, crop: jax.Array, target_size: tuple[int, int]
) -> dict[str, jax.Array]:
    """SDXL's added conditioning (Podell et al. 2023, section 2.2): text_embeds [b p] and time_ids float32 [b 6].

    Args:
        original_size, crop: int32 [b 2], in pixels, height first: of the image as it was found, and how much of its
            top and left was cut off.
        target_size: height and width of the image that the network sees.
    """
    target = jnp.broadcast_to(jnp.array([target_size], jnp.int32), crop.shape)
    time_ids = jnp.concatenate([original_size, crop, target], axis=-1)
    return {"text_embeds": text_embeds, "time_ids": time_ids.astype(jnp.float32)}


def guidance_embedding(scale: float, width: int, images: int) -> jax.Array:
    """What a UNet distilled from guided ones is told of the scale (Luo et al. 2023, arXiv 2310.04378), float32 [images width].

    A sinusoidal embedding of (scale - 1) x 1000: sines, then cosines, of frequencies from 1 down to 1/10000.
    """
    half = width // 2
    frequencies = np.exp(-math.log(10000.0) * np.arange(half) / (half - 1))
    angles = (scale - 1) * 1000.0 * frequencies
    embedding = np.concatenate([np.sin(angles), np.cos(angles), np.zeros(width % 2)]).astype(np.float32)
    return jnp.broadcast_to(embedding, (images, width))
