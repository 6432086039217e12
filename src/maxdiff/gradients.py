"""Sums over a batch on a mesh: loss and gradients of a training step, or measures of held-out examples.

Pure functions, reduced across devices once.

A batch is a dict of arrays whose first dimension is the examples of the global batch, split over the mesh
axes data and fsdp. `losses(params, constants, micro_batch) -> [b]` gives each example's loss; what is
differentiated is their mean over the global batch, so splitting it, over devices or micro-batches, changes
nothing but the order of a float32 sum. `constants` are what is not trained: frozen networks, the step's key.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff.models.network import Params
from maxdiff.torus import psum_scatter

Batch = dict[str, jax.Array]
Losses = Callable[[Params, Any, Batch], jax.Array]
GradientFunction = Callable[[Params, Any, Batch], tuple[jax.Array, Params]]
Measures = Callable[[Params, Any, Batch], dict[str, jax.Array]]
SumsFunction = Callable[[Params, Any, Batch], dict[str, jax.Array]]

# Mesh axes over which the examples of a batch are split.
BATCH_AXES = ("data", "fsdp")


def gradient_function(
    losses: Losses, mesh: Mesh, specs: Params, accumulation: int = 1, update_specs: Params | None = None,
    dtype: Any = None,
) -> GradientFunction:  # fmt: skip
    """(params, constants, batch) -> (mean loss, its gradient, float32 and split by `update_specs`).

    With a tensor axis of 1 every collective is written out, and gradients are reduced once a step. With more,
    XLA's partitioner places them, and reduces in every micro-batch; `losses` must then gather weights and
    constrain activations itself (`Compute.gather`, `Compute.constrain`), and must not otherwise. Constants
    lie whole on every device.

    Args:
        specs: the PartitionSpec of every parameter, as the parameter tree.
        accumulation: micro-batches in a batch, computed one after the other to save memory.
        update_specs: the PartitionSpec of every parameter's gradient; by default that of the parameter.
        dtype: in which networks use parameters of two dimensions or more: in it they are gathered, if it is smaller; vectors,
            those of norms among them, stay what they are. With a tensor axis networks see to that themselves.

    Raises:
        ValueError: when called, for a batch that does not divide into devices and micro-batches.
    """
    update_specs = specs if update_specs is None else update_specs
    if _has_tensor(mesh):
        return _automatic(losses, mesh, accumulation, update_specs)
    return _manual(losses, mesh, specs, accumulation, update_specs, dtype)


def sums_function(measures: Measures, mesh: Mesh, specs: Params) -> SumsFunction:
    """(params, constants, batch) -> the sum of each measure over the global batch, float32 scalars.

    `measures(params, constants, batch) -> {name: [b]}` says what is measured of each example. The batch also
    has `counted`, float32 [b]: 1 for an example that counts, 0 for one that only fills up the batch, whose
    measures may be anything, NaN too. Otherwise as `gradient_function`, without a gradient.

    Raises:
        ValueError: when called, for a batch that does not divide into devices.
    """
    axes = _batch_axes(mesh)

    def local(params: Params, constants: Any, batch: Batch) -> dict[str, jax.Array]:
        return lax.psum(_counted_sums(measures(params, constants, batch), batch["counted"]), axes)

    def whole(params: Params, constants: Any, batch: Batch) -> dict[str, jax.Array]:
        sums = _counted_sums(measures(params, constants, batch), batch["counted"])
        return lax.with_sharding_constraint(sums, NamedSharding(mesh, PartitionSpec()))

    function = whole if _has_tensor(mesh) else _on_each_device(local, mesh, specs, PartitionSpec())
    return lambda params, constants, batch: function(params, constants, _checked(batch, mesh))


def outputs_function(
    function: Callable[[Params, Any, Batch], jax.Array], mesh: Mesh, specs: Params
) -> Callable[..., jax.Array]:
    """(params, constants, batch) -> what `function` makes of each example, [b ...], split as the batch is.

    Otherwise as `gradient_function`, without a gradient.
    """
    mapped = function if _has_tensor(mesh) else _on_each_device(function, mesh, specs, PartitionSpec(_batch_axes(mesh)))
    return lambda params, constants, batch: mapped(params, constants, _checked(batch, mesh))


def _counted_sums(measures: dict[str, jax.Array], counted: jax.Array) -> dict[str, jax.Array]:
    assert all(x.shape == counted.shape for x in measures.values()), jax.tree.map(jnp.shape, measures)
    # Not a product alone: 0 * NaN is NaN.
    return {name: jnp.sum(jnp.where(counted > 0, x.astype(jnp.float32) * counted, 0.0)) for name, x in measures.items()}


def _manual(losses: Losses, mesh: Mesh, specs: Params, accumulation: int, update_specs: Params, dtype: Any) -> GradientFunction:
    axes = _batch_axes(mesh)
    several = [axis for axis in axes if mesh.shape[axis] > 1]  # XLA does not leave out a sum over one device

    def reduce(gradients: Params) -> Params:
        leaves, tree = jax.tree.flatten(gradients)
        splits = [_splits(spec) for spec in jax.tree.leaves(update_specs)]
        # All that go over the same axis at once, each leaf's own splits in their order.
        for turn, axis in itertools.product(range(max(map(len, splits), default=0)), axes):
            dims = {i: given[turn][0] for i, given in enumerate(splits) if len(given) > turn and given[turn][1] == axis}
            scattered = psum_scatter([leaves[i] for i in dims], mesh, axis, list(dims.values()))
            for i, leaf in zip(dims, scattered, strict=True):
                leaves[i] = leaf
        for i, given in enumerate(splits):
            if whole := tuple(axis for axis in several if axis not in {split for _, split in given}):
                leaves[i] = lax.psum(leaves[i], whole)
        return tree.unflatten(leaves)

    def local(weights: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        examples = _examples(batch) * _shards(mesh)
        micro = {key: x.reshape(accumulation, -1, *x.shape[1:]) for key, x in batch.items()}
        loss, gradient = _accumulate(losses, weights, constants, micro)
        return lax.psum(loss, axes) / examples, jax.tree.map(lambda g: g / examples, reduce(gradient))

    mapped = _on_each_device(local, mesh, specs, (PartitionSpec(), update_specs), dtype)
    return lambda params, constants, batch: mapped(params, constants, _checked(batch, mesh, accumulation))


def _on_each_device(
    local: Callable[..., Any], mesh: Mesh, specs: Params, out_specs: Any, dtype: Any = None
) -> Callable[..., Any]:
    """`local(weights, constants, batch)` with whole weights and the device's own examples."""

    def gather(p: jax.Array, spec: PartitionSpec) -> jax.Array:
        if p.ndim > 1 and _splits(spec) and dtype is not None and jnp.dtype(dtype).itemsize < p.dtype.itemsize:
            p = p.astype(dtype)
        for dim, axis in reversed(_splits(spec)):
            p = lax.all_gather(p, axis, axis=dim, tiled=True)
        return p

    return jax.shard_map(
        lambda params, constants, batch: local(jax.tree.map(gather, params, specs), constants, batch),
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec(_batch_axes(mesh))),
        out_specs=out_specs,
        # Gradients are taken wholly inside, so no collective is differentiated and nothing is to be checked.
        check_vma=False,
    )


