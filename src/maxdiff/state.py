"""What training changes: parameters, their moving average, the optimizer's moments, the step, the run's health."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxdiff.health import Health, healthy
from maxdiff.models.network import Params
from maxdiff.sharding import bytes_a_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A tree of arrays, donated to each step and saved as it is.

    Attributes:
        step: optimizer steps made, int32; those whose update was skipped count.
        params: the trained networks' parameters by part, {"unet": ..., "text_encoder": ...}.
        ema: their moving average, of the same form and float32; None without.
        opt_state: optax's.
        health: batches drawn, steps skipped, see `Health`.
    """

    step: jax.Array
    params: Params
    ema: Params | None
    opt_state: Any
    health: Health


def make_state(params: Params, optimizer: optax.GradientTransformation, *, use_ema: bool) -> TrainState:
    """The state before the first step; the average begins as the parameters, in float32. Jit it with `state_shardings`."""
    # A buffer of its own, as the state is donated; in bfloat16 a decay of 0.9999 would be 1.
    ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params) if use_ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, ema, optimizer.init(params), healthy())


def abstract_state(
    make: Callable[[], TrainState],
    optimizer: optax.GradientTransformation,
    shardings: Params,
    updates: Params | None = None,
) -> TrainState:
    """The state as jax.ShapeDtypeStructs with shardings, without computing it.

    Moments and average lie as their parameters do, or as their updates; moments of another shape (Adafactor's,
    which are small) lie whole on every device. Left to itself XLA would put them all on one device.

    Args:
        make: gives the state; only traced.
        shardings: the NamedSharding of every parameter.
        updates: the NamedSharding of every parameter's update, where it is sharded further (`ShardedUpdate`).
    """
    updates = shardings if updates is None else updates
    shapes = jax.eval_shape(make)
    mesh = next(iter(jax.tree.leaves(shardings))).mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    moments = optax.tree.map_params(
        optimizer,
        lambda moment, sharding, param: sharding if moment.shape == param.shape else replicated,
        shapes.opt_state,
        updates,
        shapes.params,
        transform_non_params=lambda _: replicated,
    )
    health = jax.tree.map(lambda _: replicated, shapes.health)
    placed = TrainState(replicated, shardings, updates if shapes.ema is not None else None, moments, health)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, placed)


def describe(state: TrainState) -> list[str]:
    """What parameters, average and optimizer take, in all and on a device, of a state or an abstract one."""
    lines = []
    for name, tree in (("parameters", state.params), ("average", state.ema), ("optimizer", state.opt_state)):
        leaves = jax.tree.leaves(tree)
        if not leaves:
            continue
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        share = sum(map(bytes_a_device, leaves))
        lines.append(f"{name}: {whole / 2**20:.1f} MiB, {share / 2**20:.1f} MiB a device")
    return lines


def state_shardings(abstract: TrainState) -> TrainState:
    """The shardings of an abstract state, for `out_shardings`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
