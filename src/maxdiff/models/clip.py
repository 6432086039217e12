"""CLIP (Radford et al. 2021): the text encoders of Stable Diffusion, and the image encoder that judges its pictures.

The text encoders are ViT-L/14 of SD 1.x, OpenCLIP's H of SD 2.x and bigG of SDXL. Attribute names, configuration keys and
results are those of transformers' CLIPTextModel, CLIPTextModelWithProjection and CLIPVisionModelWithProjection, as published
checkpoints spell them; a CLIPModel is the latter two in one file.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiff.models.attention import dot_product
from maxdiff.models.blocks import HEADS, TOKENS
from maxdiff.models.config import read_config, require, require_integers
from maxdiff.models.layers import Compute, Conv, Embed, LayerNorm, Linear, check_shape, gelu, normal, parameter


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS = {"quick_gelu": _quick_gelu, "gelu": gelu}


@dataclasses.dataclass(frozen=True)
class CLIPTextConfig:
    """transformers' keys and defaults.

    Attributes:
        hidden_size, intermediate_size: widths of the residual stream and of the feed-forward.
        projection_dim: width of the text embedding; used if `architectures` says so.
        architectures: ("CLIPTextModelWithProjection",) adds the projection.
        eos_token_id: the end-of-text token, whose state is the pooled output. 2 is a mistake in
            old configurations and means: the highest id in the text.
    """

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    initializer_factor: float = 1.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 49406
    eos_token_id: int = 49407
    architectures: tuple[str, ...] = ("CLIPTextModel",)

    # Keys without a field, and the values that this network computes (the first is written out).
    FIXED: ClassVar[dict[str, tuple]] = {
        "model_type": ("clip_text_model",),
        "attention_dropout": (0.0, 0),
    }

    def __post_init__(self):
        require(self, "hidden_act", *ACTIVATIONS)
        require(self, "architectures", ("CLIPTextModel",), ("CLIPTextModelWithProjection",))
        require_integers(self, "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers",
                         "num_attention_heads", "max_position_embeddings")  # fmt: skip
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}")

    @property
    def with_projection(self) -> bool:
        """Whether the text embedding is projected (SDXL's second encoder)."""
        return self.architectures == ("CLIPTextModelWithProjection",)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "text_encoder") -> "CLIPTextConfig":
        """Read transformers' keys; ValueError names `where`, key and value for what we don't support."""
        names = [name.removeprefix("Flax") for name in values.get("architectures") or ("CLIPTextModel",)]
        return read_config(cls, {**values, "architectures": names}, where, ignore_unknown=True)

    def to_dict(self) -> dict[str, Any]:
        """transformers' config.json."""
        fixed = {key: allowed[0] for key, allowed in self.FIXED.items()}
        return {**fixed, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig:
    """transformers' keys and defaults: those of ViT-B/32.

    Attributes:
        hidden_size, intermediate_size: widths of the residual stream and of the feed-forward.
        projection_dim: width of the image embedding.
        image_size, patch_size: pixels in each direction.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    initializer_factor: float = 1.0

    # Keys without a field, and the values that this network computes (the first is written out).
    FIXED: ClassVar[dict[str, tuple]] = {
        "model_type": ("clip_vision_model",),
        "attention_dropout": (0.0, 0),
        "num_channels": (3,),
    }

    def __post_init__(self):
        require(self, "hidden_act", *ACTIVATIONS)
        require_integers(self, "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads",
                         "image_size", "patch_size")  # fmt: skip
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}")
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size={self.patch_size} is more than image_size={self.image_size}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "vision_config") -> "CLIPVisionConfig":
        """Read transformers' keys; ValueError names `where`, key and value for what we don't support."""
        return read_config(cls, values, where, ignore_unknown=True)


class TextStates(NamedTuple):
    """What a prompt becomes.

    Attributes:
        last_hidden_state: [b l c], after the final norm.
        hidden_states: the embeddings and each layer's output, [b l c] each, before the final norm;
            [-2] is the penultimate layer's, which SDXL reads. What nobody reads is not computed.
        pooled: [b c], the last hidden state at the end-of-text token.
        text_embeds: [b p], `pooled` projected; None without projection.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    pooled: jax.Array
    text_embeds: jax.Array | None


class SelfAttention(nnx.Module):
    """Multi-head attention among tokens."""

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, compute: Compute):
        self.compute, self.heads = compute, config.num_attention_heads
        width, factor = config.hidden_size, config.initializer_factor
        into = normal(width**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor)
        self.k_proj = Linear(width, width, compute, ("embed", "heads"), init=into)
        self.v_proj = Linear(width, width, compute, ("embed", "heads"), init=into)
        self.q_proj = Linear(width, width, compute, ("embed", "heads"), init=into)
        self.out_proj = Linear(width, width, compute, ("heads", "embed"), init=normal(width**-0.5 * factor))

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (self.compute.constrain(p(x).reshape(shape), HEADS) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = dot_product(q, k, v, mask=mask, precision=self.compute.precision)
        return self.out_proj(out.reshape(x.shape))


class MLP(nnx.Module):
    """Linear, activation, linear."""

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, compute: Compute):
        self.activation = ACTIVATIONS[config.hidden_act]
        width, factor = config.hidden_size, config.initializer_factor
        self.fc1 = Linear(width, config.intermediate_size, compute, ("embed", "mlp"), init=normal((2 * width) ** -0.5 * factor))
        out = normal(width**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor)
        self.fc2 = Linear(config.intermediate_size, width, compute, ("mlp", "embed"), init=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.activation(self.fc1(x)))


