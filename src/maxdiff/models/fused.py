"""Normalisation and biases for NVIDIA GPUs: Triton kernels by Pallas where XLA reads an activation several times.

What they compute is what `layers` computes without them, forward and backward, in float32 on bfloat16 activations.
XLA's sums over pixels reach a third of a GPU's memory bandwidth, and its gradients of norms write float32 activations
between passes; docs/PERFORMANCE.md has the times. Elementwise work is left to XLA, which fuses it with its surroundings.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Tests alone: run the kernels on any backend, slowly.
INTERPRET = False
# What a program holds at once: a multiple of 64 channels is what every Stable Diffusion has; 64 bfloat16 are 128 bytes.
CHANNELS, PIXELS = 64, 64
TILE = 64  # side of what is turned at once
# Programs that keep all of a Hopper GPU's 132 processors busy to the end.
PROGRAMS = 2112
ROW_ELEMENTS, WARPS = 2560, 4  # numbers of whole rows that a program holds at once; groups of 32 threads


def takes(x: jax.Array) -> bool:
    """Whether there are kernels for an activation [b ... c]."""
    return x.dtype == jnp.bfloat16 and x.ndim > 2 and x.shape[-1] % CHANNELS == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float, silu: bool) -> jax.Array:
    """Group normalisation (Wu & He 2018) of x [b ... c], then silu if wanted; scale and bias [c] are float32."""
    return _group_norm(x, scale, bias, groups, eps, silu)[0]


def _group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int, eps: float, silu: bool) -> Any:
    pixels = x.reshape(x.shape[0], -1, x.shape[-1])
    sums, squares = _sums(lambda x: (x, x * x), [pixels], [], 2)
    by_group = lambda v: v.reshape(x.shape[0], groups, -1).sum(-1) / (pixels[0].size // groups)
    mean = by_group(sums)
    rstd = lax.rsqrt(by_group(squares) - mean * mean + eps)
    y = _affine(pixels, *_coefficients(mean, rstd, scale, bias))
    y = jax.nn.silu(y) if silu else y
    return y.astype(x.dtype).reshape(x.shape), (x, scale, bias, mean, rstd)


def _coefficients(mean: jax.Array, rstd: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a and o [b c] of x * a + o, from statistics [b groups]."""
    a = _wide(rstd, scale.size) * scale[None]
    return a, bias[None] - _wide(mean, scale.size) * a


