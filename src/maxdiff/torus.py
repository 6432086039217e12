"""Sums over devices of which each keeps a part, and gathers of such parts, in a form that TPUs have an operation for.

XLA:TPU has reduce-scatters and all-gathers of arrays whose parts are whole tiles of memory one after another, and not over all
of a slice at once where that has several physical axes. Of others it makes an all-reduce of the whole, which sends twice as
much. Found by compiling; `python -m maxdiff.aot` counts them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

# A tile of a TPU's memory is as many rows of 128 as have these bytes a column.
TILE_BYTES, TILE_COLUMNS = 32, 128


def slice_of(device: Any) -> int:
    """The number of a device's slice; 0 of what is none of several."""
    return getattr(device, "slice_index", 0)


@dataclasses.dataclass(frozen=True)
class Route:
    """How an operation over a mesh axis is made of operations along the torus, one after another.

    Attributes:
        order: of the devices of the axis, as the torus has them.
        groups: of devices, for each of the operations; None: all of the axis at once.
    """

    order: list[int]
    groups: list[list[list[int]] | None]

    @property
    def is_plain(self) -> bool:
        """Whether the torus has the devices in the order that the axis has them in."""
        return self.order == sorted(self.order)


@functools.lru_cache(maxsize=64)
def route(mesh: Mesh, axis: str) -> Route:
    """Over a whole slice along one physical axis after another, the links from slice to slice last; else all at once."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0]
    a_slice = sum(slice_of(device) == slice_of(line[0]) for device in mesh.devices.flat)
    places = [(*device.coords, slice_of(device)) for device in line]
    sizes = [size for size in (len({*values}) for values in zip(*places, strict=True)) if size > 1]
    if len(line) < a_slice or len(sizes) < 2 or math.prod(sizes) != len(line):
        return Route(list(range(len(line))), [None])
    order = sorted(range(len(line)), key=places.__getitem__)
    grid = np.array(order).reshape(sizes)
    return Route(order, [np.moveaxis(grid, k, -1).reshape(-1, size).tolist() for k, size in enumerate(sizes)])


def psum_scatter(x: jax.Array, mesh: Mesh, axis: str, dim: int) -> jax.Array:
    """The sum of x over a mesh axis, of which each device keeps its part along dimension `dim`; within shard_map.

    As lax.psum_scatter with tiled=True, but for the order in which is added.
    """
    if not on_tpu(mesh):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return scatter_along(x, axis, dim, route(mesh, axis))


def all_gather(x: jax.Array, mesh: Mesh, axis: str, dim: int) -> jax.Array:
    """The parts of all devices of a mesh axis, one after another along dimension `dim`; within shard_map."""
    if not on_tpu(mesh):
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    return gather_along(x, axis, dim, route(mesh, axis))


def on_tpu(mesh: Mesh) -> bool:
    """Whether a mesh is one of TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def scatter_along(x: jax.Array, axis: str, dim: int, way: Route) -> jax.Array:
    """`psum_scatter` by a route."""
    parts, shape = len(way.order), list(x.shape)
    shape[dim] //= parts
    x = x.reshape(*x.shape[:dim], parts, *shape[dim:])
    x = _tiled(jnp.moveaxis(x, dim, 0).reshape(parts, -1))
    if not way.is_plain:
        x = x[np.array(way.order)]
    for group in way.groups:
        x = lax.psum_scatter(x, axis, scatter_dimension=0, axis_index_groups=group, tiled=True)
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)


def gather_along(x: jax.Array, axis: str, dim: int, way: Route) -> jax.Array:
    """`all_gather` by a route."""
    parts, shape = len(way.order), x.shape
    x = _tiled(x.reshape(1, -1))
    for group in reversed(way.groups):
        x = lax.all_gather(x, axis, axis=0, axis_index_groups=group, tiled=True)
    if not way.is_plain:
        x = x[np.argsort(way.order)]
    x = x.reshape(parts, -1)[:, : math.prod(shape)].reshape(parts, *shape)
    return jnp.moveaxis(x, 0, dim).reshape(*shape[:dim], parts * shape[dim], *shape[dim + 1 :])


def _tiled(x: jax.Array) -> jax.Array:
    """[parts n] with each part in whole tiles, [parts tiles rows 128]."""
    rows = TILE_BYTES // x.dtype.itemsize
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (rows * TILE_COLUMNS))))
    return x.reshape(x.shape[0], -1, rows, TILE_COLUMNS)
