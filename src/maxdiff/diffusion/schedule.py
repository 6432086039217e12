"""The noise schedule: how much signal and how much noise each timestep holds.

A timestep's latents are x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise (Ho et al. 2020, eq. 4), and abar
is the whole schedule. Its values are diffusers' own, rounding of float32 included (equal to the bit, under
zero terminal SNR to 1e-6, as torch's square root is inexact), because a pretrained network knows no other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """A schedule of T timesteps; made by `noise_schedule`.

    Attributes:
        alphas_cumprod: abar, float32 [T]: the signal's share of the variance, falling with t.
        prediction_type: what the network predicts: epsilon (the noise), v_prediction or sample (x_0).
    """

    alphas_cumprod: np.ndarray
    prediction_type: str = "epsilon"

    def __post_init__(self):
        _check_member("prediction_type", self.prediction_type, PREDICTION_TYPES)
        assert self.alphas_cumprod.ndim == 1, self.alphas_cumprod.shape
        assert self.alphas_cumprod.dtype == np.float32, self.alphas_cumprod.dtype

    @property
    def num_timesteps(self) -> int:
        """T; timesteps are 0 to T - 1."""
        return len(self.alphas_cumprod)

    # Roots are taken on the host, where they round alike for every accelerator.
    @functools.cached_property
    def signal(self) -> np.ndarray:
        """sqrt(abar), float32 [T]: the factor of x_0 in x_t."""
        return np.sqrt(self.alphas_cumprod)

    @functools.cached_property
    def sigma(self) -> np.ndarray:
        """sqrt(1 - abar), float32 [T]: the factor of the noise in x_t."""
        return np.sqrt(np.float32(1) - self.alphas_cumprod)


def noise_schedule(config: Mapping[str, Any]) -> NoiseSchedule:
    """The schedule that a diffusers scheduler_config.json describes, with DDPMScheduler's defaults.

    Reads num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas, rescale_betas_zero_snr
    and prediction_type. The other keys of that file concern samplers.

    Raises:
        ValueError: for a value outside what is allowed, naming its key.
    """
    steps = config.get("num_train_timesteps", 1000)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 2:
        raise ValueError(f"num_train_timesteps={steps!r} must be an integer of at least 2")
    rescale = config.get("rescale_betas_zero_snr", False)
    if not isinstance(rescale, bool):
        raise ValueError(f"rescale_betas_zero_snr={rescale!r} must be true or false")
    trained = config.get("trained_betas")
    betas = _scheduled(config, steps) if trained is None else _trained(trained, steps)
    if rescale:
        betas = rescale_zero_terminal_snr(betas)
    return NoiseSchedule(_cumulative(betas), config.get("prediction_type", "epsilon"))


def add_noise(schedule: NoiseSchedule, x0: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
    """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise; x0 and noise are float32 [b h w c], t is int32 [b]."""
    return _of_image(schedule.signal, t) * x0 + _of_image(schedule.sigma, t) * noise


def velocity(schedule: NoiseSchedule, x0: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
    """v = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0 (Salimans & Ho 2022, appendix D) -> float32 [b h w c]."""
    return _of_image(schedule.signal, t) * noise - _of_image(schedule.sigma, t) * x0


def snr(schedule: NoiseSchedule, t: jax.Array) -> jax.Array:
    """abar_t / (1 - abar_t), float32 [b], for t int32 [b]; 0 at the last t of a zero-terminal-SNR schedule."""
    with np.errstate(divide="ignore"):  # a first beta of 0 means no noise at all: infinite
        table = schedule.alphas_cumprod / (np.float32(1) - schedule.alphas_cumprod)
    return jnp.asarray(table)[t]


def rescale_zero_terminal_snr(betas: np.ndarray) -> np.ndarray:
    """Betas float32 [T] shifted and scaled so that the last timestep is pure noise (Lin et al. 2023, algorithm 1).

    Raises:
        ValueError: if all of them are 0, so that there is no noise to scale.
    """
    root = np.sqrt(_cumulative(betas))
    first, last = root[0], root[-1]
    if first == last:
        raise ValueError("rescale_betas_zero_snr=True needs a schedule whose signal falls, and this one's is constant")
    root = (root - last) * (first / (first - last))
    abar = root**2
    # Back to betas, as diffusers does: the detour rounds, and its values are what checkpoints were trained on.
    return np.float32(1) - np.concatenate([abar[:1], abar[1:] / abar[:-1]])


def _of_image(table: np.ndarray, t: jax.Array) -> jax.Array:
    return jnp.asarray(table)[t][:, None, None, None]


def _cumulative(betas: np.ndarray) -> np.ndarray:
    # torch.cumprod on a CPU accumulates float32 in double.
    return np.cumprod(np.float32(1) - betas, dtype=np.float64).astype(np.float32)


def _linspace(start: float, end: float, steps: int) -> np.ndarray:
    # torch.linspace in float32: from both ends towards the middle, each product and sum rounded once (fused).
    first, last = np.float32(start), np.float32(end)
    step = np.float64((last - first) / np.float32(steps - 1))
    i = np.arange(steps)
    return np.where(i < steps // 2, first + step * i, last - step * (steps - 1 - i)).astype(np.float32)


def _linear(start: float, end: float, steps: int) -> np.ndarray:
    return _linspace(start, end, steps)


def _scaled_linear(start: float, end: float, steps: int) -> np.ndarray:
    """Stable Diffusion's own: linear in the root of beta."""
    return _linspace(start**0.5, end**0.5, steps) ** 2


def _squared_cosine(_start: float, _end: float, steps: int) -> np.ndarray:
    """abar(t) = cos^2((t / T + s) / (1 + s) pi / 2), s = 0.008, betas at most 0.999 (Nichol & Dhariwal 2021, eq. 17)."""
    abar = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    return np.array([min(1 - abar[i + 1] / abar[i], 0.999) for i in range(steps)], np.float32)


BETA_SCHEDULES: dict[str, Callable[[float, float, int], np.ndarray]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _squared_cosine,
}


def _scheduled(config: Mapping[str, Any], steps: int) -> np.ndarray:
    name = config.get("beta_schedule", "linear")
    _check_member("beta_schedule", name, BETA_SCHEDULES)
    ends = {"beta_start": config.get("beta_start", 0.0001), "beta_end": config.get("beta_end", 0.02)}
    for key, value in ends.items():
        if not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(f"{key}={value!r} must be a number between 0 and 1, both excluded")
    return BETA_SCHEDULES[name](ends["beta_start"], ends["beta_end"], steps)


def _trained(values: Any, steps: int) -> np.ndarray:
    betas = np.asarray(values, np.float32)
    if betas.shape != (steps,):
        raise ValueError(f"trained_betas of shape {list(betas.shape)} must have num_train_timesteps={steps} entries")
    if not ((betas >= 0) & (betas <= 1)).all():
        raise ValueError(f"trained_betas from {betas.min()} to {betas.max()} must all lie in [0, 1]")
    return betas


def _check_member(key: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key}={value!r} is unknown; allowed: {', '.join(allowed)}")
