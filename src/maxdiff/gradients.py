"""Loss and gradients of one optimizer step over a mesh: pure functions, reduced across devices once.

A batch is a dict of arrays whose first dimension is the examples of the global batch, split over the mesh
axes data and fsdp. `losses(params, constants, micro_batch) -> [b]` gives each example's loss; what is
differentiated is their mean over the global batch, so splitting it, over devices or micro-batches, changes
nothing but the order of a float32 sum. `constants` are what is not trained: frozen networks, the step's key.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff.models.network import Params

Batch = dict[str, jax.Array]
Losses = Callable[[Params, Any, Batch], jax.Array]
GradientFunction = Callable[[Params, Any, Batch], tuple[jax.Array, Params]]

# Mesh axes over which the examples of a batch are split.
BATCH_AXES = ("data", "fsdp")


def gradient_function(losses: Losses, mesh: Mesh, specs: Params, accumulation: int = 1) -> GradientFunction:
    """(params, constants, batch) -> (mean loss, its gradient, float32 and split as the parameters are).

    With a tensor axis of 1 every collective is written out, and gradients are reduced once a step. With more,
    XLA's partitioner places them, and reduces in every micro-batch; `losses` must then gather weights and
    constrain activations itself (`Compute.gather`, `Compute.constrain`), and must not otherwise. Constants
    lie whole on every device.

    Args:
        specs: the PartitionSpec of every parameter, as the parameter tree.
        accumulation: micro-batches in a batch, computed one after the other to save memory.

    Raises:
        ValueError: when called, for a batch that does not divide into devices and micro-batches.
    """
    if mesh.shape.get("tensor", 1) > 1:
        return _automatic(losses, mesh, specs, accumulation)
    return _manual(losses, mesh, specs, accumulation)


def _manual(losses: Losses, mesh: Mesh, specs: Params, accumulation: int) -> GradientFunction:
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)

    def gather(p: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = _fsdp_dim(spec)
        return p if dim is None else lax.all_gather(p, "fsdp", axis=dim, tiled=True)

    def reduce(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = _fsdp_dim(spec)
        if dim is None:
            return lax.psum(gradient, axes)
        gradient = lax.psum_scatter(gradient, "fsdp", scatter_dimension=dim, tiled=True)
        return lax.psum(gradient, "data") if "data" in axes else gradient

    def local(params: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        examples = _examples(batch) * math.prod(mesh.shape[axis] for axis in axes)
        weights = jax.tree.map(gather, params, specs)
        micro = {key: x.reshape(accumulation, -1, *x.shape[1:]) for key, x in batch.items()}
        loss, gradient = _accumulate(losses, weights, constants, micro)
        gradient = jax.tree.map(lambda g, spec: reduce(g, spec) / examples, gradient, specs)
        return lax.psum(loss, axes) / examples, gradient

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec(axes)),
        out_specs=(PartitionSpec(), specs),
        # The gradient is taken wholly inside, so no collective is differentiated and nothing is to be checked.
        check_vma=False,
    )
    return lambda params, constants, batch: mapped(params, constants, _checked(batch, mesh, axes, accumulation))


def _automatic(losses: Losses, mesh: Mesh, specs: Params, accumulation: int) -> GradientFunction:
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    shards = math.prod(mesh.shape[axis] for axis in axes)

    def split(x: jax.Array) -> jax.Array:
        # Each device's examples are cut in `accumulation` parts, so that none moves to another device.
        parts = x.reshape(shards, accumulation, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(accumulation, -1, *x.shape[1:])
        return lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, axes)))

    def whole(params: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        batch = _checked(batch, mesh, axes, accumulation)
        loss, gradient = _accumulate(losses, params, constants, {key: split(x) for key, x in batch.items()})
        examples = _examples(batch)
        stored = lambda g, spec: lax.with_sharding_constraint(g / examples, NamedSharding(mesh, spec))
        return loss / examples, jax.tree.map(stored, gradient, specs)

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


def _checked(batch: Batch, mesh: Mesh, axes: tuple[str, ...], accumulation: int) -> Batch:
    shards = math.prod(mesh.shape[axis] for axis in axes)
    examples = _examples(batch)
    if examples % (shards * accumulation):
        raise ValueError(
            f"a global batch of {examples} does not divide into {shards} devices ({' x '.join(axes)}) "
            f"and {accumulation} micro-batches"
        )
    return batch


def _examples(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def _fsdp_dim(spec: PartitionSpec) -> int | None:
    """The dimension that is split over fsdp."""
    for dim, entry in enumerate(spec):
        if entry == "fsdp" or (isinstance(entry, tuple) and "fsdp" in entry):
            return dim
    return None
