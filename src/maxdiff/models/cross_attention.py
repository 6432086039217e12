"""Attention to few keys, as those of a text, for NVIDIA's Hopper GPUs: Triton kernels by Pallas.

A program has all keys, and so the weights of a query at once: its softmax takes one pass, the backward pass is one kernel that
reads each query once, and nothing is kept for it but q, k and v. Keys are padded to a multiple of 16, in the kernels alone:
77 to 80, where cuDNN computes 128.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Tests alone: run the kernels on any backend, slowly.
INTERPRET = False
MOST_KEYS = 128
ATOM = 16  # what is multiplied has sides of a multiple of this
WIDE = 64  # but the rows of the left one of a multiple of this, for Hopper's fast products; channels are padded to it
BLOCKS = {64: (64, 4), 160: (128, 8)}  # (queries of a program at once, groups of 32 threads) for heads up to so wide
PROGRAMS = 1056  # eight for each of a Hopper GPU's 132 processors

# A matrix [keys channels] in rows of pieces, for Triton's blocks are powers of two wide; of queries there is one row.
Pieces = list[list[jax.Array]]


def takes(q: jax.Array, k: jax.Array, mask: Any = None) -> bool:
    """Whether there is a kernel for queries [b q h d] and keys [b k h d]."""
    return mask is None and q.dtype == k.dtype == jnp.bfloat16 and k.shape[1] <= MOST_KEYS and q.shape[-1] <= max(BLOCKS)


@jax.custom_vjp
def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of q [b q h d] to k and v [b k h d] (Vaswani et al. 2017, eq. 1), of a shape and dtype that `takes` takes.

    Products are summed and the softmax is computed in float32. XLA's partitioner cannot split it.
    """
    assert takes(q, k)
    assert k.shape == v.shape
    cut = _Cut(q, k)

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any) -> None:
        keys, values = cut.load_keys(k_ref), cut.load_keys(v_ref)

        def body(block: Any, carry: Any) -> Any:
            weights = cut.weights(cut.load_queries(q_ref, block), keys)
            cut.store_queries(o_ref, block, _times([w.astype(q.dtype) for w in weights], values))
            return carry

        cut.over_blocks(body, ())

    (out,) = cut.call("cross_attention", kernel, [q, k, v], [jax.ShapeDtypeStruct(q.shape, q.dtype)])
    return out


def _backward(kept: Any, gradient: jax.Array) -> Any:
    q, k, v = kept
    cut = _Cut(q, k)

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, gradient_ref: Any, dq_ref: Any, dk_ref: Any, dv_ref: Any) -> None:
        keys, values = cut.load_keys(k_ref), cut.load_keys(v_ref)

        def body(block: Any, sums: Any) -> Any:
            queries, pull = cut.load_queries(q_ref, block), cut.load_queries(gradient_ref, block)
            weights, of_weights = cut.weights(queries, keys), _times_transposed(pull, values)
            mean = sum((w * g).sum(1, keepdims=True) for w, g in zip(weights, of_weights, strict=True))
            of_scores = [w * (g - mean) * cut.scale for w, g in zip(weights, of_weights, strict=True)]
            weights, of_scores = ([x.astype(q.dtype) for x in pieces] for pieces in (weights, of_scores))
            cut.store_queries(dq_ref, block, _times(of_scores, keys))
            return _plus_transposed_times(sums[0], of_scores, queries), _plus_transposed_times(sums[1], weights, pull)

        for ref, sums in zip((dk_ref, dv_ref), cut.over_blocks(body, (cut.zeros(), cut.zeros())), strict=True):
            cut.store_sums(ref, sums)

    parts = jax.ShapeDtypeStruct((cut.splits, *k.shape), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), parts, parts]
    dq, dk, dv = cut.call("cross_attention_backward", kernel, [q, k, v, gradient], shapes)
    return dq, dk.sum(0).astype(k.dtype), dv.sum(0).astype(v.dtype)


attend.defvjp(lambda q, k, v: (attend(q, k, v), (q, k, v)), _backward)


