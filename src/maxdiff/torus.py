"""Sums over devices of which each keeps a part, and gathers of such parts, in a form that TPUs have an operation for.

XLA:TPU has reduce-scatters and all-gathers of arrays whose parts are whole tiles of memory one after another, and not over all
of a slice at once where that has several physical axes. Of others it makes an all-reduce of the whole, which sends twice as
much. Found by compiling; `python -m maxdiff.aot` counts them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
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
        crosses_slices: whether the last of them is between slices.
    """

    order: list[int]
    groups: list[list[list[int]] | None]
    crosses_slices: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the torus has the devices in the order that the axis has them in."""
        return self.order == sorted(self.order)


@functools.lru_cache(maxsize=64)
def route(mesh: Mesh, axis: str) -> Route:
    """Over a whole slice along one physical axis after another, over a part of one at once; from slice to slice last."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0]
    a_slice = sum(slice_of(device) == slice_of(line[0]) for device in mesh.devices.flat)
    slices = len({*map(slice_of, line)})
    places = [(*device.coords, slice_of(device)) for device in line]
    within = [size for size in (len({*values}) for values in zip(*(place[:-1] for place in places), strict=True)) if size > 1]
    if len(line) < a_slice * slices:
        within = [len(line) // slices]
    sizes = [size for size in (*within, slices) if size > 1]
    if len(sizes) < 2 or math.prod(sizes) != len(line):
        return Route(list(range(len(line))), [None], slices > 1)
    order = sorted(range(len(line)), key=places.__getitem__)
    grid = np.array(order).reshape(sizes)
    return Route(order, [np.moveaxis(grid, k, -1).reshape(-1, size).tolist() for k, size in enumerate(sizes)], slices > 1)


def psum_scatter(xs: Sequence[jax.Array], mesh: Mesh, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """The sum of each x over a mesh axis, of which each device keeps its part along its dimension of `dims`; within shard_map.

    As lax.psum_scatter with tiled=True, but for the order in which is added.
    """
    if not on_tpu(mesh):
        return [lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True) for x, dim in zip(xs, dims, strict=True)]
    return scatter_along(xs, axis, dims, route(mesh, axis))


def all_gather(xs: Sequence[jax.Array], mesh: Mesh, axis: str, dims: Sequence[int]) -> list[jax.Array]:
    """The parts of all devices of a mesh axis, one after another along each x's dimension of `dims`; within shard_map."""
    if not on_tpu(mesh):
        return [lax.all_gather(x, axis, axis=dim, tiled=True) for x, dim in zip(xs, dims, strict=True)]
    return gather_along(xs, axis, dims, route(mesh, axis))


def crosses_slices(mesh: Mesh, axis: str) -> bool:
    """Whether a mesh axis goes from one slice of TPUs to another."""
    return on_tpu(mesh) and route(mesh, axis).crosses_slices


def on_tpu(mesh: Mesh) -> bool:
    """Whether a mesh is one of TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def scatter_along(xs: Sequence[jax.Array], axis: str, dims: Sequence[int], way: Route) -> list[jax.Array]:
    """`psum_scatter` by a route."""
    parts = len(way.order)
    shapes = [(*x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :]) for x, dim in zip(xs, dims, strict=True)]
    whole = [_tiled(jnp.moveaxis(_cut(x, dim, parts), dim, 0).reshape(parts, -1)) for x, dim in zip(xs, dims, strict=True)]
    if not way.is_plain:
        whole = [x[np.array(way.order)] for x in whole]
    scatter = lambda x, group: lax.psum_scatter(x, axis, scatter_dimension=0, axis_index_groups=group, tiled=True)
    for number, group in enumerate(way.groups, 1):
        at_once = way.crosses_slices and number == len(way.groups)
        whole = _as_one(lambda x, group=group: scatter(x, group), whole) if at_once else [scatter(x, group) for x in whole]
    return [x.reshape(-1)[: math.prod(shape)].reshape(shape) for x, shape in zip(whole, shapes, strict=True)]


def gather_along(xs: Sequence[jax.Array], axis: str, dims: Sequence[int], way: Route) -> list[jax.Array]:
    """`all_gather` by a route."""
    parts = len(way.order)
    whole = [_tiled(x.reshape(1, -1)) for x in xs]
    gather = lambda x, group: lax.all_gather(x, axis, axis=0, axis_index_groups=group, tiled=True)
    for number, group in enumerate(reversed(way.groups)):
        at_once = way.crosses_slices and number == 0
        whole = _as_one(lambda x, group=group: gather(x, group), whole) if at_once else [gather(x, group) for x in whole]
    if not way.is_plain:
        whole = [x[np.argsort(way.order)] for x in whole]

    def joined(x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
        x = x.reshape(parts, -1)[:, : part.size].reshape(parts, *part.shape)
        return jnp.moveaxis(x, 0, dim).reshape(*part.shape[:dim], parts * part.shape[dim], *part.shape[dim + 1 :])

    return [joined(x, part, dim) for x, part, dim in zip(whole, xs, dims, strict=True)]


def _cut(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """[... n ...] as [... parts n/parts ...]."""
    return x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])


def _as_one(operation: Callable[[jax.Array], jax.Array], xs: Sequence[jax.Array]) -> list[jax.Array]:
    """An operation on [parts tiles rows 128], of all of a dtype at once.

    Between slices each costs its own time on the way, and there are no more than some hundred that can be under way (libtpu
    ends with "Ran out of memory in memory space sflag").
    """
    found: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):  # in an order that is every process's
        which = [i for i, x in enumerate(xs) if x.dtype == dtype]
        ends = np.cumsum([xs[i].shape[1] for i in which])
        parts = jnp.split(operation(jnp.concatenate([xs[i] for i in which], axis=1)), ends[:-1].tolist(), axis=1)
        found |= dict(zip(which, parts, strict=True))
    return [found[i] for i in range(len(xs))]


def _tiled(x: jax.Array) -> jax.Array:
    """[parts n] with each part in whole tiles, [parts tiles rows 128]."""
    rows = TILE_BYTES // x.dtype.itemsize
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (rows * TILE_COLUMNS))))
    return x.reshape(x.shape[0], -1, rows, TILE_COLUMNS)