class EncoderLayer(nnx.Module):
    """Self-attention and feed-forward, each pre-normed and residual."""

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, compute: Compute):
        self.compute = compute
        self.self_attn = SelfAttention(config, compute)
        self.layer_norm1 = LayerNorm(config.hidden_size, compute, config.layer_norm_eps)
        self.mlp = MLP(config, compute)
        self.layer_norm2 = LayerNorm(config.hidden_size, compute, config.layer_norm_eps)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        x = x + self.mlp(self.layer_norm2(x))
        return self.compute.constrain(x, TOKENS)


class Embeddings(nnx.Module):
    """Token and position embeddings, added."""

    def __init__(self, config: CLIPTextConfig, compute: Compute):
        width, std = config.hidden_size, 0.02 * config.initializer_factor
        self.token_embedding = Embed(config.vocab_size, width, compute, ("vocab", "embed"), std)
        self.position_embedding = Embed(config.max_position_embeddings, width, compute, (None, "embed"), std)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.token_embedding(ids) + self.position_embedding(jnp.arange(ids.shape[1]))[None, :, :]


class Encoder(nnx.Module):
    """The stack of layers."""

    def __init__(self, config: CLIPTextConfig | CLIPVisionConfig, compute: Compute):
        self.layers = nnx.List(EncoderLayer(config, compute) for _ in range(config.num_hidden_layers))


class TextTransformer(nnx.Module):
    """Embeddings, layers and the final norm; a module of its own since the keys say so."""

    def __init__(self, config: CLIPTextConfig, compute: Compute):
        self.embeddings = Embeddings(config, compute)
        self.encoder = Encoder(config, compute)
        self.final_layer_norm = LayerNorm(config.hidden_size, compute, config.layer_norm_eps)


