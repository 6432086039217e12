import functools
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff.models import attention
from maxdiff.task import REMAT


def qkv(queries: int, keys: int, heads: int = 2, dim: int = 40, batch: int = 2):
    draws = (jax.random.normal(jax.random.key(i), (batch, n, heads, dim)) for i, n in enumerate((queries, keys, keys)))
    return tuple(draws)


def formula(q, k, v, mask=None):
    """softmax(q k^T / sqrt(d)) v in float64."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).swapaxes(1, 2)


def test_dot_product_is_the_formula():
    q, k, v = qkv(6, 9)
    mask = np.tril(np.ones((6, 9), bool), 2)
    np.testing.assert_allclose(attention.dot_product(q, k, v), formula(q, k, v), atol=1e-6)
    np.testing.assert_allclose(attention.dot_product(q, k, v, mask=mask[None, None]), formula(q, k, v, mask), atol=1e-6)


def test_softmax_is_float32_in_bfloat16():
    # Scores of 30 are rounded to the next 0.125 in bfloat16, so their weights are wrong by several percent.
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(16, 64, dim=64))
    q = q * 8
    exact = formula(*(np.asarray(x, np.float32) for x in (q, k, v)))

    def error(out):
        return np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)

    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    low = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    assert error(low) > 0.01
    assert error(attention.dot_product(q, k, v)) < 0.004


# (queries, head_dim) of each level of a UNet that splash attention takes; 8x8 latents are too few for it.
SD1 = [(4096, 40), (1024, 80), (256, 160)]
SD2_768 = [(9216, 64), (2304, 64), (576, 64), (144, 64)]
SD2_AND_SDXL = [(4096, 64), (1024, 64), (256, 64)]


@pytest.mark.parametrize("keys", [None, 77])
@pytest.mark.parametrize(("queries", "dim"), [*SD1, *SD2_768, *SD2_AND_SDXL])
def test_splash_equals_dot_product_forward_and_backward(queries: int, keys: int | None, dim: int):
    # Interpreted: the very kernel that a TPU runs, padding to blocks of 128 included.
    args = qkv(queries, keys or queries, heads=1, dim=dim, batch=1)

    def both(kernel):
        loss = lambda *args: jnp.sum(jnp.sin(kernel(*args)))
        return jax.jit(lambda *args: (kernel(*args), *jax.grad(loss, (0, 1, 2))(*args)))(*args)

    (out, *ours), (expected, *plain) = both(functools.partial(attention.splash, interpret=True)), both(attention.dot_product)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1.0, float(jnp.abs(b).max())))


def test_splash_takes_the_widest_blocks_that_divide():
    found = {length: attention._splash_block(length) for length in (128, 256, 640, 1024, 2304, 4096, 9216)}
    assert found == {128: 128, 256: 256, 640: 640, 1024: 512, 2304: 384, 4096: 512, 9216: 512}


def test_flash_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture):
    attention._say_once.cache_clear()
    q, k, v = qkv(8, 8)
    flash = attention.kernel("flash", jax.devices("cpu")[0])
    with caplog.at_level(logging.WARNING):
        first, second = flash(q, k, v), flash(q, k, v)
    np.testing.assert_array_equal(first, attention.dot_product(q, k, v))
    np.testing.assert_array_equal(second, first)
    assert [record.getMessage() for record in caplog.records] == [
        "attention=flash: there is no flash kernel for cpu; computing dot_product there"
    ]


@pytest.mark.parametrize(
    ("platform", "queries", "mask", "reason"),
    [
        ("tpu", 64, None, "at least 128 queries, not 64"),
        ("tpu", 256, np.ones((1, 1, 256, 256), bool), "mask"),
        ("gpu", 256, None, "bfloat16 or float16, not float32"),
    ],
)
def test_flash_names_what_the_kernel_cannot_take(platform, queries, mask, reason, caplog):
    attention._say_once.cache_clear()
    args = qkv(queries, queries)
    with caplog.at_level(logging.WARNING):
        out = attention.kernel("flash", SimpleNamespace(platform=platform))(*args, mask=mask)
    np.testing.assert_allclose(out, attention.dot_product(*args), atol=1e-6)
    assert reason in caplog.text


def test_explicit_kernels_refuse_what_they_cannot_take(monkeypatch: pytest.MonkeyPatch):
    args = qkv(8, 8)
    with pytest.raises(ValueError, match="attention=cudnn: .*not float32; use attention=flash or dot_product"):
        attention.kernel("cudnn")(*args)
    for capability, widest, width in (("8.9", 128, 36), ("8.9", 128, 160), ("9.0", 256, 264)):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        with pytest.raises(ValueError, match=f"multiple of 8 up to {widest}, not {width}"):
            attention.kernel("cudnn")(*[jnp.zeros((1, 8, 2, width), jnp.bfloat16)] * 3)
    with pytest.raises(ValueError, match="attention='fast' is not known \\(allowed: dot_product, cudnn, flash\\)"):
        attention.kernel("fast")


@pytest.mark.parametrize("keys", [64, 77])
def test_deterministic_cudnn_calls_differ_in_their_seed_alone(keys: int, monkeypatch: pytest.MonkeyPatch):
    """XLA cannot run two equal ones in a program; that it runs these is seen on a GPU, by benchmarks/determinism.py."""
    from jax._src.cudnn import fused_attention_stablehlo
    from jax._src.nn import functions

    calls = []

    def called(q, k, v, bias, mask, *lengths, **options):
        calls.append(([np.asarray(x) for x in lengths if x is not None], bias, mask, options))
        return q

    monkeypatch.setattr(functions, "cudnn_dot_product_attention", called)
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", called)
    q, k = jnp.ones((2, 64, 8, 40), jnp.bfloat16), jnp.ones((2, keys, 8, 40), jnp.bfloat16)
    attend = attention.kernel("cudnn")
    attend(q, k, k)
    monkeypatch.setenv("XLA_FLAGS", "--others --xla_gpu_deterministic_ops=true")
    attend(q, k, k)
    attend(q, k, k)
    usual, first, second = calls
    assert first[3].pop("seed") != second[3].pop("seed")
    usual_options = {key: value for key, value in usual[3].items() if key not in ("sliding_window_length", "return_residual")}
    assert usual_options == first[3] == second[3]
    assert len(usual[0]) == (2 if keys == 77 else 0)
    np.testing.assert_equal(usual[:3], first[:3])


@pytest.mark.parametrize(("kernel", "platform", "call"), [
    ("cudnn", "cuda", "__cudnn$fmhaSoftmax("), ("splash", "tpu", "tpu_custom_call"),
])  # fmt: skip
@pytest.mark.parametrize(("keys", "repeated"), [(256, 0), (77, 1)])
def test_selective_recomputation_repeats_attention_to_a_text_alone(
    keys: int, repeated: int, kernel: str, platform: str, call: str, monkeypatch: pytest.MonkeyPatch
):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)  # there is none here
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda *_: True)
    q, k = (jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16) for length in (256, keys))

    def calls(remat: str) -> int:
        block = REMAT[remat](lambda q, k, scale: getattr(attention, kernel)(q * scale, k * scale, k * scale) * scale)
        loss = lambda *args: block(*args).astype(jnp.float32).sum()
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, jnp.ones((), jnp.bfloat16))
        return traced.lower(lowering_platforms=(platform,)).as_text().count(call)

    assert calls("full") == calls("none") + 1
    assert calls("selective") == calls("none") + repeated