class _Cut:
    """How queries [b q h d] and keys [b k h d] are cut for the programs, and a program's reading and writing of them."""

    def __init__(self, q: jax.Array, k: jax.Array):
        batch, self._queries, heads, self._width = q.shape
        self._length = k.shape[1]
        self._keys, self._channels = _pieces(self._length, ATOM), _pieces(self._width, WIDE)
        self.scale = self._width**-0.5
        most, self._warps = next(block for widest, block in sorted(BLOCKS.items()) if self._width <= widest)
        self._at_once = min(most, pl.next_power_of_2(max(ATOM, self._queries)))
        blocks = pl.cdiv(self._queries, self._at_once)
        programs = min(blocks, max(1, PROGRAMS // (batch * heads)))
        # Equal shares need no masks, but of 59 blocks they would be one program's.
        equal = max(n for n in range(1, programs + 1) if blocks % n == 0)
        self.blocks = pl.cdiv(blocks, equal if 2 * equal >= programs else programs)  # of a program
        self.splits = pl.cdiv(blocks, self.blocks)
        self.grid = (batch, heads, self.splits)

    def over_blocks(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`body` of each block of queries that is this program's; the last one's may lie behind the end, all masked."""
        first = pl.program_id(2) * self.blocks
        return lax.fori_loop(0, self.blocks, lambda i, carry: body(first + i, carry), carry)

    def weights(self, queries: list[jax.Array], keys: Pieces) -> list[jax.Array]:
        """The softmax of the queries' scores, in float32."""
        scores = _times_transposed(queries, keys)
        for i, (start, size) in enumerate(self._keys):
            if start + size > self._length:
                scores[i] = jnp.where((start + jnp.arange(size) < self._length)[None], scores[i], -math.inf)
        greatest = functools.reduce(jnp.maximum, [s.max(1, keepdims=True) for s in scores])
        # Scaled after the difference, which is 0 for the greatest; a fused multiply-add of a scaled score and it is not.
        powers = [jnp.exp2((s - greatest) * (self.scale * math.log2(math.e))) for s in scores]
        share = 1 / sum(p.sum(1, keepdims=True) for p in powers)
        return [p * share for p in powers]

    def load_queries(self, ref: Any, block: Any) -> list[jax.Array]:
        return [_load(ref, *place) for place in self._places(block * self._at_once, self._at_once, ref)]

    def store_queries(self, ref: Any, block: Any, pieces: list[jax.Array]) -> None:
        _store(ref, self._places(block * self._at_once, self._at_once, ref), pieces)

    def load_keys(self, ref: Any) -> Pieces:
        return [[_load(ref, *place) for place in self._places(start, size, ref)] for start, size in self._keys]

    def zeros(self) -> Pieces:
        """What sums by `_plus_transposed_times` begin with."""
        shape = lambda keys, channels: (channels, keys) if _lie_transposed(keys) else (keys, channels)
        return [[jnp.zeros(shape(keys, channels), jnp.float32) for _, channels in self._channels] for _, keys in self._keys]

    def store_sums(self, ref: Any, sums: Pieces) -> None:
        """Sums by `_plus_transposed_times`."""
        for (start, size), row in zip(self._keys, sums, strict=True):
            _store(ref, self._places(start, size, ref), [piece.T for piece in row] if _lie_transposed(size) else row)

    def _places(self, start: Any, size: int, ref: Any) -> list[tuple[tuple[jax.Array, jax.Array], jax.Array | None]]:
        """(indices, mask) of the pieces of `size` rows of ref [rows channels]; no mask where all is inside."""
        rows = (start + jnp.arange(size))[:, None]
        end = start + size if isinstance(start, int) else self.splits * self.blocks * size
        places = []
        for first, width in self._channels:
            columns = (first + jnp.arange(width))[None]
            mask = [rows < ref.shape[0]] if end > ref.shape[0] else []
            mask += [columns < self._width] if first + width > self._width else []
            whole = jnp.broadcast_to(functools.reduce(jnp.logical_and, mask), (size, width)) if mask else None
            places.append(((rows, columns), whole))
        return places

    def call(self, name: str, kernel: Callable[..., None], inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct]) -> Any:
        """Run a kernel, which gets [rows channels] of its example and head, of its own part of keys' gradients."""

        def spec(array: Any) -> pl.BlockSpec:
            *lead, rows, _, width = array.shape
            whole = lambda example, head: (example, 0, head, 0)
            if len(lead) == 1:
                return pl.BlockSpec((None, rows, None, width), lambda example, head, _: whole(example, head))
            return pl.BlockSpec((None, None, rows, None, width), lambda example, head, split: (split, *whole(example, head)))

        params = plgpu.CompilerParams(num_warps=self._warps, num_stages=2)
        return pl.pallas_call(
            kernel, outputs, grid=self.grid, in_specs=[*map(spec, inputs)], out_specs=[*map(spec, outputs)],
            compiler_params=params, interpret=INTERPRET, name=name,
        )(*inputs)  # fmt: skip


def _pieces(length: int, atom: int) -> list[tuple[int, int]]:
    """(start, size) of powers of two that cover a length, padded to a multiple of atom: 77 and 16 are 64 and 16."""
    padded, pieces, start = -(-length // atom) * atom, [], 0
    while start < padded:
        size = 1 << (padded - start).bit_length() - 1
        pieces.append((start, size))
        start += size
    return pieces


def _load(ref: Any, at: Any, mask: Any) -> jax.Array:
    return plgpu.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def _store(ref: Any, places: Any, pieces: list[jax.Array]) -> None:
    for (at, mask), piece in zip(places, pieces, strict=True):
        plgpu.store(ref.at[at], piece.astype(ref.dtype), mask=mask)


def _times(left: list[jax.Array], right: Pieces) -> list[jax.Array]:
    """[q k] [k d]: pieces of k on the left, of k and d on the right."""
    return [sum(plgpu.dot(a, row[j]) for a, row in zip(left, right, strict=True)) for j in range(len(right[0]))]  # pyright: ignore


def _times_transposed(left: list[jax.Array], right: Pieces) -> list[jax.Array]:
    """[q d] [k d] -> [q k]."""
    return [sum(plgpu.dot(a, b.T) for a, b in zip(left, row, strict=True)) for row in right]  # pyright: ignore


def _lie_transposed(keys: int) -> bool:
    """Whether sums of a piece of keys are computed as [d k]: Hopper's fast products have no fewer rows than WIDE."""
    return keys < WIDE


def _plus_transposed_times(sums: Pieces, left: list[jax.Array], right: list[jax.Array]) -> Pieces:
    """[k d] + [q k] transposed times [q d]."""
    product = lambda a, b: plgpu.dot(b.T, a) if _lie_transposed(a.shape[1]) else plgpu.dot(a.T, b)
    return [[s + product(a, b) for s, b in zip(row, right, strict=True)] for row, a in zip(sums, left, strict=True)]
