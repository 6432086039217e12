"""What the network is asked to predict: noisy latents, targets and weights of a batch.

Everything random about an example comes from (step key, its position in the global batch, purpose), never
from the device, host or micro-batch that computes it. So a batch may be split in any way, and values stay the
same to the bit.
"""

import dataclasses
import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.diffusion.schedule import NoiseSchedule, add_noise, snr, velocity


class Purpose(enum.IntEnum):
    """What a draw is for. A number, once used, keeps its meaning: changing one changes every run's noise."""

    NOISE = 0
    TIMESTEP = 1
    NOISE_OFFSET = 2
    INPUT_PERTURBATION = 3
    CAPTION_DROPOUT = 4
    VAE_SAMPLE = 5
    INITIAL_LATENTS = 6
    SAMPLER_STEP = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """How latents become a training problem.

    Attributes:
        snr_gamma: min-SNR weighting (Hang et al. 2023); None or <= 0 weighs all timesteps alike.
        noise_offset: standard deviation of a shift of the noise, one per image and channel
            (https://www.crosslabs.org/blog/diffusion-with-offset-noise); 0.05 to 0.1 is usual.
        input_perturbation: standard deviation of noise that enters the input but not the target
            (Ning et al. 2023, arXiv 2301.11706, recommend 0.1).
        caption_dropout: probability that an example trains without its caption, for classifier-free guidance.
        timestep_probabilities: float [T] from `timestep_probabilities`; None draws all timesteps alike.
    """

    snr_gamma: float | None = None
    noise_offset: float = 0.0
    input_perturbation: float = 0.0
    caption_dropout: float = 0.0
    timestep_probabilities: np.ndarray | None = None

    def __post_init__(self):
        if self.snr_gamma is not None and not math.isfinite(self.snr_gamma):
            raise ValueError(f"snr_gamma={self.snr_gamma} must be finite; null or 0 turns it off")
        for key in ("noise_offset", "input_perturbation"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key}={getattr(self, key)} must be 0 (off) or more, and finite")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout={self.caption_dropout} must lie in [0, 1]")


class NoisyBatch(NamedTuple):
    """What one step trains on: noisy latents [b h w c], timesteps t int32 [b], target [b h w c], weight [b]."""

    noisy: jax.Array
    t: jax.Array
    target: jax.Array
    weight: jax.Array


def noisy_batch(
    objective: Objective,
    schedule: NoiseSchedule,
    x0: jax.Array,
    step_key: jax.Array,
    positions: jax.Array,
    t: jax.Array | None = None,
) -> NoisyBatch:
    """Noise the latents x0 [b h w c] of the examples at `positions` (int32 [b]) of the global batch; all float32.

    Args:
        t: the timestep of all of them, int32 []; by default each draws its own.

    Raises:
        ValueError: if step_key is not threefry, or the objective was made for another number of timesteps.
    """
    x0 = x0.astype(jnp.float32)
    drawn = draw_timesteps(objective, schedule, step_key, positions)
    t = drawn if t is None else jnp.full_like(drawn, t)
    noise = _normal(step_key, positions, Purpose.NOISE, x0.shape[1:])
    if objective.noise_offset:
        shift = _normal(step_key, positions, Purpose.NOISE_OFFSET, (1, 1, x0.shape[-1]))
        noise = noise + objective.noise_offset * shift
    seen = noise
    if objective.input_perturbation:
        extra = _normal(step_key, positions, Purpose.INPUT_PERTURBATION, x0.shape[1:])
        seen = noise + objective.input_perturbation * extra
    return NoisyBatch(
        noisy=add_noise(schedule, x0, seen, t),
        t=t,
        target=target(schedule, x0, noise, t),
        weight=loss_weight(schedule, t, objective.snr_gamma),
    )


