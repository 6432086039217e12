"""What the UNet and the autoencoder are made of (Rombach et al. 2022); names as in diffusers.

Images are [b h w c], tokens [b l c].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiff.models.attention import dot_product
from maxdiff.models.layers import Compute, Conv, GroupNorm, LayerNorm, Linear, gelu, upsample_nearest, zeros

IMAGE = ("conv_batch", "height", "width", "out_channels")
TOKENS = ("activation_batch", "activation_length", "activation_embed")
HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


class ResnetBlock2D(nnx.Module):
    """norm, silu, conv, (+ time embedding), norm, silu, conv, + the input; without `temb_channels` no time."""

    def __init__(self, c_in: int, c_out: int, temb_channels: int | None, groups: int, eps: float, compute: Compute):
        self.compute = compute
        self.norm1 = GroupNorm(c_in, groups, eps, compute)
        self.conv1 = Conv(c_in, c_out, compute)
        if temb_channels:
            self.time_emb_proj = Linear(temb_channels, c_out, compute, ("embed", "out_c"))
        self.norm2 = GroupNorm(c_out, groups, eps, compute)
        # Zero, as in the latent diffusion code: each block starts as the identity.
        self.conv2 = Conv(c_out, c_out, compute, init=zeros)
        self.conv_shortcut = Conv(c_in, c_out, compute, kernel_size=1) if c_in != c_out else None

    def __call__(self, x: jax.Array, temb: jax.Array | None = None) -> jax.Array:
        """x [b h w c], temb [b t] -> [b h w c']."""
        h = self.conv1(self.norm1(x, silu=True))
        if temb is not None:
            time = self.time_emb_proj(jax.nn.silu(temb))
            h = self.compute.fused.add_to_channels(h, time) if self.compute.kernels_for(h) else h + time[:, None, None]
        h = self.conv2(self.norm2(h, silu=True))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return self.compute.constrain(x + h, IMAGE)


class Attention(nnx.Module):
    """Multi-head attention of x [b l c] to itself, or to `context` [b k d]."""

    def __init__(self, channels: int, context_channels: int, heads: int, compute: Compute):
        if channels % heads:
            raise ValueError(f"{heads} attention heads do not divide {channels} channels")
        self.compute, self.heads = compute, heads
        self.to_q = Linear(channels, channels, compute, ("embed", "heads"), use_bias=False)
        self.to_k = Linear(context_channels, channels, compute, ("embed", "heads"), use_bias=False)
        self.to_v = Linear(context_channels, channels, compute, ("embed", "heads"), use_bias=False)
        self.to_out = nnx.List([Linear(channels, channels, compute, ("heads", "embed"))])

    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        context = x if context is None else context
        q, k, v = (self._split(y) for y in (self.to_q(x), self.to_k(context), self.to_v(context)))
        out = self.compute.attention(q, k, v, precision=self.compute.precision)
        return self.to_out[0](out.reshape(x.shape))

    def _split(self, x: jax.Array) -> jax.Array:
        return self.compute.constrain(x.reshape(*x.shape[:2], self.heads, -1), HEADS)


class SpatialAttention(nnx.Module):
    """The autoencoder's attention: one head over all pixels, with its norm and residual inside."""

    def __init__(self, channels: int, groups: int, eps: float, compute: Compute):
        self.compute = compute
        self.group_norm = GroupNorm(channels, groups, eps, compute)
        self.to_q = Linear(channels, channels, compute, ("embed", "heads"))
        self.to_k = Linear(channels, channels, compute, ("embed", "heads"))
        self.to_v = Linear(channels, channels, compute, ("embed", "heads"))
        self.to_out = nnx.List([Linear(channels, channels, compute, ("heads", "embed"))])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [b h w c] -> [b h w c]."""
        b, h, w, c = x.shape
        tokens = self.group_norm(x).reshape(b, h * w, c)
        q, k, v = (project(tokens)[:, :, None, :] for project in (self.to_q, self.to_k, self.to_v))
        out = dot_product(q, k, v, precision=self.compute.precision)
        return x + self.to_out[0](out.reshape(b, h * w, c)).reshape(x.shape)


class GEGLU(nnx.Module):
    """a * gelu(b), where [a b] = x W (Shazeer 2020), with the exact gelu of the originals."""

    def __init__(self, channels: int, hidden: int, compute: Compute):
        self.compute = compute
        # `geglu` is a name of its own: were this dimension split over the tensor axis as it lies in
        # the checkpoint, one device would hold a's columns and another b's, and the product below
        # would move activations. It is split where it is used instead, in halves.
        self.proj = Linear(channels, 2 * hidden, compute, ("embed", "geglu"))

    def __call__(self, x: jax.Array) -> jax.Array:
        constrain, precision = self.compute.constrain, self.compute.precision
        assert self.proj.bias is not None
        kernel = self.compute.weight(self.proj.kernel)
        kernel = constrain(kernel.reshape(kernel.shape[0], 2, -1), (None, None, "mlp"))
        bias = self.compute.weight(self.proj.bias).reshape(2, -1)
        return _gated(x, kernel, bias, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gated(x: jax.Array, kernel: jax.Array, bias: jax.Array, precision: Any) -> jax.Array:
    """x [b l c], kernel [c 2 m], bias [2 m] -> a * gelu(b) [b l m]; a and b as one product, where nothing is differentiated."""
    return _gate(*jnp.moveaxis(jnp.einsum("blc,cgm->blgm", x, kernel, precision=precision) + bias[None, None], 2, 0))


def _gated_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array, precision: Any) -> Any:
    # Two products: splitting the result of one would cost a concatenation of activations in the backward pass.
    product = lambda i, x, kernel, bias: jnp.matmul(x, kernel[:, i], precision=precision) + bias[None, None, i]
    return jax.vjp(lambda *given: _gate(product(0, *given), product(1, *given)), x, kernel, bias)


def _gated_backward(_: Any, pull: Any, gradient: jax.Array) -> Any:
    return pull(gradient)


_gated.defvjp(_gated_forward, _gated_backward)


def _gate(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) * gelu(b.astype(jnp.float32))).astype(a.dtype)


class FeedForward(nnx.Module):
    """GEGLU to four times the width, and back."""

    def __init__(self, channels: int, compute: Compute):
        hidden = 4 * channels
        # Index 1 is the dropout of the originals, which has no parameters.
        self.net: Any = nnx.List([GEGLU(channels, hidden, compute), None, Linear(hidden, channels, compute, ("mlp", "embed"))])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net[2](self.net[0](x))


class BasicTransformerBlock(nnx.Module):
    """Self-attention, cross-attention to the text, feed-forward, each pre-normed and residual."""

    def __init__(self, channels: int, context_channels: int, heads: int, compute: Compute):
        self.compute = compute
        self.norm1 = LayerNorm(channels, compute)
        self.attn1 = Attention(channels, channels, heads, compute)
        self.norm2 = LayerNorm(channels, compute)
        self.attn2 = Attention(channels, context_channels, heads, compute)
        self.norm3 = LayerNorm(channels, compute)
        self.ff = FeedForward(channels, compute)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """x [b l c], context [b k d] -> [b l c]."""
        x, y = self.norm1.beside(x)
        x, y = self.norm2.beside(x + self.attn1(y))
        x, y = self.norm3.beside(x + self.attn2(y, context))
        return self.compute.constrain(x + self.ff(y), TOKENS)


class Transformer2DModel(nnx.Module):
    """Transformer blocks over the pixels of [b h w c], inside a projection and a residual."""

    def __init__(
        self, channels: int, context_channels: int, heads: int, depth: int, groups: int, linear: bool, compute: Compute
    ):
        self.compute, self.linear = compute, linear
        self.norm = GroupNorm(channels, groups, 1e-6, compute)
        self.transformer_blocks = nnx.List(
            BasicTransformerBlock(channels, context_channels, heads, compute) for _ in range(depth)
        )
        # SD 1.x projects by 1x1 convolutions, SD 2.x and SDXL by linear layers: the same sums.
        if linear:
            self.proj_in = Linear(channels, channels, compute, ("embed", None))
            self.proj_out = Linear(channels, channels, compute, (None, "embed"), init=zeros)
        else:
            self.proj_in = Conv(channels, channels, compute, kernel_size=1)
            self.proj_out = Conv(channels, channels, compute, kernel_size=1, init=zeros)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        y = self.norm(x)
        y = self.proj_in(y.reshape(b, h * w, c)) if self.linear else self.proj_in(y).reshape(b, h * w, c)
        for block in self.transformer_blocks:
            y = self.compute.remat(block.__call__)(y, context)
        y = self.proj_out(y).reshape(x.shape) if self.linear else self.proj_out(y.reshape(x.shape))
        return self.compute.constrain(x + y, IMAGE)


class Downsample2D(nnx.Module):
    """Halve height and width by a strided convolution; the autoencoder pads below and right only."""

    def __init__(self, channels: int, compute: Compute, *, symmetric: bool):
        padding = ((1, 1), (1, 1)) if symmetric else ((0, 1), (0, 1))
        self.conv = Conv(channels, channels, compute, stride=2, padding=padding)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x)


class Upsample2D(nnx.Module):
    """Double height and width, or reach `size` where the way down had rounded up; then a convolution."""

    def __init__(self, channels: int, compute: Compute):
        self.conv = Conv(channels, channels, compute)

    def __call__(self, x: jax.Array, size: tuple[int, int] | None = None) -> jax.Array:
        x = upsample_nearest(x)
        return self.conv(x if size is None else x[:, : size[0], : size[1]])
