"""Bad steps: which updates are skipped, and when a run is to go back; scalars on the devices that no step waits for."""

import dataclasses

import jax
import jax.numpy as jnp

# How much of the running mean of the loss the step before keeps: about the last hundred steps count.
MEAN_DECAY = 0.99
# Batches before the mean is good enough to judge by.
WARM_UP = 20


@dataclasses.dataclass(frozen=True)
class Guard:
    """What counts as bad.

    Attributes:
        max_skipped_steps: the run goes back after more skipped updates in a row than this.
        max_loss_spike: and when a batch's loss is more than this times the running mean, after WARM_UP batches; 0: never
            for that.
    """

    max_skipped_steps: int = 10
    max_loss_spike: float = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Health:
    """What a run has been through; part of its state, so that a restart goes on with it.

    Attributes:
        batch: batches drawn, int32: the step number, and ahead of it where batches were passed over.
        skipped: updates skipped in all, int32.
        in_a_row: of these the last ones, int32.
        usual_loss: running mean of the losses of good steps, float32; NaN before the first.
        bad_batch: the first batch for which the run is to go back, int32; -1 for none.
        rollbacks: how often the run went back, int32.
    """

    batch: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    usual_loss: jax.Array
    bad_batch: jax.Array
    rollbacks: jax.Array


def healthy() -> Health:
    """That of a run that begins."""
    # Each a buffer of its own, as the state is donated.
    zero = lambda: jnp.zeros((), jnp.int32)
    return Health(zero(), zero(), zero(), jnp.full((), jnp.nan, jnp.float32), jnp.full((), -1, jnp.int32), zero())


def is_good(loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Whether an update may be made: bool scalar, the same on all devices."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def after_batch(health: Health, guard: Guard, loss: jax.Array, good: jax.Array) -> Health:
    """The health after the batch `health.batch`.

    A spike is judged against the mean before it. What is once bad stays so: the loop looks at log steps only.
    """
    in_a_row = jnp.where(good, 0, health.in_a_row + 1)
    spiked = jnp.zeros((), bool)
    if guard.max_loss_spike:
        spiked = good & (health.batch >= WARM_UP) & (loss > guard.max_loss_spike * health.usual_loss)  # never of NaN
    first = jnp.where(spiked, health.batch, health.batch - in_a_row + 1)
    bad = jnp.where(spiked | (in_a_row > guard.max_skipped_steps), first, -1)
    mean = jnp.where(jnp.isnan(health.usual_loss), loss, MEAN_DECAY * health.usual_loss + (1 - MEAN_DECAY) * loss)
    return Health(
        health.batch + 1,
        health.skipped + 1 - good.astype(jnp.int32),
        in_a_row,
        jnp.where(good & ~spiked, mean, health.usual_loss),
        jnp.where(health.bad_batch >= 0, health.bad_batch, bad),
        health.rollbacks,
    )
