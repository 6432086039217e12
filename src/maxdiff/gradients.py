"""Sums over a batch on a mesh: loss and gradients of a training step, or measures of held-out examples.

Pure functions, reduced across devices once.

A batch is a dict of arrays whose first dimension is the examples of the global batch, split over the mesh
axes data and fsdp. `losses(params, constants, micro_batch) -> [b]` gives each example's loss; what is
differentiated is their mean over the global batch, so splitting it, over devices or micro-batches, changes
nothing but the order of a float32 sum. `constants` are what is not trained: frozen networks, the step's key.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff.models.network import Params
from maxdiff.sharding import mesh_axes
from maxdiff.torus import all_gather, crosses_slices, on_tpu, psum_scatter

Batch = dict[str, jax.Array]
Losses = Callable[[Params, Any, Batch], jax.Array]
GradientFunction = Callable[[Params, Any, Batch], tuple[jax.Array, Params]]
Measures = Callable[[Params, Any, Batch], dict[str, jax.Array]]
SumsFunction = Callable[[Params, Any, Batch], dict[str, jax.Array]]

# Mesh axes over which the examples of a batch are split.
BATCH_AXES = ("data", "fsdp")
# Gradients of so many numbers or fewer are small: biases, and scales of norms.
SMALL = 2**14
# Into so many parts larger ones are cut for their norm, to keep a whole GPU busy.
PARTS = 1024


def gradient_function(
    losses: Losses, mesh: Mesh, specs: Params, accumulation: int = 1, update_specs: Params | None = None,
    dtype: Any = None, turned: Callable[[jax.Array], jax.Array] | None = None,
) -> GradientFunction:  # fmt: skip
    """(params, constants, batch) -> (mean loss, its gradient, float32 and split by `update_specs`).

    Every collective over data and fsdp is written out: weights are gathered, and gradients reduced, once a step. What a tensor
    axis splits within a network is left to XLA's partitioner; networks guide it by constraining activations
    (`Compute.constrain`). Constants lie whole on every device.

    Args:
        specs: the PartitionSpec of every parameter, as the parameter tree.
        accumulation: micro-batches in a batch, computed one after the other to save memory.
        update_specs: the PartitionSpec of every parameter's gradient; by default that of the parameter.
        dtype: in which networks use parameters of two dimensions or more: in it they are gathered, if it is smaller; vectors,
            those of norms among them, stay what they are.
        turned: copies a gradient [... c] into its parameter's layout from one with c outermost (`fused.turned`), which on GPUs
            those of convolutions have, and those that were scattered along c last. By default XLA does so in the update.

    Raises:
        ValueError: when called, for a batch that does not divide into devices and micro-batches.
    """
    split = specs if update_specs is None else update_specs
    axes = _batch_axes(mesh)
    stored, splits = ([_splits(spec, axes) for spec in jax.tree.leaves(tree)] for tree in (specs, split))
    several = {axis for axis in axes if mesh.shape[axis] > 1}  # XLA does not leave out a sum over one device

    def mean(examples: int, gradients: Params) -> Params:
        leaves, tree = jax.tree.flatten(gradients)
        leaves = _scattered(leaves, splits, mesh, axes)
        if turned is not None:
            last = lambda g, spread, given: g.ndim > 1 and spread and given[-1][0] == g.ndim - 1
            leaves = [turned(g) if last(g, *ways) else g for g, *ways in zip(leaves, stored, splits, strict=True)]
        return tree.unflatten(_mean(leaves, splits, several, examples, joined=not on_tpu(mesh)))

    def finished(gradients: Params) -> Params:
        leaves, tree = jax.tree.flatten(gradients)
        if turned is not None:  # what XLA is to scatter along its last dimension it would have to turn back
            leaves = [turned(g) if g.ndim == 4 and not spread else g for g, spread in zip(leaves, stored, strict=True)]
        return tree.unflatten([g.astype(jnp.float32) for g in leaves])

    def local(weights: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        examples = _examples(batch) * _shards(mesh)
        if turned is not None:  # in `dtype` their gradients are half as much to turn
            leaves, tree = jax.tree.flatten(weights)
            weights = tree.unflatten(_cast(leaves, [p.ndim == 4 for p in leaves], dtype))
        micro = {key: x.reshape(accumulation, -1, *x.shape[1:]) for key, x in batch.items()}
        loss, gradient = _accumulate(losses, weights, constants, micro, lambda tree: _laid(tree, specs, mesh), finished)
        reduced = _on_tensor_axis(functools.partial(mean, examples), mesh, specs, split)
        return lax.psum(loss, axes) / examples, reduced(gradient)

    mapped = _on_each_device(local, mesh, specs, (PartitionSpec(), split), dtype)

    def function(params: Params, constants: Any, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradient = mapped(params, constants, _checked(batch, mesh, accumulation))
        if _has_tensor(mesh):  # else they lie so already
            gradient = jax.tree.map(lambda g, s: lax.with_sharding_constraint(g, NamedSharding(mesh, s)), gradient, split)
        return loss, gradient

    return function


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

    function = _on_each_device(local, mesh, specs, PartitionSpec())
    return lambda params, constants, batch: function(params, constants, _checked(batch, mesh))


def norm_function(mesh: Mesh, specs: Params) -> Callable[[Params], jax.Array]:
    """gradient, split by `specs` -> its norm over all leaves, a float32 scalar that every device has."""
    if on_tpu(mesh):  # which lay arrays out in tiles, so that reshaping moves them
        return optax.tree.norm

    def local(gradient: Params) -> jax.Array:
        found: dict[tuple[str, ...], list[jax.Array]] = {}
        for leaf, spec in zip(jax.tree.leaves(gradient), jax.tree.leaves(specs), strict=True):
            axes = tuple(axis for entry in spec for axis in mesh_axes(entry) if mesh.shape[axis] > 1)
            # The leaf itself, or the norms of parts of it.
            rows = leaf if leaf.size <= SMALL else jnp.linalg.norm(leaf.reshape(math.gcd(leaf.size, PARTS), -1), axis=1)
            found.setdefault(axes, []).append(rows)
        sums = {axes: jnp.sum(jnp.square(_join(rows))) for axes, rows in found.items()}
        return jnp.sqrt(sum(_sum(x, axes) for axes, x in sums.items()))

    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)


def outputs_function(
    function: Callable[[Params, Any, Batch], jax.Array], mesh: Mesh, specs: Params
) -> Callable[..., jax.Array]:
    """(params, constants, batch) -> what `function` makes of each example, [b ...], split as the batch is.

    Otherwise as `gradient_function`, without a gradient.
    """
    mapped = _on_each_device(function, mesh, specs, PartitionSpec(_batch_axes(mesh)))
    return lambda params, constants, batch: mapped(params, constants, _checked(batch, mesh))


def _counted_sums(measures: dict[str, jax.Array], counted: jax.Array) -> dict[str, jax.Array]:
    assert all(x.shape == counted.shape for x in measures.values()), jax.tree.map(jnp.shape, measures)
    # Not a product alone: 0 * NaN is NaN.
    return {name: jnp.sum(jnp.where(counted > 0, x.astype(jnp.float32) * counted, 0.0)) for name, x in measures.items()}


def _on_each_device(
    local: Callable[..., Any], mesh: Mesh, specs: Params, out_specs: Any, dtype: Any = None
) -> Callable[..., Any]:
    """`local(weights, constants, batch)` with the device's own examples, and weights that nothing splits but a tensor axis.

    What that axis splits, weights, `out_specs` and activations, is the partitioner's within `local`.
    """
    axes = _batch_axes(mesh)

    def gather(params: Params) -> Params:
        leaves, tree = jax.tree.flatten(params)
        splits = [_splits(spec, axes) for spec in jax.tree.leaves(specs)]
        leaves = _cast(leaves, splits, dtype)
        for axis, dims in reversed(_turns(splits, axes)):
            if crosses_slices(mesh, axis):  # within a slice TPUs have an operation for them as they are
                gathered = all_gather([leaves[i] for i in dims], mesh, axis, list(dims.values()))
            else:
                gathered = [lax.all_gather(leaves[i], axis, axis=dim, tiled=True) for i, dim in dims.items()]
            for i, leaf in zip(dims, gathered, strict=True):
                leaves[i] = leaf
        return tree.unflatten(leaves)

    whole = _on_tensor_axis(gather, mesh, specs, specs)
    return jax.shard_map(
        lambda params, constants, batch: local(whole(params), constants, batch),
        mesh=mesh,
        in_specs=(_only(specs, axes), PartitionSpec(), PartitionSpec(axes)),
        out_specs=_only(out_specs, axes),
        # Of a tensor axis of 1 too: the partitioner refuses Pallas kernels wherever it has an axis.
        axis_names={*axes} if _has_tensor(mesh) else {*mesh.axis_names},
        # Gradients are taken wholly inside, so no collective is differentiated and nothing is to be checked.
        check_vma=False,
    )


def _scattered(
    leaves: Sequence[jax.Array], splits: Sequence[Sequence[tuple[int, str]]], mesh: Mesh, axes: Sequence[str]
) -> list[jax.Array]:
    """The part of each leaf's sum that a device keeps, over the axes that split it."""
    found = list(leaves)
    for axis, dims in _turns(splits, axes):
        scattered = psum_scatter([found[i] for i in dims], mesh, axis, list(dims.values()))
        for i, leaf in zip(dims, scattered, strict=True):
            found[i] = leaf
    return found