def _wide(statistic: jax.Array, channels: int) -> jax.Array:
    """[b groups] -> [b c]."""
    return jnp.repeat(statistic, channels // statistic.shape[1], axis=1)


def _affine(x: jax.Array, a: jax.Array, o: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) * a[:, None] + o[:, None]


def _slope(z: jax.Array, gradient: jax.Array, silu: bool) -> jax.Array:
    """gradient times the derivative of silu at z."""
    if not silu:
        return gradient
    # The sigmoid by exp2, which a GPU has: with jax.nn.sigmoid's exp the sums wait for arithmetic, not for memory.
    share = 1 / (1 + jnp.exp2(z * -math.log2(math.e)))
    return gradient * share * (1 + z * (1 - share))


def _group_norm_backward(groups: int, eps: float, silu: bool, kept: Any, gradient: jax.Array) -> Any:
    del eps
    x, scale, bias, mean, rstd = kept
    pixels, gradients = (t.reshape(x.shape[0], -1, x.shape[-1]) for t in (x, gradient))
    wide = lambda statistic: _wide(statistic, scale.size)
    a, o = _coefficients(mean, rstd, scale, bias)
    centre, spread = wide(mean), wide(rstd)

    def terms(x: Any, g: Any, a: Any, o: Any, centre: Any) -> Any:
        dz = _slope(x * a + o, g, silu)
        return dz, dz * (x - centre)

    plain, centred = _sums(terms, [pixels, gradients], [a, o, centre], 2)
    centred = centred * spread
    # Of the group: the mean gradient of what is normalised, and its mean product with it.
    by_group = lambda v: wide((v * scale[None]).reshape(x.shape[0], groups, -1).sum(-1) / (pixels[0].size // groups))
    first, second = by_group(plain) * spread, by_group(centred) * spread * spread
    dz = _slope(_affine(pixels, a, o), gradients.astype(jnp.float32), silu)
    dx = dz * a[:, None] - first[:, None] - (pixels.astype(jnp.float32) - centre[:, None]) * second[:, None]
    return dx.astype(x.dtype).reshape(x.shape), centred.sum(0), plain.sum(0)


group_norm.defvjp(_group_norm, _group_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x [... c], and its layer normalisation (Ba et al. 2016); scale and bias [c] are float32.

    Where x goes on beside its normalisation, as in a residual block, that is to be this x: then one pass makes and adds up
    both gradients.
    """
    return _layer_norm(x, scale, bias, eps)[0]


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> Any:
    rows = x.reshape(-1, x.shape[-1])
    count = _rows_at_once(rows)

    def kernel(x_ref: Any, scale_ref: Any, bias_ref: Any, y_ref: Any) -> None:
        block = _Block(rows, pl.program_id(0) * count, count, rows.shape[0] % count > 0)
        _, normal = _normalised(block.load(x_ref), eps)
        scaled = [n * plgpu.load(scale_ref.at[at])[None] for n, at in zip(normal, block.columns, strict=True)]
        shifted = [s + plgpu.load(bias_ref.at[at])[None] for s, at in zip(scaled, block.columns, strict=True)]
        block.store(y_ref, shifted)

    y = _call("layer_norm", kernel, (pl.cdiv(rows.shape[0], count),), jax.ShapeDtypeStruct(rows.shape, x.dtype))(
        rows, scale, bias
    )
    return (x, y.reshape(x.shape)), (x, scale)


def _layer_norm_backward(eps: float, kept: Any, both: tuple[jax.Array, jax.Array]) -> Any:
    x, scale = kept
    rows, beside, gradients = (t.reshape(-1, x.shape[-1]) for t in (x, *both))
    count, width = _rows_at_once(rows), rows.shape[1]
    blocks = pl.cdiv(rows.shape[0], count)
    turns = pl.cdiv(blocks, PROGRAMS)
    programs = pl.cdiv(blocks, turns)

    def kernel(x_ref: Any, beside_ref: Any, gradient_ref: Any, scale_ref: Any, dx_ref: Any, sums_ref: Any) -> None:
        program, columns = pl.program_id(0), _columns(rows)
        scale = [plgpu.load(scale_ref.at[at])[None] for at in columns]

        def turn(i: Any, sums: Any) -> Any:
            block = _Block(rows, (program * turns + i) * count, count, rows.shape[0] % (turns * count) > 0)
            spread, normal = _normalised(block.load(x_ref), eps)
            g = block.load(gradient_ref)
            scaled = [a * s for a, s in zip(g, scale, strict=True)]
            mean, along = _row_mean(scaled), _row_mean([s * n for s, n in zip(scaled, normal, strict=True)])
            parts = zip(block.load(beside_ref), scaled, normal, strict=True)
            block.store(dx_ref, [b + spread * (s - mean - n * along) for b, s, n in parts])
            return tuple((p + a * n, q + a) for (p, q), a, n in zip(sums, g, normal, strict=True))

        zero = jnp.zeros((count, columns[0].size), jnp.float32)
        for at, totals in zip(columns, lax.fori_loop(0, turns, turn, ((zero, zero),) * len(columns)), strict=True):
            for i, total in enumerate(totals):
                plgpu.store(sums_ref.at[program, i, at], total.sum(0))

    shapes = (jax.ShapeDtypeStruct(rows.shape, x.dtype), jax.ShapeDtypeStruct((programs, 2, width), jnp.float32))
    dx, sums = _call("layer_norm_backward", kernel, (programs,), shapes)(rows, beside, gradients, scale)
    of_scale, of_bias = sums.sum(0)
    return dx.reshape(x.shape), of_scale, of_bias


layer_norm.defvjp(_layer_norm, _layer_norm_backward)


class _Block:
    """`count` whole rows from `first` on, in a kernel: in float32 pieces. Rows that there are not, if `may_end`, are 0."""

    def __init__(self, rows: jax.Array, first: Any, count: int, may_end: bool):
        self.columns = _columns(rows)
        self._rows, self._dtype = first + jnp.arange(count)[:, None], rows.dtype
        inside = jnp.broadcast_to(self._rows < rows.shape[0], (count, self.columns[0].size))
        self._inside = inside if may_end else None

    def load(self, ref: Any) -> list[jax.Array]:
        other = None if self._inside is None else 0.0
        read = lambda at: plgpu.load(ref.at[self._rows, at[None]], mask=self._inside, other=other)
        return [read(at).astype(jnp.float32) for at in self.columns]

    def store(self, ref: Any, pieces: Sequence[jax.Array]) -> None:
        for at, piece in zip(self.columns, pieces, strict=True):
            plgpu.store(ref.at[self._rows, at[None]], piece.astype(self._dtype), mask=self._inside)


def _columns(rows: jax.Array) -> list[jax.Array]:
    """Where the pieces of a row are: Triton's blocks are powers of two wide."""
    width = rows.shape[1]
    piece = width & -width
    return [start + jnp.arange(piece) for start in range(0, width, piece)]


def _row_mean(pieces: Sequence[jax.Array]) -> jax.Array:
    sums = [piece.sum(1, keepdims=True) for piece in pieces]
    return functools.reduce(jnp.add, sums) / sum(piece.shape[1] for piece in pieces)


def _normalised(pieces: Sequence[jax.Array], eps: float) -> tuple[jax.Array, list[jax.Array]]:
    """(1 / deviation [r 1], normalised rows)."""
    mean = _row_mean(pieces)
    centred = [piece - mean for piece in pieces]
    spread = lax.rsqrt(_row_mean([piece * piece for piece in centred]) + eps)
    return spread, [piece * spread for piece in centred]


def _rows_at_once(rows: jax.Array) -> int:
    """A power of two, of which some thousand numbers come."""
    return 1 << max(0, (ROW_ELEMENTS // rows.shape[1]).bit_length() - 1)


@jax.custom_vjp
def add_to_channels(x: jax.Array, vector: jax.Array) -> jax.Array:
    """x [b ... c] + vector [1 c] or [b c], in x's dtype; the vector's gradient is summed in float32."""
    return x + vector.astype(x.dtype).reshape(vector.shape[0], *[1] * (x.ndim - 2), vector.shape[1])


def _add_backward(vector: jax.Array, gradient: jax.Array) -> Any:
    pixels = gradient.reshape(gradient.shape[0], -1, gradient.shape[-1])
    (sums,) = _sums(lambda g: (g,), [pixels], [], 1)
    sums = sums if vector.shape[0] == gradient.shape[0] else sums.sum(0, keepdims=True)
    return gradient, sums.astype(vector.dtype)


add_to_channels.defvjp(lambda x, vector: (add_to_channels(x, vector), vector), _add_backward)


def turned(gradient: jax.Array) -> jax.Array:
    """A gradient [... c] that lies in memory as [c ...], laid as its parameter is.

    cuDNN makes those of convolutions so. XLA would make the whole update of parameter and moments a transposition, which takes
    four times as long, and copy its results.
    """
    rows = jnp.moveaxis(gradient, -1, 0).reshape(gradient.shape[-1], -1)
    # Of fewer rows most of a tile would be empty.
    return _transposed(rows).reshape(gradient.shape) if min(rows.shape) >= TILE // 4 else gradient


def _transposed(x: jax.Array) -> jax.Array:
    """[m n] -> [n m]."""
    m, n = x.shape
    whole = m % TILE == 0 and n % TILE == 0

    def kernel(x_ref: Any, y_ref: Any) -> None:
        rows, columns = (pl.program_id(i) * TILE + jnp.arange(TILE) for i in range(2))
        inside = lambda row, column: None if whole else (row < m) & (column < n)
        block = plgpu.load(x_ref.at[rows[:, None], columns[None]], mask=inside(rows[:, None], columns[None]))
        plgpu.store(y_ref.at[columns[:, None], rows[None]], block.T, mask=inside(rows[None], columns[:, None]))

    return _call("turned_gradient", kernel, (pl.cdiv(m, TILE), pl.cdiv(n, TILE)), jax.ShapeDtypeStruct((n, m), x.dtype))(x)


def _sums(
    terms: Callable[..., Sequence[jax.Array]], arrays: Sequence[jax.Array], vectors: Sequence[jax.Array], count: int
) -> list[jax.Array]:
    """The sums over p of terms(*arrays [b p c], *vectors [b c]): `count` of them, [b c], all in float32."""
    b, p, c = arrays[0].shape
    blocks = pl.cdiv(p, PIXELS)
    turns = pl.cdiv(blocks, max(1, PROGRAMS // (b * (c // CHANNELS))))
    splits = pl.cdiv(blocks, turns)

    def kernel(*refs: Any) -> None:
        example, split = pl.program_id(0), pl.program_id(2)
        columns = pl.program_id(1) * CHANNELS + jnp.arange(CHANNELS)
        constants = [plgpu.load(ref.at[example, columns])[None] for ref in refs[len(arrays) : -1]]

        def turn(i: Any, sums: Any) -> Any:
            rows = (split * turns + i) * PIXELS + jnp.arange(PIXELS)[:, None]
            inside = jnp.broadcast_to(rows < p, (PIXELS, CHANNELS)) if p % (turns * PIXELS) else None
            other = None if inside is None else 0.0
            read = lambda ref: plgpu.load(ref.at[example, rows, columns[None]], mask=inside, other=other).astype(jnp.float32)
            found = terms(*map(read, refs[: len(arrays)]), *constants)
            if inside is not None:  # where arrays read 0, terms need not be 0
                found = [jnp.where(inside, term, 0.0) for term in found]
            return tuple(total + term for total, term in zip(sums, found, strict=True))

        zero = jnp.zeros((PIXELS, CHANNELS), jnp.float32)
        for i, total in enumerate(lax.fori_loop(0, turns, turn, (zero,) * count)):
            plgpu.store(refs[-1].at[i, split, example, columns], total.sum(0))

    shape = jax.ShapeDtypeStruct((count, splits, b, c), jnp.float32)
    return list(_call("channel_sums", kernel, (b, c // CHANNELS, splits), shape)(*arrays, *vectors).sum(1))


def _call(name: str, kernel: Callable[..., None], grid: tuple[int, ...], shapes: Any) -> Callable[..., Any]:
    params = plgpu.CompilerParams(num_warps=WARPS, num_stages=2)
    return pl.pallas_call(kernel, shapes, grid=grid, compiler_params=params, interpret=INTERPRET, name=name)
