"""What an image is conditioned on, as the UNet wants it: for training and for drawing alike."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxdiff.models.network import Network, Params


def encode_text(
    networks: Mapping[str, Network], weights: Mapping[Any, Params], ids: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Text states [b 77 d] and, for SDXL, the pooled text [b p].

    Args:
        networks: text_encoder and, for SDXL, text_encoder_2; `weights` has their parameters by the same names.
        ids: int32 [b 77] under input_ids and, for SDXL, input_ids_2.
    """

    def encode(suffix: str) -> Any:
        part = f"text_encoder{suffix}"
        return networks[part].apply(weights[part], ids[f"input_ids{suffix}"])

    if "text_encoder_2" not in networks:
        return encode("").last_hidden_state, None
    # SDXL reads both encoders before their last layer (Podell et al. 2023, section 2.1).
    first, second = encode(""), encode("_2")
    return jnp.concatenate([first.hidden_states[-2], second.hidden_states[-2]], axis=-1), second.text_embeds


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
