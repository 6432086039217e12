"""One optimizer step: a pure function of state, frozen weights and batch (see losses.py for what a batch is)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from maxdiff import torus
from maxdiff.gradients import Batch, GradientFunction
from maxdiff.health import Guard, after_batch, is_good
from maxdiff.models.network import Params
from maxdiff.optim import apply_updates, ema_decay, update_ema
from maxdiff.sharding import mesh_axes
from maxdiff.state import TrainState

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Params, Batch, jax.Array], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Ema:
    """The moving average of weights, as `optim.ema_decay` takes it."""

    decay: float = 0.9999
    warmup: bool = True
    start_step: int = 0


@dataclasses.dataclass(frozen=True)
class ShardedUpdate:
    """Each device updates a part of what it stores, ZeRO's first stage (Rajbhandari et al. 2020).

    Attributes:
        stored: the NamedSharding of every parameter between steps.
        updates: that of its gradient, moments and average: `stored`, and split over data besides
            (`Layout.update_shardings`). Gradients are to come split so (`gradient_function`'s update_specs).
    """

    stored: Params
    updates: Params

    def gather(self, params: Params) -> Params:
        """From `updates` to `stored`."""
        mesh = jax.tree.leaves(self.stored)[0].mesh
        if not torus.on_tpu(mesh):
            return lax.with_sharding_constraint(params, self.stored)
        of = lambda shardings: jax.tree.map(lambda sharding: sharding.spec, shardings)
        pairs = zip(*(jax.tree.leaves(of(shardings)) for shardings in (self.stored, self.updates)), strict=True)
        dims = {i: dim for i, (stored, updates) in enumerate(pairs) if updates != stored
                for dim, entry in enumerate(updates) if "data" in mesh_axes(entry)}  # fmt: skip

        def local(params: Params) -> Params:
            leaves, tree = jax.tree.flatten(params)
            gathered = torus.all_gather([leaves[i] for i in dims], mesh, "data", list(dims.values()))
            for i, leaf in zip(dims, gathered, strict=True):
                leaves[i] = leaf
            return tree.unflatten(leaves)

        return jax.shard_map(local, mesh=mesh, in_specs=(of(self.updates),), out_specs=of(self.stored), check_vma=False)(params)


def make_train_step(
    gradients: GradientFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    ema: Ema | None,
    sharded: ShardedUpdate | None = None,
    guard: Guard | None = None,
    norm_of: Callable[[Params], jax.Array] = optax.tree.norm,
) -> TrainStep:
    """train_step(state, constants, batch, seed_key) -> (state, metrics); jit it and donate the state.

    The step's randomness is fold_in(seed_key, number of the batch), so it is the same after any restart. Metrics are
    `loss` (the mean over the batch) and `grad_norm` (before clipping), float32 scalars that stay on the device, and
    of the new state's health `skipped_steps` and `bad_batch`. Where loss or norm is not finite, the step and the batch
    count, and nothing else of the state changes.
    With `sharded` the new parameters are gathered once, at the end; without, every device of the data axis
    makes the same update. `norm_of` gives the norm of a gradient (`gradients.norm_function`).
    """

    def train_step(state: TrainState, constants: Params, batch: Batch, seed_key: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(seed_key, state.health.batch)
        loss, gradient = gradients(state.params, {**constants, "key": key}, batch)
        # A slice of what each device has: nothing is sent.
        params: Any = state.params if sharded is None else lax.with_sharding_constraint(state.params, sharded.updates)
        norm = norm_of(gradient)
        good = is_good(loss, norm)
        updates, opt_state = optimizer.update(gradient, state.opt_state, params, norm=norm)
        step = state.step + 1
        # Chosen element by element, in the pass that makes the update.
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
        params = choose(apply_updates(params, updates, step), params)
        average = state.ema
        if ema is not None and average is not None:
            average = choose(update_ema(average, params, ema_decay(step, ema.decay, ema.warmup, ema.start_step)), average)
        if sharded is not None:
            # Chosen first, then gathered: else the old ones would be gathered too.
            params = sharded.gather(lax.with_sharding_constraint(params, sharded.updates))
        health = after_batch(state.health, guard or Guard(), loss, good)
        metrics = {"loss": loss, "grad_norm": norm, "skipped_steps": health.skipped, "bad_batch": health.bad_batch}
        return TrainState(step, params, average, choose(opt_state, state.opt_state), health), metrics

    return train_step
