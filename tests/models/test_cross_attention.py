"""The GPU kernel of attention to few keys, interpreted, against plain products; that it lowers for a GPU, and where it is used."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff.models import attention, cross_attention

# (queries, heads, channels of a head) where SD1.x, SD2 at 512 and 768 pixels and SDXL attend to a text.
LEVELS = [
    (4096, 8, 40), (1024, 8, 80), (256, 8, 160), (64, 8, 160), (4096, 5, 64), (1024, 10, 64), (256, 20, 64), (64, 20, 64),
    (9216, 5, 64), (2304, 10, 64), (576, 20, 64), (144, 20, 64), (4096, 10, 64), (1024, 20, 64),
]  # fmt: skip


def with_gradients(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, pull: jax.Array) -> tuple[jax.Array, ...]:
    out, vjp = jax.vjp(kernel, q, k, v)
    return out, *vjp(pull)


@pytest.mark.parametrize(("queries", "keys", "dim"), [
    (256, 77, 40), (36, 80, 160), (320, 128, 80), (200, 5, 64), (9, 77, 8),
])  # fmt: skip
def test_it_computes_what_products_do(queries: int, keys: int, dim: int, monkeypatch: pytest.MonkeyPatch):
    """No further from float32 than plain products in bfloat16 are, lengths that no block or program divides included."""
    monkeypatch.setattr(cross_attention, "INTERPRET", True)
    monkeypatch.setattr(cross_attention, "BLOCKS", {160: (64, 8)})
    monkeypatch.setattr(cross_attention, "PROGRAMS", 12)  # so that a program has several blocks, and queries several programs
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal((2, n, 2, dim)), jnp.bfloat16) for n in (queries, keys, keys, queries)]
    exact = with_gradients(attention.dot_product, *(x.astype(jnp.float32) for x in args))
    error = lambda x, y: float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))
    ours, plain = (with_gradients(kernel, *args) for kernel in (cross_attention.attend, attention.dot_product))
    for x, y, z in zip(ours, plain, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        assert error(x, z) < 1.1 * error(y, z) < 1e-2


@pytest.mark.parametrize(("queries", "heads", "dim"), LEVELS)
def test_it_lowers_for_a_gpu(queries: int, heads: int, dim: int):
    """Triton takes blocks whose sides are powers of two alone."""
    q, k = (jax.ShapeDtypeStruct((2, n, heads, dim), jnp.bfloat16) for n in (queries, 77))
    assert cross_attention.takes(q, k)
    traced = jax.jit(lambda q, k, v, pull: with_gradients(cross_attention.attend, q, k, v, pull)).trace(q, k, k, q)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize(("keys", "dim", "dtype", "capability", "ours"), [
    (77, 40, jnp.bfloat16, "9.0", True), (128, 160, jnp.bfloat16, "9.0", True), (256, 40, jnp.bfloat16, "9.0", False),
    (77, 168, jnp.bfloat16, "9.0", False), (77, 40, jnp.float16, "9.0", False), (77, 40, jnp.bfloat16, "8.9", False),
    (77, 40, jnp.bfloat16, "12.0", False),
])  # fmt: skip
def test_where_it_is_used(keys: int, dim: int, dtype: Any, capability: str, ours: bool, monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setattr(attention, "_cudnn", lambda q, k, v: called.append("cuDNN"))
    monkeypatch.setattr(attention, "_cudnn_head_limit", lambda: 256)
    monkeypatch.setattr(cross_attention, "attend", lambda q, k, v: called.append("ours"))
    q, k = jnp.zeros((1, 256, 2, dim), dtype), jnp.zeros((1, keys, 2, dim), dtype)
    attention.kernel("flash", SimpleNamespace(platform="gpu", compute_capability=capability))(q, k, k)  # pyright: ignore[reportArgumentType]
    assert called == ["ours" if ours else "cuDNN"]


def test_a_mask_and_float32_are_not_for_it():
    q, k = jnp.zeros((1, 256, 2, 40), jnp.bfloat16), jnp.zeros((1, 77, 2, 40), jnp.bfloat16)
    assert cross_attention.takes(q, k)
    assert not cross_attention.takes(q, k, np.ones((1, 1, 256, 77), bool))
    assert not cross_attention.takes(q.astype(jnp.float32), k.astype(jnp.float32))
    assert not cross_attention.takes(q, k.astype(jnp.float32))


@pytest.mark.parametrize(("batch", "heads", "blocks", "programs", "each"), [
    (32, 5, 64, 4, 16), (2, 10, 64, 32, 2), (2, 10, 59, 30, 2), (8, 20, 62, 6, 11), (1, 1, 1, 1, 1), (2000, 8, 64, 1, 64),
])  # fmt: skip
def test_queries_are_shared_out(batch: int, heads: int, blocks: int, programs: int, each: int):
    """In equal shares where that leaves enough programs, but of the 59 blocks of 832 x 1152 pixels there are none."""
    q, k = (jax.ShapeDtypeStruct((batch, n, heads, 64), jnp.bfloat16) for n in (blocks * 64, 77))
    cut = cross_attention._Cut(q, k)  # pyright: ignore
    assert cut.grid == (batch, heads, programs)
    assert cut.blocks == each


def test_great_scores_are_exact(monkeypatch: pytest.MonkeyPatch):
    """A query that looks at one key alone has its value, however great its scores are."""
    monkeypatch.setattr(cross_attention, "INTERPRET", True)
    q = jnp.full((1, 16, 1, 64), 1e9, jnp.bfloat16)
    k = jnp.full((1, 77, 1, 64), -1e9, jnp.bfloat16).at[:, 5].set(1e9)
    v = jnp.asarray(np.random.default_rng(0).standard_normal((1, 77, 1, 64)), jnp.bfloat16)
    np.testing.assert_array_equal(cross_attention.attend(q, k, v), jnp.broadcast_to(v[:, 5:6], q.shape))