def _mean(
    leaves: Sequence[jax.Array], splits: Sequence[Sequence[tuple[int, str]]], axes: AbstractSet[str], examples: int, *,
    joined: bool,
) -> list[jax.Array]:  # fmt: skip
    """Leaves summed over those of the axes that do not split them, over examples; small ones in one vector if `joined`."""
    found = list(leaves)
    small = [i for i, leaf in enumerate(leaves) if joined and not splits[i] and leaf.size <= SMALL]
    for i in {*range(len(leaves))}.difference(small):
        found[i] = _sum(leaves[i], axes - {axis for _, axis in splits[i]}) / examples
    if small:
        alone = [leaves[i] for i in small]
        for i, leaf in zip(small, _part(_sum(_join(alone), axes) / examples, alone), strict=True):
            found[i] = leaf
    return found


def _sum(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """The sum over these mesh axes, none perhaps."""
    return lax.psum(x, sorted(axes)) if axes else x


def _join(leaves: Sequence[jax.Array]) -> jax.Array:
    """All numbers of these arrays in one vector.

    Hundreds of small arrays, each treated alone, are hundreds of kernels on a GPU, which take longer to launch than to run.
    Of the parts of one vector XLA treats those of one shape together.
    """
    # A barrier, as XLA would undo the joining.
    return lax.optimization_barrier(jnp.concatenate([leaf.ravel() for leaf in leaves]))


def _part(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """What `_join` joined, in arrays of these shapes."""
    ends = itertools.accumulate(leaf.size for leaf in like)
    return [vector[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(like, ends, strict=True)]


def _cast(leaves: Sequence[jax.Array], which: Sequence[Any], dtype: Any) -> list[jax.Array]:
    """Those of them that have two dimensions or more in `dtype`, if that is smaller; all others as they are."""
    smaller = lambda p: dtype is not None and p.ndim > 1 and jnp.dtype(dtype).itemsize < p.dtype.itemsize
    return [p.astype(dtype) if wanted and smaller(p) else p for p, wanted in zip(leaves, which, strict=True)]


def _turns(splits: Sequence[Sequence[tuple[int, str]]], axes: Sequence[str]) -> list[tuple[str, dict[int, int]]]:
    """(mesh axis, {leaf: dimension}) in order: all leaves that go over an axis at once, each one's splits one after another."""
    found = []
    for turn, axis in itertools.product(range(max(map(len, splits), default=0)), axes):
        if dims := {i: given[turn][0] for i, given in enumerate(splits) if len(given) > turn and given[turn][1] == axis}:
            found.append((axis, dims))
    return found


def _on_tensor_axis(
    function: Callable[[Params], Params], mesh: Mesh, specs: Params, out_specs: Params
) -> Callable[[Params], Params]:
    """`function` of each device's own part along the tensor axis, within `_on_each_device`: what it sends is written out."""
    if not _has_tensor(mesh):
        return function
    axes = ("tensor",)
    return lambda tree: jax.shard_map(
        function, mesh=jax.sharding.get_abstract_mesh(), in_specs=(_only(specs, axes),), out_specs=_only(out_specs, axes),
        axis_names={*axes}, check_vma=False,
    )(tree)  # fmt: skip


def _laid(tree: Params, specs: Params, mesh: Mesh) -> Params:
    """Weights or gradients split over the tensor axis as `specs` say: else the partitioner may choose, for activations too."""
    if not _has_tensor(mesh):
        return tree
    here = jax.sharding.get_abstract_mesh()
    put = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(here, spec))
    return jax.tree.map(put, tree, _only(specs, ("tensor",)))


def _only(specs: Any, axes: Sequence[str]) -> Any:
    """Of PartitionSpecs what concerns these mesh axes."""

    def one(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(tuple(axis for axis in mesh_axes(entry) if axis in axes) or None for entry in spec))

    return jax.tree.map(one, specs)


def _accumulate(
    losses: Losses, params: Params, constants: Any, micro: Batch, lay: Callable[[Params], Params],
    finished: Callable[[Params], Params],
) -> tuple[jax.Array, Params]:  # fmt: skip
    """Sum of all losses and its gradient, in float32; `micro` is [micro-batches b ...].

    Args:
        lay: says how weights and gradients are split.
        finished: makes a micro-batch's gradient float32.
    """

    def total(params: Params, batch: Batch) -> jax.Array:
        return jnp.sum(losses(lay(params), constants, batch).astype(jnp.float32))

    def body(sums: Any, batch: Batch) -> tuple[Any, None]:
        loss, gradient = jax.value_and_grad(total)(params, batch)
        return jax.tree.map(jnp.add, sums, (loss, finished(gradient))), None

    if next(iter(micro.values())).shape[0] == 1:
        loss, gradient = jax.value_and_grad(total)(params, {key: x[0] for key, x in micro.items()})
        return loss, finished(gradient)
    zeros = lay(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    return lax.scan(body, (jnp.zeros(()), zeros), micro)[0]


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


def _splits(spec: PartitionSpec, axes: Sequence[str]) -> list[tuple[int, str]]:
    """(dimension, mesh axis), of these axes, in the order in which to scatter: fsdp's dimension first, as its links are the
    fast ones and leave less to send over data's; within a dimension from major to minor.
    """
    entries = [(dim, mesh_axes(entry)) for dim, entry in enumerate(spec)]
    ordered = [(dim, axis) for dim, names in sorted(entries, key=lambda e: "fsdp" not in e[1]) for axis in names]
    return [(dim, axis) for dim, axis in ordered if axis in axes]
