"""Sums over devices of which each keeps a part, in the form in which XLA makes a reduce-scatter of them on TPUs too.

XLA:TPU has reduce-scatters of arrays whose parts lie whole in memory one after another, and not over all of a slice at once
where that has several physical axes. Of others it makes an all-reduce, which sends twice as much, and a slice of its result.
Found by compiling; `python -m maxdiff.aot` counts them.
"""

import functools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

# Elements of a tile of a TPU's memory, float32.
TILE = (8, 128)


def psum_scatter(x: jax.Array, mesh: Mesh, axis: str, dim: int) -> jax.Array:
    """The sum of x over a mesh axis, of which each device keeps its part along dimension `dim`; within shard_map.

    As lax.psum_scatter with tiled=True, but for the order in which is added.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return along_torus(x, axis, dim, *stages(mesh, axis))


Groups: TypeAlias = list[list[int]] | None


def along_torus(x: jax.Array, axis: str, dim: int, order: list[int], groups: list[Groups]) -> jax.Array:
    """The same by the sums that `stages` gives, of parts that are whole tiles."""
    parts, shape = len(order), list(x.shape)
    shape[dim] //= parts
    x = x.reshape(*x.shape[:dim], parts, *shape[dim:])
    x = jnp.moveaxis(x, dim, 0).reshape(parts, -1)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % math.prod(TILE)))).reshape(parts, -1, *TILE)
    if order != list(range(parts)):
        x = x[np.array(order)]
    for group in groups:
        x = lax.psum_scatter(x, axis, scatter_dimension=0, axis_index_groups=group, tiled=True)
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)


@functools.lru_cache(maxsize=64)
def stages(mesh: Mesh, axis: str) -> tuple[list[int], list[Groups]]:
    """How a sum over a mesh axis is made of sums along the torus.

    Returns:
        The order in which the parts are to be for it, and the groups of devices of each sum, one sum after another; None: all
        of the axis at once.
    """
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0]
    a_slice = sum(_slice(device) == _slice(line[0]) for device in mesh.devices.flat)
    # Over the links within slices first: they leave little to be sent from slice to slice.
    places = [(*device.coords, _slice(device)) for device in line]
    sizes = [size for size in (len({*values}) for values in zip(*places, strict=True)) if size > 1]
    if len(line) < a_slice or len(sizes) < 2 or math.prod(sizes) != len(line):
        return list(range(len(line))), [None]
    order = sorted(range(len(line)), key=places.__getitem__)
    grid = np.array(order).reshape(sizes)
    return order, [np.moveaxis(grid, k, -1).reshape(-1, size).tolist() for k, size in enumerate(sizes)]


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", 0)
