"""One optimizer step: a pure function of state, frozen weights and batch (see losses.py for what a batch is)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from maxdiff.gradients import Batch, GradientFunction
from maxdiff.models.network import Params
from maxdiff.optim import ema_decay, update_ema
from maxdiff.state import TrainState

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Params, Batch, jax.Array], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Ema:
    """The moving average of weights, as `optim.ema_decay` takes it."""

    decay: float = 0.9999
    warmup: bool = True
    start_step: int = 0


def make_train_step(
    gradients: GradientFunction, optimizer: optax.GradientTransformationExtraArgs, ema: Ema | None
) -> TrainStep:
    """train_step(state, constants, batch, seed_key) -> (state, metrics); jit it and donate the state.

    The step's randomness is fold_in(seed_key, state.step), so it is the same after any restart. Metrics are
    `loss` (the mean over the batch) and `grad_norm` (before clipping), float32 scalars that stay on the device.
    """

    def train_step(state: TrainState, constants: Params, batch: Batch, seed_key: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(seed_key, state.step)
        loss, gradient = gradients(state.params, {**constants, "key": key}, batch)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        step = state.step + 1
        average = state.ema
        if ema is not None and average is not None:
            average = update_ema(average, params, ema_decay(step, ema.decay, ema.warmup, ema.start_step))
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradient)}
        return TrainState(step, params, average, opt_state), metrics

    return train_step
