"""Layers whose fast form is not their definition, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff.models.blocks import GEGLU
from maxdiff.models.layers import Compute, Embed, GroupNorm, gelu
from maxdiff.models.network import Network


def test_gelu_is_the_exact_one():
    x = jnp.linspace(-8, 8, 4001)
    np.testing.assert_allclose(gelu(x), jax.nn.gelu(x, approximate=False), atol=1e-6, rtol=0)
    half = gelu(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        half.astype(jnp.float32), gelu(x.astype(jnp.bfloat16).astype(jnp.float32)), rtol=2**-8, atol=1e-6
    )


def test_the_gradient_of_a_row_that_is_asked_for_often_is_summed_in_float32():
    """The padding's is: in bfloat16 a sum of ones ends at 256."""
    network = Network(lambda _, compute: Embed(3, 4, compute, (None, None), 1.0), None, Compute(dtype=jnp.bfloat16))
    ids = jnp.array([0] + [2] * 1000)
    rows = network.apply(params := network.init(0), ids)
    assert rows.dtype == jnp.bfloat16
    gradient = jax.grad(lambda params: network.apply(params, ids).sum().astype(jnp.float32))(params)["embedding"]
    np.testing.assert_array_equal(gradient, np.repeat([[1.0], [0.0], [1000.0]], 4, axis=1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_group_norm_and_its_gradient_are_those_of_the_definition(dtype, tolerance, offset):
    """Also far from zero, where a variance by squares alone cancels."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 6, 5, 8)) * rng.uniform(0.5, 2, 8) + offset, dtype)
    pull = rng.standard_normal(x.shape)
    network = Network(lambda _, compute: GroupNorm(8, 2, 1e-5, compute), None, Compute(dtype=dtype))
    params = {
        "scale": jnp.asarray(rng.standard_normal(8), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal(8), jnp.float32),
    }

    def definition(x, params):
        grouped = x.reshape(2, 30, 2, 4)
        mean = grouped.mean((1, 3), keepdims=True)
        y = (grouped - mean) / jnp.sqrt(jnp.square(grouped - mean).mean((1, 3), keepdims=True) + 1e-5)
        y = y.reshape(x.shape) * params["scale"].reshape(1, 1, 1, 8) + params["bias"].reshape(1, 1, 1, 8)
        return y * jax.nn.sigmoid(y)

    with jax.enable_x64(True):
        whole = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, params))
        value, vjp = jax.vjp(definition, *whole)
        gradient = jax.tree.map(np.asarray, vjp(jnp.asarray(pull)))
        value = np.asarray(value)
    ours, vjp = jax.vjp(lambda x, params: network.apply(params, x, silu=True), x, params)
    for got, want in zip(
        jax.tree.leaves((ours, vjp(jnp.asarray(pull, dtype)))), jax.tree.leaves((value, gradient)), strict=True
    ):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < tolerance * max(1.0, offset)


def test_gated_products_are_the_same_with_and_without_a_gradient():
    rng = np.random.default_rng(1)
    network = Network(lambda _, compute: GEGLU(6, 10, compute), None)
    params = {
        "proj": {
            "kernel": jnp.asarray(rng.standard_normal((6, 20)), jnp.float32),
            "bias": jnp.asarray(rng.standard_normal(20), jnp.float32),
        }
    }
    x = jnp.asarray(rng.standard_normal((2, 3, 6)), jnp.float32)

    def definition(params, x):
        a, b = jnp.split(x @ params["proj"]["kernel"] + params["proj"]["bias"].reshape(1, 1, -1), 2, axis=-1)
        return a * jax.nn.gelu(b, approximate=False)

    alone = network.apply(params, x)
    together, vjp = jax.vjp(network.apply, params, x)
    want, pull = jax.vjp(definition, params, x)
    np.testing.assert_allclose(alone, want, atol=1e-5)
    np.testing.assert_allclose(together, want, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), vjp(want), pull(want))