def _automatic(losses: Losses, mesh: Mesh, accumulation: int, update_specs: Params) -> GradientFunction:
    def split(x: jax.Array) -> jax.Array:
        # Each device's examples are cut in `accumulation` parts, so that none moves to another device.
        parts = x.reshape(_shards(mesh), accumulation, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(accumulation, -1, *x.shape[1:])
        return lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, _batch_axes(mesh))))

    def whole(params: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        batch = _checked(batch, mesh, accumulation)
        loss, gradient = _accumulate(losses, params, constants, {key: split(x) for key, x in batch.items()})
        examples = _examples(batch)
        placed = lambda g, spec: lax.with_sharding_constraint(g / examples, NamedSharding(mesh, spec))
        return loss / examples, jax.tree.map(placed, gradient, update_specs)

    return whole


def _accumulate(losses: Losses, params: Params, constants: Any, micro: Batch) -> tuple[jax.Array, Params]:
    """Sum of all losses and its gradient, in float32; `micro` is [micro-batches b ...]."""

    def total(params: Params, batch: Batch) -> jax.Array:
        return jnp.sum(losses(params, constants, batch).astype(jnp.float32))

    def body(sums: Any, batch: Batch) -> tuple[Any, None]:
        here = jax.value_and_grad(total)(params, batch)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, here), None

    if next(iter(micro.values())).shape[0] == 1:
        loss, gradient = jax.value_and_grad(total)(params, {key: x[0] for key, x in micro.items()})
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), (jnp.zeros(()), params))
    return lax.scan(body, zeros, micro)[0]


def _checked(batch: Batch, mesh: Mesh, accumulation: int = 1) -> Batch:
    examples = _examples(batch)
    if examples % (_shards(mesh) * accumulation):
        raise ValueError(
            f"a global batch of {examples} does not divide into {_shards(mesh)} devices "
            f"({' x '.join(_batch_axes(mesh))}) and {accumulation} micro-batches"
        )
    return batch


def _examples(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def _has_tensor(mesh: Mesh) -> bool:
    return mesh.shape.get("tensor", 1) > 1


def _batch_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape)


def _shards(mesh: Mesh) -> int:
    """Parts into which examples are split."""
    return math.prod(mesh.shape[axis] for axis in _batch_axes(mesh))


def _splits(spec: PartitionSpec) -> list[tuple[int, str]]:
    """(dimension, mesh axis) in the order in which to scatter: fsdp's dimension first, as its links are the fast
    ones and leave less to send over data's; within a dimension from major to minor.
    """
    entries = [(dim, (entry,) if isinstance(entry, str) else entry or ()) for dim, entry in enumerate(spec)]
    return [(dim, axis) for dim, axes in sorted(entries, key=lambda e: "fsdp" not in e[1]) for axis in axes]
