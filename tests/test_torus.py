"""Sums of which each device keeps a part, and gathers, along a torus that is made up: the numbers of plain ones."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxdiff.torus import all_gather, gather_along, psum_scatter, route, scatter_along


class Torus:
    """Stands for a mesh of TPUs."""

    def __init__(self, shape: tuple[int, ...], sizes: dict[str, int], order: list[int] | None = None, slices: int = 1):
        count = int(np.prod(shape))
        coords = [tuple(int(i) for i in np.unravel_index(n, shape)) for n in range(count)]
        devices = [
            SimpleNamespace(coords=coords[n], slice_index=i, platform="tpu")
            for i in range(slices)
            for n in order or range(count)
        ]
        self.devices = np.array(devices, object).reshape(tuple(sizes.values()))
        self.axis_names, self.shape = tuple(sizes), sizes


@pytest.mark.parametrize(("torus", "expected"), [
    (Torus((4, 2), {"fsdp": 8}), [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]),
    (Torus((2, 2), {"fsdp": 4}, [0, 1, 3, 2]), [[[0, 3], [1, 2]], [[0, 1], [3, 2]]]),
    (Torus((2, 2), {"fsdp": 8}, slices=2), [  # within slices first
        [[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 1], [4, 5], [2, 3], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]],
    ]),
    (Torus((8,), {"fsdp": 8}), [None]),  # one axis of the torus
    (Torus((4, 2), {"data": 2, "fsdp": 4}), [None]),  # a part of the slice
    (Torus((2, 2), {"fsdp": 4, "data": 2}, slices=2), [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),  # parts of two slices
    (Torus((2, 2), {"fsdp": 2, "data": 4}, slices=2), [None]),  # a chip of each slice
])  # fmt: skip
def test_a_sum_over_a_slice_goes_along_one_axis_of_the_torus_after_another(torus: Torus, expected: list):
    assert route(torus, "fsdp").groups == expected


def on_devices(function, x: jax.Array, given: PartitionSpec, gives: PartitionSpec) -> np.ndarray:
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    run = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)
    return np.asarray(jax.jit(run)(x))


@pytest.mark.parametrize("order", [None, [0, 1, 3, 2, 6, 7, 5, 4]])
@pytest.mark.parametrize(("shape", "dim"), [((3, 3, 5, 16), 3), ((24, 7), 0), ((2, 64, 40), 1)])
def test_each_device_gets_its_own_part_and_all_get_the_whole(shape: tuple[int, ...], dim: int, order: list[int] | None):
    own, split, cpus = (
        PartitionSpec("fsdp"),
        PartitionSpec(*[None] * dim, "fsdp"),
        SimpleNamespace(devices=np.array(jax.devices())),
    )
    x = jax.random.normal(jax.random.key(0), (8, *shape))  # one for each device
    total = on_devices(lambda x: psum_scatter([x[0]], cpus, "fsdp", [dim])[0], x, own, split)
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        on_devices(lambda x: all_gather([x], cpus, "fsdp", [dim])[0], x[0], split, PartitionSpec()), x[0]
    )
    for torus in (Torus((2, 2, 2), {"fsdp": 8}, order), Torus((4, 2), {"fsdp": 8}, order), Torus((2, 2), {"fsdp": 8}, slices=2), Torus((4, 2), {"fsdp": 8, "data": 2}, slices=2),
                  Torus((8,), {"fsdp": 8}, order)):  # fmt: skip
        way = route(torus, "fsdp")
        ours = on_devices(lambda x, way=way: scatter_along([x[0]], "fsdp", [dim], way)[0], x, own, split)
        np.testing.assert_allclose(ours, total, rtol=1e-6, atol=1e-6)
        for dtype in (jnp.float32, jnp.bfloat16):
            given = x[0].astype(dtype)
            ours = on_devices(lambda x, way=way: gather_along([x], "fsdp", [dim], way)[0], given, split, PartitionSpec())
            np.testing.assert_array_equal(ours, given)


def test_between_slices_arrays_go_together():
    """One operation for all of a dtype, with the numbers of one each."""
    way = route(Torus((2, 2), {"fsdp": 8}, slices=2), "fsdp")
    shapes, dims = [(16, 3), (5, 24), (8,), (3, 3, 4, 8)], [0, 1, 0, 3]
    xs = [jax.random.normal(jax.random.key(i), (8, *shape)).astype(jnp.bfloat16 if i == 1 else jnp.float32)
          for i, shape in enumerate(shapes)]  # fmt: skip
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    split = [PartitionSpec(*[None] * dim, "fsdp") for dim in dims]
    both = jax.jit(jax.shard_map(
        lambda xs: (scattered := scatter_along([x[0] for x in xs], "fsdp", dims, way), gather_along(scattered, "fsdp", dims, way)),
        mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=(split, PartitionSpec()), check_vma=False))  # fmt: skip
    scattered, gathered = both(xs)
    for x, part, whole in zip(xs, scattered, gathered, strict=True):
        np.testing.assert_allclose(
            part.astype(jnp.float32), x.astype(jnp.float32).sum(0), atol=0.1 if x.dtype == jnp.bfloat16 else 1e-5
        )
        np.testing.assert_array_equal(whole, part)
    text = both.lower(xs).as_text()
    # Along the two axes of the torus one for each array, between slices one for each dtype.
    assert text.count("stablehlo.reduce_scatter") == text.count("stablehlo.all_gather") == 2 * len(xs) + 2
