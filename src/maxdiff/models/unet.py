"""The denoising network of Stable Diffusion 1.x, 2.x and XL (Rombach et al. 2022, Podell et al. 2023).

Attribute names, configuration keys and results are those of diffusers' UNet2DConditionModel.
"""

import dataclasses
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiff.models.blocks import Downsample2D, ResnetBlock2D, Transformer2DModel, Upsample2D
from maxdiff.models.config import per_block, read_config, require, require_divisors, require_integers, write_config
from maxdiff.models.layers import Compute, Conv, GroupNorm, Linear, check_shape, timestep_embedding, zeros


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """diffusers' keys and defaults; a tuple gives one value per block, from the outside in.

    Attributes:
        sample_size: height and width of the latents that the model was trained at; not a limit.
        attention_head_dim: the NUMBER of heads, whatever its name says (diffusers' old mistake,
            kept in every checkpoint).
        upcast_attention: accepted and met: scores and softmax are always float32.
        time_cond_proj_dim: width of the guidance embedding of distilled (LCM) models.
    """

    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 4
    out_channels: int = 4
    down_block_types: tuple[str, ...] = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    up_block_types: tuple[str, ...] = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int = 1280
    transformer_layers_per_block: int | tuple[int | tuple[int, ...], ...] = 1
    reverse_transformer_layers_per_block: tuple[int | tuple[int, ...], ...] | None = None
    attention_head_dim: int | tuple[int, ...] = 8
    use_linear_projection: bool = False
    upcast_attention: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None
    time_cond_proj_dim: int | None = None

    # Keys without a field, and the values that this network computes (the first is written out).
    FIXED: ClassVar[dict[str, tuple]] = {
        "mid_block_type": ("UNetMidBlock2DCrossAttn",),
        "act_fn": ("silu", "swish"),
        "center_input_sample": (False,),
        "downsample_padding": (1,),
        "mid_block_scale_factor": (1, 1.0),
        "dropout": (0.0, 0),
        "encoder_hid_dim": (None,),
        "encoder_hid_dim_type": (None,),
        "num_attention_heads": (None,),
        "dual_cross_attention": (False,),
        "class_embed_type": (None,),
        "num_class_embeds": (None,),
        "resnet_time_scale_shift": ("default",),
        "resnet_skip_time_act": (False,),
        "resnet_out_scale_factor": (1.0, 1),
        "time_embedding_type": ("positional",),
        "time_embedding_dim": (None,),
        "time_embedding_act_fn": (None,),
        "timestep_post_act": (None,),
        "conv_in_kernel": (3,),
        "conv_out_kernel": (3,),
        "attention_type": ("default",),
        "class_embeddings_concat": (False,),
        "only_cross_attention": (False,),
        "mid_block_only_cross_attention": (None, False),
        "cross_attention_norm": (None,),
        "addition_embed_type_num_heads": (64,),
    }

    def __post_init__(self):
        blocks = len(self.block_out_channels)
        for kind in self.down_block_types:
            if kind not in ("CrossAttnDownBlock2D", "DownBlock2D"):
                raise ValueError(f"down_block_types={kind!r} is not supported (allowed: CrossAttnDownBlock2D, DownBlock2D)")
        for kind in self.up_block_types:
            if kind not in ("CrossAttnUpBlock2D", "UpBlock2D"):
                raise ValueError(f"up_block_types={kind!r} is not supported (allowed: CrossAttnUpBlock2D, UpBlock2D)")
        for key in ("down_block_types", "up_block_types", "layers_per_block", "attention_head_dim",
                    "transformer_layers_per_block"):  # fmt: skip
            per_block(getattr(self, key), blocks, key)
        require_integers(self, "in_channels", "out_channels", "block_out_channels", "layers_per_block",
                         "norm_num_groups", "cross_attention_dim", "attention_head_dim")  # fmt: skip
        for depth in per_block(self.transformer_layers_per_block, blocks, "transformer_layers_per_block"):
            if min(depth if isinstance(depth, tuple) else (depth,)) < 1:
                raise ValueError(f"transformer_layers_per_block={self.transformer_layers_per_block!r} is not supported "
                                 "(allowed: positive integers)")  # fmt: skip
        if isinstance(self.cross_attention_dim, tuple):
            raise ValueError(f"cross_attention_dim={self.cross_attention_dim!r} is not supported (allowed: one integer)")
        require_divisors(self, "norm_num_groups", "attention_head_dim")
        require(self, "addition_embed_type", None, "text_time")
        if self.addition_embed_type:
            require_integers(self, "addition_time_embed_dim", "projection_class_embeddings_input_dim")

    @property
    def heads(self) -> tuple[int, ...]:
        """Attention heads of each block that attends, down and in the middle; those up mirror them."""
        counts = per_block(self.attention_head_dim, len(self.block_out_channels), "attention_head_dim")
        down = [count for kind, count in zip(self.down_block_types, counts, strict=True) if kind.startswith("CrossAttn")]
        return (*down, counts[-1])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "unet") -> "UNetConfig":
        """Read diffusers' keys; ValueError names `where`, key and value for what we don't support."""
        return read_config(cls, values, where)

    def to_dict(self) -> dict[str, Any]:
        """diffusers' config.json."""
        return write_config(self, "UNet2DConditionModel")


