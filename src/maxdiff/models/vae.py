"""The autoencoder between images and latents (Rombach et al. 2022, section 3.1).

Attribute names, configuration keys and results are those of diffusers' AutoencoderKL.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiff.models.blocks import Downsample2D, ResnetBlock2D, SpatialAttention, Upsample2D
from maxdiff.models.config import read_config, require_divisors, require_integers, write_config
from maxdiff.models.layers import Compute, Conv, GroupNorm, check_shape

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class VAEConfig:
    """diffusers' keys.

    Attributes:
        sample_size: height and width in pixels that the model was trained at; not a limit.
        scaling_factor: diffusion works on latents times this, so that their variance is about 1.
        force_upcast: the model overflows in float16, so where that is asked for it computes in float32
            (SDXL's); bfloat16 has float32's range. Absent means no, as checkpoints older than the key
            never needed it; diffusers' own default is true.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int | tuple[int, int] = 32
    scaling_factor: float = 0.18215
    force_upcast: bool = False

    # Keys without a field, and the values that this network computes (the first is written out).
    FIXED: ClassVar[dict[str, tuple]] = {
        "act_fn": ("silu", "swish"),
        "shift_factor": (None,),
        "latents_mean": (None,),
        "latents_std": (None,),
        "use_quant_conv": (True,),
        "use_post_quant_conv": (True,),
        "mid_block_add_attention": (True,),
    }

    def __post_init__(self):
        for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
            value = getattr(self, key)
            if value != (kind,) * len(self.block_out_channels):
                raise ValueError(f"{key}={value!r} is not supported (allowed: {len(self.block_out_channels)} times {kind!r})")
        require_integers(self, "in_channels", "out_channels", "block_out_channels", "layers_per_block",
                         "latent_channels", "norm_num_groups")  # fmt: skip
        require_divisors(self, "norm_num_groups")

    @property
    def downscale(self) -> int:
        """Pixels per latent in each direction."""
        return 2 ** (len(self.block_out_channels) - 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "vae") -> "VAEConfig":
        """Read diffusers' keys; ValueError names `where`, key and value for what we don't support."""
        return read_config(cls, values, where)

    def to_dict(self) -> dict[str, Any]:
        """diffusers' config.json."""
        return write_config(self, "AutoencoderKL")


class Gaussian(NamedTuple):
    """The encoder's answer: a diagonal Gaussian over latents, [b h w c] each, float32, unscaled."""

    mean: jax.Array
    logvar: jax.Array

    def sample(self, noise: jax.Array) -> jax.Array:
        """mean + std * noise, with standard normal `noise` of the same shape."""
        return self.mean + jnp.exp(0.5 * self.logvar) * noise

    def kl(self) -> jax.Array:
        """KL divergence to the standard normal (Kingma & Welling 2014, appendix B), summed per image -> [b]."""
        return 0.5 * jnp.sum(jnp.square(self.mean) + jnp.exp(self.logvar) - 1.0 - self.logvar, axis=(1, 2, 3))


class Level(nnx.Module):
    """Residual blocks of one resolution, and the step to the next; one list holds the sampler, one is empty."""

    def __init__(self, resnets: list, compute: Compute, *, down: Downsample2D | None = None, up: Upsample2D | None = None):
        self.compute = compute
        self.resnets = nnx.List(resnets)
        self.downsamplers = nnx.List([down] if down else [])
        self.upsamplers = nnx.List([up] if up else [])

    def __call__(self, x: jax.Array) -> jax.Array:
        for resnet in self.resnets:
            x = self.compute.remat(resnet.__call__)(x)
        for sampler in (*self.downsamplers, *self.upsamplers):
            x = sampler(x)
        return x


class MidBlock(nnx.Module):
    """A residual block, attention over all pixels, a residual block."""

    def __init__(self, channels: int, groups: int, compute: Compute):
        self.compute = compute
        self.attentions = nnx.List([SpatialAttention(channels, groups, EPS, compute)])
        self.resnets = nnx.List(_resnets(channels, channels, 2, groups, compute))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.compute.remat(self.resnets[0].__call__)(x)
        x = self.compute.remat(self.attentions[0].__call__)(x)
        return self.compute.remat(self.resnets[1].__call__)(x)


class Encoder(nnx.Module):
    """Images [b H W 3] -> moments [b h w 2c]."""

    def __init__(self, config: VAEConfig, compute: Compute):
        channels, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = Conv(config.in_channels, channels[0], compute)
        levels = []
        for i, c in enumerate(channels):
            resnets = _resnets(channels[max(i - 1, 0)], c, config.layers_per_block, groups, compute)
            last = i == len(channels) - 1
            levels.append(Level(resnets, compute, down=None if last else Downsample2D(c, compute, symmetric=False)))
        self.down_blocks = nnx.List(levels)
        self.mid_block = MidBlock(channels[-1], groups, compute)
        self.conv_norm_out = GroupNorm(channels[-1], groups, EPS, compute)
        self.conv_out = Conv(channels[-1], 2 * config.latent_channels, compute)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        return self.conv_out(self.conv_norm_out(self.mid_block(x), silu=True))


class Decoder(nnx.Module):
    """Latents [b h w c] -> images [b H W 3]."""

    def __init__(self, config: VAEConfig, compute: Compute):
        channels, groups = config.block_out_channels[::-1], config.norm_num_groups
        self.conv_in = Conv(config.latent_channels, channels[0], compute)
        self.mid_block = MidBlock(channels[0], groups, compute)
        levels = []
        for i, c in enumerate(channels):
            resnets = _resnets(channels[max(i - 1, 0)], c, config.layers_per_block + 1, groups, compute)
            last = i == len(channels) - 1
            levels.append(Level(resnets, compute, up=None if last else Upsample2D(c, compute)))
        self.up_blocks = nnx.List(levels)
        self.conv_norm_out = GroupNorm(channels[-1], groups, EPS, compute)
        self.conv_out = Conv(channels[-1], config.out_channels, compute)

    def __call__(self, z: jax.Array) -> jax.Array:
        x = self.mid_block(self.conv_in(z))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(self.conv_norm_out(x, silu=True))


class AutoencoderKL(nnx.Module):
    """Variational autoencoder with a small KL term; 8 pixels a latent in each direction."""

    def __init__(self, config: VAEConfig, compute: Compute):
        if config.force_upcast and compute.dtype == jnp.float16:
            compute = dataclasses.replace(compute, dtype=jnp.float32)
        self.config, self.compute = config, compute
        self.encoder = Encoder(config, compute)
        self.decoder = Decoder(config, compute)
        self.quant_conv = Conv(2 * config.latent_channels, 2 * config.latent_channels, compute, kernel_size=1)
        self.post_quant_conv = Conv(config.latent_channels, config.latent_channels, compute, kernel_size=1)

    def encode(self, images: jax.Array) -> Gaussian:
        """Images [b H W 3] in [-1, 1] -> the distribution of their latents, not yet times scaling_factor."""
        check_shape("images", images, "batch", "height", "width", self.config.in_channels)
        moments = self.quant_conv(self.encoder(images.astype(self.compute.dtype))).astype(jnp.float32)
        mean, logvar = jnp.split(moments, 2, axis=-1)
        return Gaussian(mean, jnp.clip(logvar, -30.0, 20.0))

    def decode(self, latents: jax.Array) -> jax.Array:
        """Latents [b h w c], already divided by scaling_factor -> images [b H W 3], about [-1, 1]."""
        check_shape("latents", latents, "batch", "height", "width", self.config.latent_channels)
        return self.decoder(self.post_quant_conv(latents.astype(self.compute.dtype)))


def _resnets(c_in: int, c_out: int, count: int, groups: int, compute: Compute) -> list[ResnetBlock2D]:
    return [ResnetBlock2D(c_in if i == 0 else c_out, c_out, None, groups, EPS, compute) for i in range(count)]
