"""Layers: parameters that name their logical axes, computed by plain JAX.

Flax NNX serves as a notation for the parameter tree only. A layer's constructor describes its
parameters (shape, axes, initialiser) and allocates nothing; `network.py` turns the description
into a function of a nested dict of arrays. Attribute names equal the checkpoint's keys, and the
leaves have Flax's names: kernel (transposed weight), scale, embedding, bias.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from maxdiff.models.attention import AttentionKernel, dot_product

Axes = tuple[str | None, ...]
# (random numbers, shape) -> values, float32. Drawn on the host: compiling a draw for every shape takes a minute.
Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def zeros(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 0."""
    return np.zeros(shape, np.float32)


def ones(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 1."""
    return np.ones(shape, np.float32)


def fan_in_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform in +-1/sqrt(fan_in), torch's default for Linear and Conv2d, with which diffusers starts."""
    bound = np.float32(math.prod(shape[:-1]) ** -0.5)
    return (2 * rng.random(shape, np.float32) - 1) * bound


def normal(std: float) -> Initializer:
    """Normal with mean 0."""
    return lambda rng, shape: rng.standard_normal(shape, np.float32) * np.float32(std)


def _as_is(x: jax.Array, _: Axes) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a network computes, handed in from outside so that networks know no mesh.

    Attributes:
        dtype: of activations and of weights as they are used; parameters keep their own dtype.
            Norm statistics, softmax and the sinusoids of the timestep are float32 whatever it is.
        precision: of matrix products and convolutions, as in lax.Precision.
        attention: the UNet's kernel, from `attention.kernel(name)`. The text encoders' 77 masked tokens
            and the autoencoder's one wide head take `dot_product` always: no fused kernel takes them.
        constrain: (activation, logical axes) -> the same values, with a sharding.
        fused: the module `fused`, whose GPU kernels compute norms and biases where they take the shape and dtype; or None.
        remat: wraps each residual and transformer block; `jax.checkpoint`, with or without a
            policy, recomputes it in the backward pass. By default nothing is recomputed.
    """

    dtype: Any = jnp.float32
    precision: lax.Precision | None = None
    attention: AttentionKernel = dot_product
    constrain: Callable[[jax.Array, Axes], jax.Array] = _as_is
    fused: Any = None
    remat: Callable[[Callable], Callable] = lambda block: block

    def __post_init__(self):
        for name in ("attention", "constrain", "remat"):
            if not callable(value := getattr(self, name)):
                raise ValueError(f"{name}={value!r} is no function (kernels are made by maxdiff.models.attention.kernel)")

    def weight(self, parameter: nnx.Param) -> jax.Array:
        """The parameter as it enters a product."""
        return parameter.get_value().astype(self.dtype)

    def add(self, x: jax.Array, bias: nnx.Param | None) -> jax.Array:
        """x [... c] plus a parameter [c], if there is one."""
        if bias is None:
            return x
        if self.kernels_for(x):
            return self.fused.add_to_channels(x, self.statistic(bias)[None])
        return x + _along_last(self.weight(bias), x.ndim)

    def kernels_for(self, x: jax.Array) -> bool:
        """Whether `fused` computes with this activation [b ... c]."""
        return self.fused is not None and self.fused.takes(x)

    def statistic(self, parameter: nnx.Param) -> jax.Array:
        """The parameter in float32: of a norm, or of what is summed."""
        return parameter.get_value().astype(jnp.float32)


def parameter(shape: tuple[int, ...], axes: Axes, init: Initializer) -> nnx.Param:
    """Describe a parameter: its shape, the logical name of each dimension, its initialiser."""
    assert len(shape) == len(axes), (shape, axes)
    # The names travel as `axes` rather than as NNX's `out_sharding`, which NNX would act on by itself.
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, init=init)


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's share below x, exactly (Hendrycks & Gimpel 2016, section 2), in x's dtype.

    By erf, as torch has it: jax.nn.gelu's erfc is instructions enough to make a GPU wait for them, not for memory.
    """
    y = x.astype(jnp.float32)
    return (0.5 * y * (1 + lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def check_shape(name: str, x: jax.Array, *expected: int | str) -> None:
    """Raise ValueError unless x has this shape; a name stands for any size."""
    if x.ndim != len(expected) or any(isinstance(e, int) and e != n for e, n in zip(expected, x.shape, strict=True)):
        raise ValueError(f"{name} has shape {list(x.shape)}, but this network takes [{' '.join(map(str, expected))}]")


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


class Linear(nnx.Module):
    """y = x W + b; x is [... in], W is [in out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        compute: Compute,
        axes: Axes = ("embed", None),
        *,
        use_bias: bool = True,
        init: Initializer = fan_in_uniform,
    ):
        self.compute = compute
        self.kernel = parameter((in_features, out_features), axes, init)
        # A bias is small, so it follows its dimension only where the product's output is split.
        self.bias = (
            parameter((out_features,), (axes[1] if axes[1] in ("heads", "mlp") else "norm",), zeros) if use_bias else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.compute.add(jnp.matmul(x, self.compute.weight(self.kernel), precision=self.compute.precision), self.bias)


class Conv(nnx.Module):
    """2-D convolution; x is [b h w in], the kernel [kh kw in/groups out]. `padding` is as in lax."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        compute: Compute,
        *,
        kernel_size: int | tuple[int, int] = 3,
        stride: int = 1,
        padding: tuple[tuple[int, int], tuple[int, int]] | str | None = None,
        groups: int = 1,
        use_bias: bool = True,
        init: Initializer = fan_in_uniform,
    ):
        self.compute = compute
        self.stride, self.groups = stride, groups
        height, width = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
        above, left = (height - 1) // 2, (width - 1) // 2
        self.padding = padding or ((above, above), (left, left))
        shape = (height, width, in_channels // groups, out_channels)
        self.kernel = parameter(shape, (None, None, "conv_in", "conv_out"), init)
        self.bias = parameter((out_channels,), ("norm",), zeros) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x,
            self.compute.weight(self.kernel),
            (self.stride, self.stride),
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
            precision=self.compute.precision,
        )
        return self.compute.add(y, self.bias)


class BatchNorm(nnx.Module):
    """Batch normalisation (Ioffe & Szegedy 2015) of [b h w c] by the statistics that training has left: inference alone."""

    def __init__(self, channels: int, compute: Compute, eps: float):
        self.compute, self.eps = compute, eps
        self.scale = parameter((channels,), ("norm",), ones)
        self.bias = parameter((channels,), ("norm",), zeros)
        self.running_mean = parameter((channels,), ("norm",), zeros)
        self.running_var = parameter((channels,), ("norm",), ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias, mean, variance = (
            self.compute.statistic(p) for p in (self.scale, self.bias, self.running_mean, self.running_var)
        )
        # Folded to one product and one sum for each channel, which the convolution before can take along.
        slope = scale * lax.rsqrt(variance + self.eps)
        y = x.astype(jnp.float32) * _along_last(slope, x.ndim) + _along_last(bias - mean * slope, x.ndim)
        return y.astype(self.compute.dtype)


class GroupNorm(nnx.Module):
    """Group normalisation (Wu & He 2018) over [b ... c], and silu if wanted, in float32 until the end."""

    def __init__(self, channels: int, groups: int, eps: float, compute: Compute):
        if channels % groups:
            raise ValueError(f"norm_num_groups={groups} does not divide {channels} channels")
        self.compute, self.groups, self.eps = compute, groups, eps
        self.scale = parameter((channels,), ("norm",), ones)
        self.bias = parameter((channels,), ("norm",), zeros)

    def __call__(self, x: jax.Array, *, silu: bool = False) -> jax.Array:
        if self.compute.kernels_for(x):
            scale, bias = self.compute.statistic(self.scale), self.compute.statistic(self.bias)
            return self.compute.fused.group_norm(x, scale, bias, self.groups, self.eps, silu)
        mean, variance = self._statistics(x)
        over_pixels = lambda per_channel: per_channel.reshape(-1, *[1] * (x.ndim - 2), x.shape[-1])
        wide = lambda statistic: over_pixels(jnp.repeat(statistic, x.shape[-1] // self.groups, axis=-1))
        scale, bias = (over_pixels(self.compute.statistic(p)) for p in (self.scale, self.bias))
        y = (x.astype(jnp.float32) - wide(mean)) * (wide(lax.rsqrt(variance + self.eps)) * scale) + bias
        return (jax.nn.silu(y) if silu else y).astype(self.compute.dtype)

    def _statistics(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance [b groups]: first of each channel, which reads x once and in the order in which it lies."""
        pixels = x.astype(jnp.float32).reshape(x.shape[0], -1, x.shape[-1])
        # In float32 the squares are taken about the channel's mean, for a second pass over x. bfloat16 has rounded x by far
        # more than their cancellation could. The gradient through the centre is zero.
        exact = x.dtype == jnp.float32
        centre = lax.stop_gradient(pixels.mean(1, keepdims=True)) if exact else jnp.zeros_like(pixels[:, :1])
        first, second = (pixels - centre).mean(1), jnp.square(pixels - centre).mean(1)
        by_group = lambda channels: channels.reshape(x.shape[0], self.groups, -1)
        means, variances = by_group(first + centre[:, 0]), by_group(second - jnp.square(first))
        mean = means.mean(-1, keepdims=True)
        return mean[..., 0], (variances + jnp.square(means - mean)).mean(-1)


class LayerNorm(nnx.Module):
    """Layer normalisation (Ba et al. 2016) over the last dimension, with statistics in float32."""

    def __init__(self, features: int, compute: Compute, eps: float = 1e-5):
        self.compute, self.eps = compute, eps
        self.scale = parameter((features,), ("norm",), ones)
        self.bias = parameter((features,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.beside(x)[1]

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x, normalised x): for a residual block, whose sum the gradient's kernel then makes too."""
        if self.compute.kernels_for(x):
            scale, bias = self.compute.statistic(self.scale), self.compute.statistic(self.bias)
            return self.compute.fused.layer_norm(x, scale, bias, self.eps)
        y = x.astype(jnp.float32)
        mean = y.mean(-1, keepdims=True)
        variance = jnp.square(y - mean).mean(-1, keepdims=True)
        y = (y - mean) * lax.rsqrt(variance + self.eps)
        scale, bias = (_along_last(self.compute.statistic(p), x.ndim) for p in (self.scale, self.bias))
        return x, (y * scale + bias).astype(self.compute.dtype)


class Embed(nnx.Module):
    """A table of vectors [entries features], looked up by integer ids."""

    def __init__(self, entries: int, features: int, compute: Compute, axes: Axes, std: float):
        self.compute = compute
        self.embedding = parameter((entries, features), axes, normal(std))

    def __call__(self, ids: jax.Array) -> jax.Array:
        # A row may be asked for a thousand times, as that of the padding is: its gradient is summed in float32. What is more,
        # GPUs add many bfloat16 to one place a hundred times as slowly.
        return jnp.take(self.compute.statistic(self.embedding), ids, axis=0).astype(self.compute.dtype)


def timestep_embedding(t: jax.Array, dim: int, *, flip_sin_to_cos: bool, freq_shift: float) -> jax.Array:
    """Sinusoids of t [b] in float32 -> [b dim] (Ho et al. 2020, after Vaswani et al. 2017)."""
    half = dim // 2
    exponent = jnp.arange(half, dtype=jnp.float32) * (-math.log(10_000) / (half - freq_shift))
    angles = t.astype(jnp.float32)[:, None] * jnp.exp(exponent)[None, :]
    parts = (jnp.cos(angles), jnp.sin(angles)) if flip_sin_to_cos else (jnp.sin(angles), jnp.cos(angles))
    return jnp.concatenate(parts, axis=-1)


def upsample_nearest(x: jax.Array) -> jax.Array:
    """Repeat every pixel of [b h w c] twice in each direction."""
    b, h, w, c = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None, :], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