class TimestepEmbedding(nnx.Module):
    """Linear, silu, linear; a guidance embedding (LCM) may be added before."""

    def __init__(self, c_in: int, c_out: int, compute: Compute, cond_dim: int | None = None):
        self.linear_1 = Linear(c_in, c_out, compute, ("embed", "mlp"))
        self.linear_2 = Linear(c_out, c_out, compute, ("mlp", "embed"))
        self.cond_proj = Linear(cond_dim, c_in, compute, use_bias=False) if cond_dim else None

    def __call__(self, x: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        if condition is not None and self.cond_proj is not None:
            x = x + self.cond_proj(condition)
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


class DownBlock2D(nnx.Module):
    """Residual blocks, each followed by a transformer where `attentions` has one; then half the size."""

    def __init__(self, resnets: list, attentions: list, downsampler: Downsample2D | None, compute: Compute):
        self.compute = compute
        self.attentions = nnx.List(attentions)
        self.resnets = nnx.List(resnets)
        self.downsamplers = nnx.List([downsampler] if downsampler else [])

    def __call__(self, x: jax.Array, temb: jax.Array, context: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the result and what the way up will want of each level."""
        skips = []
        for resnet, attention in zip_longest(self.resnets, self.attentions):
            x = self.compute.remat(resnet.__call__)(x, temb)
            if attention is not None:
                x = attention(x, context)
            skips.append(x)
        for downsampler in self.downsamplers:
            x = downsampler(x)
            skips.append(x)
        return x, skips


class MidBlock2D(nnx.Module):
    """A residual block, a transformer, a residual block."""

    def __init__(self, resnets: list, attentions: list, compute: Compute):
        self.compute = compute
        self.attentions = nnx.List(attentions)
        self.resnets = nnx.List(resnets)

    def __call__(self, x: jax.Array, temb: jax.Array, context: jax.Array) -> jax.Array:
        x = self.compute.remat(self.resnets[0].__call__)(x, temb)
        x = self.attentions[0](x, context)
        return self.compute.remat(self.resnets[1].__call__)(x, temb)


class UpBlock2D(nnx.Module):
    """Like a down block, but each residual block also takes what the way down had left; then twice the size."""

    def __init__(self, resnets: list, attentions: list, upsampler: Upsample2D | None, compute: Compute):
        self.compute = compute
        self.attentions = nnx.List(attentions)
        self.resnets = nnx.List(resnets)
        self.upsamplers = nnx.List([upsampler] if upsampler else [])

    def __call__(self, x: jax.Array, skips: list[jax.Array], temb: jax.Array, context: jax.Array) -> jax.Array:
        """Takes what it needs from the end of `skips`."""
        for resnet, attention in zip_longest(self.resnets, self.attentions):
            x = jnp.concatenate([x, skips.pop()], axis=-1)
            x = self.compute.remat(resnet.__call__)(x, temb)
            if attention is not None:
                x = attention(x, context)
        for upsampler in self.upsamplers:
            _, height, width, _ = skips[-1].shape
            x = upsampler(x, (height, width))
        return x


class UNet2DConditionModel(nnx.Module):
    """Predicts noise (or velocity, or the image) from noisy latents, timesteps and text states."""

    def __init__(self, config: UNetConfig, compute: Compute):
        self.config, self.compute = config, compute
        channels = config.block_out_channels
        temb = 4 * channels[0]
        self.conv_in = Conv(config.in_channels, channels[0], compute)
        self.time_embedding = TimestepEmbedding(channels[0], temb, compute, config.time_cond_proj_dim)
        if config.addition_embed_type:
            assert config.projection_class_embeddings_input_dim
            self.add_embedding = TimestepEmbedding(config.projection_class_embeddings_input_dim, temb, compute)
        self.down_blocks = nnx.List(_down_blocks(config, compute))
        heads = per_block(config.attention_head_dim, len(channels), "attention_head_dim")[-1]
        depth = per_block(config.transformer_layers_per_block, len(channels), "transformer_layers_per_block")[-1]
        depth = depth[0] if isinstance(depth, tuple) else depth
        self.mid_block = MidBlock2D(
            [_resnet(config, channels[-1], channels[-1], compute) for _ in range(2)],
            [_transformer(config, channels[-1], heads, depth, compute)],
            compute,
        )
        self.up_blocks = nnx.List(_up_blocks(config, compute))
        self.conv_norm_out = GroupNorm(channels[0], config.norm_num_groups, config.norm_eps, compute)
        self.conv_out = Conv(channels[0], config.out_channels, compute, init=zeros)

    def __call__(
        self,
        sample: jax.Array,
        timesteps: jax.Array,
        encoder_hidden_states: jax.Array,
        added_cond: Mapping[str, jax.Array] | None = None,
        timestep_cond: jax.Array | None = None,
    ) -> jax.Array:
        """Denoise one step.

        Args:
            sample: noisy latents [b h w in_channels]. Any height and width of at least 2^(blocks-1).
            timesteps: [b], integers or not, 0 (clean) to 1000 (noise).
            encoder_hidden_states: text states [b l cross_attention_dim].
            added_cond: for SDXL, `text_embeds` [b p] (pooled) and `time_ids` [b 6] (original height
                and width, crop top and left, target height and width, in pixels).
            timestep_cond: for LCM, the guidance embedding [b time_cond_proj_dim].

        Returns:
            The prediction [b h w out_channels], in compute.dtype.
        """
        config, dtype = self.config, self.compute.dtype
        check_shape("sample", sample, "batch", "height", "width", config.in_channels)
        check_shape("timesteps", timesteps, sample.shape[0])
        check_shape("encoder_hidden_states", encoder_hidden_states, sample.shape[0], "length", config.cross_attention_dim)
        if timestep_cond is not None:
            if config.time_cond_proj_dim is None:
                raise ValueError("timestep_cond is for distilled UNets, and this one has no time_cond_proj_dim")
            check_shape("timestep_cond", timestep_cond, sample.shape[0], config.time_cond_proj_dim)
        context = encoder_hidden_states.astype(dtype)
        temb = self._sinusoids(timesteps, config.block_out_channels[0])
        temb = self.time_embedding(temb, None if timestep_cond is None else timestep_cond.astype(dtype))
        if config.addition_embed_type:
            temb = temb + self._text_time(added_cond)

        x = self.conv_in(sample.astype(dtype))
        skips = [x]
        for block in self.down_blocks:
            x, left = block(x, temb, context)
            skips.extend(left)
        x = self.mid_block(x, temb, context)
        for block in self.up_blocks:
            x = block(x, skips, temb, context)
        assert not skips
        return self.conv_out(self.conv_norm_out(x, silu=True))

    def _sinusoids(self, t: jax.Array, dim: int) -> jax.Array:
        config = self.config
        embedding = timestep_embedding(t, dim, flip_sin_to_cos=config.flip_sin_to_cos, freq_shift=config.freq_shift)
        return embedding.astype(self.compute.dtype)

    def _text_time(self, added_cond: Mapping[str, jax.Array] | None) -> jax.Array:
        """SDXL's micro-conditioning (Podell et al. 2023, section 2.2) -> [b 4c]."""
        if added_cond is None or not {"text_embeds", "time_ids"} <= set(added_cond):
            raise ValueError("this UNet (addition_embed_type=text_time) needs added_cond with text_embeds and time_ids")
        text, ids = added_cond["text_embeds"].astype(self.compute.dtype), added_cond["time_ids"]
        assert self.config.addition_time_embed_dim
        assert self.config.projection_class_embeddings_input_dim
        check_shape("time_ids", ids, text.shape[0], 6)
        width = self.config.projection_class_embeddings_input_dim - 6 * self.config.addition_time_embed_dim
        check_shape("text_embeds", text, ids.shape[0], width)
        sizes = self._sinusoids(ids.reshape(-1), self.config.addition_time_embed_dim).reshape(ids.shape[0], -1)
        return self.add_embedding(jnp.concatenate([text, sizes], axis=-1))


def _resnet(config: UNetConfig, c_in: int, c_out: int, compute: Compute) -> ResnetBlock2D:
    return ResnetBlock2D(c_in, c_out, 4 * config.block_out_channels[0], config.norm_num_groups, config.norm_eps, compute)


def _transformer(config: UNetConfig, channels: int, heads: int, depth: int, compute: Compute) -> Transformer2DModel:
    return Transformer2DModel(
        channels, config.cross_attention_dim, heads, depth, config.norm_num_groups, config.use_linear_projection, compute
    )


@dataclasses.dataclass(frozen=True)
class _Level:
    """What the blocks of one resolution share."""

    channels: int
    layers: int
    heads: int
    depth: int | tuple[int, ...]

    def transformers(self, config: UNetConfig, layers: int, compute: Compute) -> list[Transformer2DModel]:
        depths = per_block(self.depth, layers, "transformer_layers_per_block")
        return [_transformer(config, self.channels, self.heads, depth, compute) for depth in depths]


def _levels(config: UNetConfig) -> list[_Level]:
    n = len(config.block_out_channels)
    keys = ("layers_per_block", "attention_head_dim", "transformer_layers_per_block")
    values = zip(*(per_block(getattr(config, key), n, key) for key in keys), strict=True)
    return [_Level(channels, *value) for channels, value in zip(config.block_out_channels, values, strict=True)]


def _down_blocks(config: UNetConfig, compute: Compute) -> list[DownBlock2D]:
    levels = _levels(config)
    blocks, c_in = [], config.block_out_channels[0]
    for i, (level, kind) in enumerate(zip(levels, config.down_block_types, strict=True)):
        c = level.channels
        resnets = [_resnet(config, c_in if j == 0 else c, c, compute) for j in range(level.layers)]
        attentions = level.transformers(config, level.layers, compute) if kind == "CrossAttnDownBlock2D" else []
        last = i == len(levels) - 1
        blocks.append(DownBlock2D(resnets, attentions, None if last else Downsample2D(c, compute, symmetric=True), compute))
        c_in = c
    return blocks


def _up_blocks(config: UNetConfig, compute: Compute) -> list[UpBlock2D]:
    levels = _levels(config)[::-1]
    if config.reverse_transformer_layers_per_block is not None:
        depths = per_block(config.reverse_transformer_layers_per_block, len(levels), "reverse_transformer_layers_per_block")
        levels = [dataclasses.replace(level, depth=d) for level, d in zip(levels, depths, strict=True)]
    blocks, c_below = [], levels[0].channels
    for i, (level, kind) in enumerate(zip(levels, config.up_block_types, strict=True)):
        c, layers = level.channels, level.layers + 1
        # One skip for each residual block on the way down, and one from before them, whose width
        # is that of the level above (or of conv_in).
        c_above = levels[min(i + 1, len(levels) - 1)].channels
        resnets = []
        for j in range(layers):
            skip = c_above if j == layers - 1 else c
            resnets.append(_resnet(config, (c_below if j == 0 else c) + skip, c, compute))
        attentions = level.transformers(config, layers, compute) if kind == "CrossAttnUpBlock2D" else []
        last = i == len(levels) - 1
        blocks.append(UpBlock2D(resnets, attentions, None if last else Upsample2D(c, compute), compute))
        c_below = c
    return blocks
