"""The GPU kernels of norms and biases, interpreted, against what they stand for; and that they lower for a GPU."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff.models import fused
from maxdiff.models.gpus import has_triton
from maxdiff.models.layers import Compute, Conv, GroupNorm, LayerNorm, Linear
from maxdiff.models.network import Network
from maxdiff.models.unet import UNet2DConditionModel, UNetConfig
from maxdiff.sharding import make_mesh
from maxdiff.task import fused_kernels

BF16 = Compute(dtype=jnp.bfloat16)
# Widths of norms in the UNets of SD1.x, SD2 and SDXL, in autoencoders and in text encoders.
WIDTHS = [128, 256, 320, 512, 640, 768, 960, 1024, 1280, 1920, 2560]
LAYERS: dict[str, Any] = {
    "group norm": lambda width, compute: GroupNorm(width, 32, 1e-5, compute),
    "layer norm": lambda width, compute: LayerNorm(width, compute),
    "linear": lambda width, compute: Linear(width, 128, compute),
    "convolution": lambda width, compute: Conv(width, 64, compute),
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "INTERPRET", True)


def error(ours: Any, reference: Any) -> float:
    """The worst relative L2 error of a leaf."""
    flat = zip(*(map(jax.tree.leaves, (ours, reference))), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in flat]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def with_gradients(network: Network, compute: Compute, params: Any, x: jax.Array, pull: jax.Array, **given: Any) -> Any:
    """(output, gradients of parameters and x) of a network that computes so."""
    network = network.with_compute(compute)
    y, vjp = jax.vjp(lambda params, x: network.apply(params, x.astype(compute.dtype), **given), params, x)
    return y, vjp(pull.astype(y.dtype))


def random_params(network: Network) -> Any:
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), jnp.float32), network.abstract())


@pytest.mark.parametrize("shape", [(2, 5, 7, 64), (1, 24, 24, 320), (3, 2, 2, 960)])
@pytest.mark.parametrize(("layer", "given"), [
    ("group norm", {}), ("group norm", {"silu": True}), ("layer norm", {}), ("linear", {}), ("convolution", {}),
])  # fmt: skip
def test_kernels_compute_what_xla_does(interpreted, layer: str, given: dict[str, Any], shape: tuple[int, ...]):
    """No further from float32 than the plain layer in bfloat16 is, lengths that no block divides included."""
    rng = np.random.default_rng(1)
    network = Network(lambda _, compute: LAYERS[layer](shape[-1], compute), None)
    x = jnp.asarray(rng.standard_normal(shape) + 0.5, jnp.bfloat16).astype(jnp.float32)
    params = random_params(network)
    width = {"linear": 128, "convolution": 64}.get(layer, shape[-1])
    pull = jnp.asarray(rng.standard_normal((*shape[:-1], width)), jnp.bfloat16)
    exact, plain, ours = (
        with_gradients(network, compute, params, x, pull, **given)
        for compute in (Compute(), BF16, dataclasses.replace(BF16, fused=fused))
    )
    assert error(ours, exact) < min(1e-2, 1.1 * error(plain, exact))


def test_a_residual_takes_its_gradient_through_the_layer_norm(interpreted):
    rng = np.random.default_rng(3)
    x, first, second = (jnp.asarray(rng.standard_normal((2, 9, 64)), jnp.bfloat16) for _ in range(3))
    network = Network(lambda _, compute: LayerNorm(64, compute), None, dataclasses.replace(BF16, fused=fused))
    params = random_params(network)
    both = lambda network, x: network.apply(params, x, method="beside")
    _, ours = jax.vjp(lambda x: both(network, x), x)
    _, exact = jax.vjp(lambda x: both(network.with_compute(Compute()), x), x.astype(jnp.float32))
    assert error(ours((first, second)), exact((first.astype(jnp.float32), second.astype(jnp.float32)))) < 1e-2


def test_a_unet_learns_the_same(interpreted):
    """Gradients of a whole UNet are as close to float32's as without kernels."""
    config = UNetConfig(
        sample_size=8,
        block_out_channels=(64,),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=2,
        down_block_types=("DownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )
    rng = np.random.default_rng(4)
    network = Network(UNet2DConditionModel, config)
    # No convolution is to be zero: behind it nothing would be learnt.
    params = jax.tree.map(lambda s: jnp.asarray(0.1 * rng.standard_normal(s.shape), jnp.float32), network.abstract())
    x, states = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 8, 4), (1, 77, 64)))

    def gradients(compute: Compute) -> Any:
        apply = network.with_compute(compute).apply
        loss = lambda params: jnp.square(apply(params, x, jnp.asarray([500]), states).astype(jnp.float32)).mean()
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params))

    exact, plain, ours = map(gradients, (Compute(), BF16, dataclasses.replace(BF16, fused=fused)))
    together = lambda tree: np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    assert error(together(ours), together(exact)) < 1.1 * error(together(plain), together(exact))
    assert error(together(ours), together(plain)) > 0  # they are others