def target(schedule: NoiseSchedule, x0: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
    """What the network should answer, float32 [b h w c], by the schedule's prediction_type."""
    match schedule.prediction_type:
        case "epsilon":
            return noise
        case "v_prediction":
            return velocity(schedule, x0, noise, t)
        case _:
            return x0


def loss_weight(schedule: NoiseSchedule, t: jax.Array, snr_gamma: float | None) -> jax.Array:
    """Min-SNR weights, float32 [b] (Hang et al. 2023, arXiv 2303.09556, section 3.4); ones without a gamma.

    The weight of an error in x_0 is min(snr, gamma). The same error seen in epsilon is snr times as large, in v
    snr + 1 times, and is divided by that. At snr = 0 epsilon's quotient is taken at its limit, 1.
    """
    if snr_gamma is None or snr_gamma <= 0:
        return jnp.ones(t.shape, jnp.float32)
    ratio = snr(schedule, t)
    match schedule.prediction_type:
        case "epsilon":
            return jnp.minimum(1.0, snr_gamma / ratio)  # min(snr, gamma) / snr, without 0 / 0
        case "v_prediction":
            return jnp.minimum(ratio, snr_gamma) / (ratio + 1)
        case _:
            return jnp.minimum(ratio, snr_gamma)


def mean_loss(prediction: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted mean squared error of each example, float32 [b], from [b h w c] twice and [b]."""
    error = prediction.astype(jnp.float32) - target
    return weight * jnp.square(error).mean((1, 2, 3))


def timestep_probabilities(
    num_timesteps: int, strategy: str, multiplier: float, begin: int, end: int, portion: float
) -> np.ndarray | None:
    """Probability of each timestep, float64 [num_timesteps]; None for strategy none, where all are alike.

    As in diffusers' train_text_to_image_sdxl.py, `multiplier` makes some timesteps that much likelier than the
    rest: earlier, the first `portion` of them (the least noisy); later, the last `portion`; range, [begin, end).

    Raises:
        ValueError: naming the key (timestep_bias_...), its value and what is allowed.
    """
    if strategy == "none":
        return None
    if strategy not in ("earlier", "later", "range"):
        raise ValueError(f"timestep_bias_strategy={strategy!r} is unknown; allowed: none, earlier, later, range")
    if not 0 < multiplier < math.inf:
        raise ValueError(f"timestep_bias_multiplier={multiplier} must be above 0 (strategy none turns the bias off)")
    if strategy == "range":
        if not 0 <= begin < end <= num_timesteps:
            raise ValueError(
                f"timestep_bias_begin={begin}, timestep_bias_end={end} must satisfy 0 <= begin < end <= {num_timesteps}"
            )
    else:
        if not 0 < portion <= 1 or not (count := int(portion * num_timesteps)):
            raise ValueError(f"timestep_bias_portion={portion} must lie in (0, 1] and cover one of {num_timesteps} timesteps")
        begin, end = (0, count) if strategy == "earlier" else (num_timesteps - count, num_timesteps)
    weights = np.ones(num_timesteps)
    weights[begin:end] *= multiplier
    return weights / weights.sum()


def draw_timesteps(objective: Objective, schedule: NoiseSchedule, step_key: jax.Array, positions: jax.Array) -> jax.Array:
    """Timesteps int32 [b] of the examples at `positions`.

    Raises:
        ValueError: if the objective's probabilities are for another number of timesteps than the schedule's.
    """
    keys = purpose_keys(step_key, positions, Purpose.TIMESTEP)
    probabilities = objective.timestep_probabilities
    if probabilities is None:
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, schedule.num_timesteps))(keys)
    if probabilities.shape != (schedule.num_timesteps,):
        raise ValueError(
            f"timestep_probabilities has shape {list(probabilities.shape)}, but the schedule {schedule.num_timesteps} timesteps"
        )
    # Inverse transform sampling. Without the last entry, 1, so that no rounding leads past the last timestep.
    cumulative = jnp.asarray(np.cumsum(probabilities)[:-1], jnp.float32)
    uniform = jax.vmap(jax.random.uniform)(keys)
    return (cumulative[None, :] <= uniform[:, None]).sum(1, dtype=jnp.int32)


def drop_caption(objective: Objective, step_key: jax.Array, positions: jax.Array) -> jax.Array:
    """Whether each example trains without its caption, bool [b], true with probability caption_dropout."""
    keys = purpose_keys(step_key, positions, Purpose.CAPTION_DROPOUT)
    return jax.vmap(jax.random.uniform)(keys) < objective.caption_dropout


def vae_noise(step_key: jax.Array, positions: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal float32 [b *shape] with which the autoencoder's posterior is sampled; shape is one latent's."""
    return _normal(step_key, positions, Purpose.VAE_SAMPLE, shape)


def example_keys(step_key: jax.Array, positions: jax.Array) -> jax.Array:
    """One key for each position (int32 [b]) of the global batch, from the key of the step.

    Raises:
        ValueError: unless the key is a threefry key (jax.random.key): under vmap, rbg's draws depend on the batch.
    """
    if not jnp.issubdtype(step_key.dtype, jax.dtypes.prng_key) or str(jax.random.key_impl(step_key)) != "threefry2x32":
        raise ValueError(f"step_key of dtype {step_key.dtype} must be jax.random.key(seed, impl='threefry2x32')")
    return jax.vmap(lambda position: jax.random.fold_in(step_key, position))(positions)


def purpose_keys(step_key: jax.Array, positions: jax.Array, purpose: Purpose) -> jax.Array:
    """One key for each position, for one purpose."""
    return jax.vmap(lambda key: jax.random.fold_in(key, int(purpose)))(example_keys(step_key, positions))


def _normal(step_key: jax.Array, positions: jax.Array, purpose: Purpose, shape: tuple[int, ...]) -> jax.Array:
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(purpose_keys(step_key, positions, purpose))
