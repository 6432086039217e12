"""Sums of which each device keeps a part, along a torus that is made up: the same numbers as lax.psum_scatter's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxdiff.scatter import along_torus, psum_scatter, stages


class Torus:
    """Stands for a mesh of TPUs."""

    def __init__(self, shape: tuple[int, ...], sizes: dict[str, int], order: list[int] | None = None):
        count = int(np.prod(shape))
        coords = [tuple(int(i) for i in np.unravel_index(n, shape)) for n in range(count)]
        devices = [types.SimpleNamespace(coords=coords[n], platform="tpu") for n in order or range(count)]
        self.devices = np.array(devices, object).reshape(tuple(sizes.values()))
        self.axis_names, self.shape = tuple(sizes), sizes


@pytest.mark.parametrize(("torus", "expected"), [
    (Torus((4, 2), {"fsdp": 8}), [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]),
    (Torus((2, 2), {"fsdp": 4}, [0, 1, 3, 2]), [[[0, 3], [1, 2]], [[0, 1], [3, 2]]]),
    (Torus((8,), {"fsdp": 8}), [None]),  # one axis of the torus
    (Torus((4, 2), {"data": 2, "fsdp": 4}), [None]),  # a part of the slice
])  # fmt: skip
def test_a_sum_over_a_slice_goes_along_one_axis_of_the_torus_after_another(torus: Torus, expected: list):
    assert stages(torus, "fsdp")[1] == expected


def on_devices(function, x: jax.Array, dim: int) -> np.ndarray:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    spec = PartitionSpec(*[None] * dim, "fsdp")
    part = lambda x: function(x[0])  # each device has an x of its own
    run = jax.shard_map(part, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(run)(x))


@pytest.mark.parametrize("order", [None, [0, 1, 3, 2, 6, 7, 5, 4]])
@pytest.mark.parametrize(("shape", "dim"), [((3, 3, 5, 16), 3), ((24, 7), 0), ((2, 64, 40), 1)])
def test_each_device_keeps_its_own_part(shape: tuple[int, ...], dim: int, order: list[int] | None):
    x = jax.random.normal(jax.random.key(0), (8, *shape))
    mesh = types.SimpleNamespace(devices=np.array(jax.devices()))
    plain = on_devices(lambda x: psum_scatter(x, mesh, "fsdp", dim), x, dim)  # a CPU's
    np.testing.assert_array_equal(
        plain, on_devices(lambda x: lax.psum_scatter(x, "fsdp", scatter_dimension=dim, tiled=True), x, dim)
    )
    for torus in (Torus((2, 2, 2), {"fsdp": 8}, order), Torus((4, 2), {"fsdp": 8}, order), Torus((8,), {"fsdp": 8}, order)):
        ours = on_devices(lambda x, torus=torus: along_torus(x, "fsdp", dim, *stages(torus, "fsdp")), x, dim)
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)
    assert jnp.asarray(plain).shape == shape