@pytest.mark.parametrize("width", WIDTHS)
def test_kernels_lower_for_a_gpu(width: int):
    """Triton takes blocks whose sides are powers of two alone."""
    x = jax.ShapeDtypeStruct((2, 3, 5, width), jnp.bfloat16)
    for name in ("group norm", "layer norm", "convolution"):
        network = Network(
            lambda _, compute, name=name: LAYERS[name](width, compute), None, dataclasses.replace(BF16, fused=fused)
        )
        loss = lambda params, x, network=network: network.apply(params, x).astype(jnp.float32).sum()
        lowered = jax.jit(jax.grad(loss, (0, 1))).trace(network.abstract(), x).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("__gpu$xla.gpu.triton") >= 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(3, 3, 64, 160), (100, 72), (1, 1, 64, 64)])
def test_a_turned_gradient_is_the_same(interpreted, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: Any):
    """In whole tiles of 64, and where those do not divide it."""
    gradient = jnp.asarray(np.random.default_rng(6).standard_normal(shape), dtype)
    assert np.array_equal(fused.turned(gradient), gradient)
    monkeypatch.setattr(fused, "INTERPRET", False)
    lowered = jax.jit(fused.turned).trace(gradient).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize(("shape", "dtype"), [((2, 4, 64), jnp.float32), ((2, 64), jnp.bfloat16), ((2, 4, 32), jnp.bfloat16)])
def test_other_activations_are_left_to_xla(shape: tuple[int, ...], dtype: Any):
    assert not fused.takes(jnp.zeros(shape, dtype))
    network = Network(lambda _, compute: LayerNorm(shape[-1], compute), None, dataclasses.replace(BF16, fused=fused))
    assert network.apply(random_params(network), jnp.ones(shape, dtype)).shape == shape  # on a CPU a kernel would raise


@pytest.mark.parametrize(("platform", "capability", "expected"), [
    ("gpu", "9.0", True), ("gpu", "8.0", True), ("gpu", "12.0", True), ("gpu", "7.5", False), ("gpu", "gfx90a", False),
    ("cpu", "", False), ("tpu", "", False),
])  # fmt: skip
def test_gpus_that_kernels_are_for(platform: str, capability: str, expected: bool):
    assert has_triton(SimpleNamespace(platform=platform, compute_capability=capability)) is expected


def test_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh(("data", "tensor"), {"data": -1}, {})
    assert fused_kernels("auto", mesh) is None
    assert fused_kernels("plain", mesh) is None
    assert fused_kernels() is None
    with pytest.raises(ValueError, match=r"norms='some' is not supported \(allowed: auto, fused, plain\)"):
        fused_kernels("some")
    with pytest.raises(ValueError, match=r"norms=fused is not supported here: .*Ampere.* \(allowed: auto, plain\)"):
        fused_kernels("fused", mesh)
    devices = np.full((1, 1, 2), SimpleNamespace(platform="gpu", compute_capability="9.0"))
    of = lambda tensor: SimpleNamespace(shape={"tensor": tensor}, devices=devices)
    assert fused_kernels("auto", of(1)) is fused
    assert fused_kernels("auto", of(2)) is None
    monkeypatch.setattr(jax, "devices", lambda: list(devices.flat))
    assert fused_kernels() is fused
    with pytest.raises(ValueError, match="tensor axis"):
        fused_kernels("fused", of(2))