class CLIPTextModel(nnx.Module):
    """Token ids to text states."""

    def __init__(self, config: CLIPTextConfig, compute: Compute):
        self.config, self.compute = config, compute
        self.text_model = TextTransformer(config, compute)
        if config.with_projection:
            width = config.hidden_size
            init = normal(width**-0.5 * config.initializer_factor)
            self.text_projection = Linear(width, config.projection_dim, compute, use_bias=False, init=init)

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None) -> TextStates:
        """Encode ids [b l]; `attention_mask` [b l] is nonzero where a token may be looked at.

        Stable Diffusion was trained without the mask: padding is looked at like any token.
        """
        check_shape("input_ids", input_ids, "batch", "length")
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise ValueError(f"{length} tokens are more than max_position_embeddings={self.config.max_position_embeddings}")
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None]
        if attention_mask is not None:
            mask = mask & (attention_mask != 0)[:, None, None, :]
        x = self.text_model.embeddings(input_ids)
        states = [x]
        for layer in self.text_model.encoder.layers:
            x = self.compute.remat(layer.__call__)(x, mask)
            states.append(x)
        last = self.text_model.final_layer_norm(x)
        pooled = jnp.take_along_axis(last, self._end_of_text(input_ids)[:, None, None], axis=1)[:, 0]
        embeds = self.text_projection(pooled) if self.config.with_projection else None
        return TextStates(last, tuple(states), pooled, embeds)

    def final_norm(self, state: jax.Array) -> jax.Array:
        """The norm after the last layer, for the output [b l c] of an earlier one (clip skip)."""
        return self.text_model.final_layer_norm(state)

    def _end_of_text(self, ids: jax.Array) -> jax.Array:
        """Position of the first end-of-text token in each row -> [b]; 0 where there is none."""
        if self.config.eos_token_id == 2:  # the old convention: end-of-text is the highest id
            return jnp.argmax(ids, axis=1)
        return jnp.argmax(ids == self.config.eos_token_id, axis=1)


class VisionEmbeddings(nnx.Module):
    """Patches, after one token that stands for the whole image; positions added."""

    def __init__(self, config: CLIPVisionConfig, compute: Compute):
        width, size, factor = config.hidden_size, config.patch_size, config.initializer_factor
        self.compute = compute
        self.class_embedding = parameter((width,), ("norm",), normal(width**-0.5 * factor))
        self.patch_embedding = Conv(
            3, width, compute, kernel_size=size, stride=size, padding="VALID", use_bias=False,
            init=normal(config.initializer_range * factor),
        )  # fmt: skip
        positions = (config.image_size // size) ** 2 + 1
        self.position_embedding = Embed(positions, width, compute, (None, "embed"), config.initializer_range * factor)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        patches = self.patch_embedding(pixels)
        batch, width = patches.shape[0], patches.shape[-1]
        first = jnp.broadcast_to(self.compute.weight(self.class_embedding)[None, None, :], (batch, 1, width))
        x = jnp.concatenate((first, patches.reshape(batch, -1, width)), axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1]))[None, :, :]


class VisionTransformer(nnx.Module):
    """Embeddings, layers and the norms around them; a module of its own since the keys say so, spelling included."""

    def __init__(self, config: CLIPVisionConfig, compute: Compute):
        self.embeddings = VisionEmbeddings(config, compute)
        self.pre_layrnorm = LayerNorm(config.hidden_size, compute, config.layer_norm_eps)
        self.encoder = Encoder(config, compute)
        self.post_layernorm = LayerNorm(config.hidden_size, compute, config.layer_norm_eps)


class CLIPVisionModel(nnx.Module):
    """Images to embeddings in the space of the texts'."""

    def __init__(self, config: CLIPVisionConfig, compute: Compute):
        self.config, self.compute = config, compute
        self.vision_model = VisionTransformer(config, compute)
        init = normal(config.hidden_size**-0.5 * config.initializer_factor)
        self.visual_projection = Linear(config.hidden_size, config.projection_dim, compute, use_bias=False, init=init)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Pixels [b image_size image_size 3], normalised, to projected embeddings [b p], of whatever length.

        Raises:
            ValueError: for pixels of another shape.
        """
        size = self.config.image_size
        check_shape("pixels", pixels, "batch", size, size, 3)
        x = self.vision_model.pre_layrnorm(self.vision_model.embeddings(pixels.astype(self.compute.dtype)))
        for layer in self.vision_model.encoder.layers:
            x = self.compute.remat(layer.__call__)(x)
        return self.visual_projection(self.vision_model.post_layernorm(x[:, 0]))
