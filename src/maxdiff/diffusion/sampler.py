"""Samplers: from noise to latents, pure functions named after the paper's algorithm.

Three things stay apart. The network, with its text and its guidance, is a function `denoise`, handed in; what its
answer means is the schedule's prediction_type (`split_answer`); a sampler walks timesteps, and knows neither.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxdiff.diffusion.schedule import NoiseSchedule

# (x_t float32 [b h w c], t int32 []) -> the network's answer [b h w c].
Denoise = Callable[[jax.Array, jax.Array], jax.Array]
Condition = TypeVar("Condition")

SPACINGS = ("leading", "trailing", "linspace")


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """What a scheduler_config.json says of sampling; made by `sampler_config`.

    Attributes:
        timestep_spacing: how timesteps are chosen: see `timesteps`.
        steps_offset: added to each timestep of `leading`.
        set_alpha_to_one: whether the last step goes to abar = 1, no noise at all, or to timestep 0.
        clip_sample_range: x_0 is clipped to within plus and minus this at each step; None clips nothing.
    """

    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    clip_sample_range: float | None = None


def sampler_config(config: Mapping[str, Any]) -> SamplerConfig:
    """What a diffusers scheduler_config.json says of sampling, with DDIMScheduler's defaults but one.

    clip_sample is off unless the file turns it on: schedulers that don't clip leave the key out, and latents, unlike
    pixels, lie beyond [-1, 1].

    Raises:
        ValueError: for a value outside what is allowed, naming its key.
    """
    spacing = config.get("timestep_spacing", "leading")
    if spacing not in SPACINGS:
        raise ValueError(f"timestep_spacing={spacing!r} is unknown; allowed: {', '.join(SPACINGS)}")
    offset = config.get("steps_offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(f"steps_offset={offset!r} must be an integer of at least 0")
    flags = {key: config.get(key, key == "set_alpha_to_one") for key in ("set_alpha_to_one", "clip_sample", "thresholding")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{key}={value!r} must be true or false")
    if flags["thresholding"]:
        raise ValueError("thresholding=True is not supported: it is for pixels, not latents; allowed: false")
    limit = config.get("clip_sample_range", 1.0)
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ValueError(f"clip_sample_range={limit!r} must be a number above 0")
    return SamplerConfig(spacing, offset, flags["set_alpha_to_one"], float(limit) if flags["clip_sample"] else None)


def timesteps(config: SamplerConfig, num_timesteps: int, num_inference_steps: int) -> np.ndarray:
    """The timesteps to visit, falling, int32 [num_inference_steps], of a schedule with num_timesteps.

    leading and trailing are multiples of a step counted from 0 or from the end; linspace has both ends (Lin et al.
    2023, arXiv 2305.08891, table 2). Only the last two begin where the noise is complete.

    Raises:
        ValueError: if there are not that many timesteps, or steps_offset leads past the last.
    """
    n, total = num_inference_steps, num_timesteps
    if not 1 <= n <= total:
        raise ValueError(f"num_inference_steps={n} must lie between 1 and num_train_timesteps={total}")
    match config.timestep_spacing:
        case "leading":
            chosen = np.arange(n)[::-1] * (total // n) + config.steps_offset
        case "trailing":
            # Some n leave a last element by rounding alone, which would be timestep -1.
            chosen = np.round(np.arange(total, 0, -total / n))[:n] - 1
        case _:
            chosen = np.linspace(0, total - 1, n).round()[::-1]
    if chosen[0] >= total:
        raise ValueError(
            f"steps_offset={config.steps_offset} with num_inference_steps={n} leads to timestep {chosen[0]}; "
            f"allowed: at most {total - 1}"
        )
    return chosen.astype(np.int32)


def guided(
    predict: Callable[[jax.Array, jax.Array, Condition], jax.Array],
    conditional: Condition,
    unconditional: Condition,
    guidance_scale: float,
) -> Denoise:
    """Classifier-free guidance (Ho & Salimans 2022; with scale w as in Imagen, eq. 2): u + w (c - u).

    Args:
        predict: (x [m h w c], t int32 [m], condition) -> the network's answer [m h w c].
        conditional, unconditional: pytrees of arrays [b ...]; both go through the network in one batch [2b ...].
        guidance_scale: at 1 and below the image is not guided, and the unconditional half not computed.
    """

    def plain(x: jax.Array, t: jax.Array) -> jax.Array:
        return predict(x, jnp.broadcast_to(t, x.shape[:1]), conditional)

    if guidance_scale <= 1:
        return plain
    both = jax.tree.map(_interleave, unconditional, conditional)

    def denoise(x: jax.Array, t: jax.Array) -> jax.Array:
        answer = predict(_interleave(x, x), jnp.broadcast_to(t, (2 * x.shape[0],)), both).astype(jnp.float32)
        u, c = jnp.moveaxis(answer.reshape(-1, 2, *answer.shape[1:]), 1, 0)
        return u + guidance_scale * (c - u)

    return denoise


def _interleave(u: jax.Array, c: jax.Array) -> jax.Array:
    """[b ...] twice -> [2b ...]: u of each image, then its c.

    Where images are split over devices, both of one stay on its device; concatenated, they would change places.
    """
    return jnp.stack([u, c], axis=1).reshape(-1, *u.shape[1:])


def split_answer(
    prediction_type: str, answer: jax.Array, x: jax.Array, signal: jax.Array, sigma: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The x_0 and the noise of which, by the network's answer, x = signal x_0 + sigma noise is made; [b h w c] each.

    v inverts by Salimans & Ho 2022, appendix D. signal = sqrt(abar_t) and sigma = sqrt(1 - abar_t) are scalars.
    """
    match prediction_type:
        case "epsilon":
            return (x - sigma * answer) / signal, answer
        case "v_prediction":
            return signal * x - sigma * answer, signal * answer + sigma * x
        case _:
            return answer, (x - signal * answer) / sigma


def ddim(
    denoise: Denoise,
    x: jax.Array,
    schedule: NoiseSchedule,
    config: SamplerConfig,
    num_inference_steps: int,
    eta: float = 0.0,
    noise: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """DDIM (Song et al. 2021, arXiv 2010.02502, eq. 12) -> x_0, float32 [b h w c]; one loop in one program.

    Args:
        x: standard normal noise, float32 [b h w c].
        eta: 0 is deterministic, 1 adds as much noise as DDPM does (eq. 16).
        noise: for eta > 0, the number of the step (int32 [], from 0) -> standard normal float32 [b h w c].

    Raises:
        ValueError: for too many steps or eta outside [0, 1]; for eta > 0 without noise; for epsilon prediction from
            a timestep without signal, out of which no x_0 can be computed.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta} must lie in [0, 1]")
    if eta and noise is None:
        raise ValueError(f"eta={eta} needs noise; without it allowed: 0")
    steps = _ddim_steps(schedule, config, num_inference_steps, eta)
    if schedule.prediction_type == "epsilon" and not steps.signal.all():
        raise ValueError(
            "prediction_type='epsilon' cannot begin at a timestep of zero signal-to-noise ratio (rescale_betas_zero_snr="
            f"True, timestep_spacing={config.timestep_spacing!r}); allowed: v_prediction, sample"
        )

    def body(x: jax.Array, step: _DdimStep) -> tuple[jax.Array, None]:
        answer = denoise(x, step.t).astype(jnp.float32)
        x0, direction = split_answer(schedule.prediction_type, answer, x, step.signal, step.sigma)
        if config.clip_sample_range is not None:
            x0 = jnp.clip(x0, -config.clip_sample_range, config.clip_sample_range)
        x = step.next_signal * x0 + step.next_sigma * direction
        if eta and noise is not None:
            x = x + step.fresh * noise(step.number)
        return x, None

    return lax.scan(body, x.astype(jnp.float32), steps)[0]


class _DdimStep(NamedTuple):
    """One step's number and timestep t, and the factors of eq. 12, float32: all [n], of which scan takes one."""

    number: Any
    t: Any
    signal: Any  # sqrt(abar_t)
    sigma: Any  # sqrt(1 - abar_t)
    next_signal: Any  # sqrt(abar_next), of x_0
    next_sigma: Any  # sqrt(1 - abar_next - fresh^2), of the predicted noise
    fresh: Any  # the paper's sigma_t, of new noise


def _ddim_steps(schedule: NoiseSchedule, config: SamplerConfig, num_inference_steps: int, eta: float) -> _DdimStep:
    t = timesteps(config, schedule.num_timesteps, num_inference_steps)
    # As diffusers steps: by a constant stride, even where the chosen timesteps lie at another (linspace).
    following = t - schedule.num_timesteps // num_inference_steps
    one = np.float32(1)
    abar = schedule.alphas_cumprod[t]
    last = one if config.set_alpha_to_one else schedule.alphas_cumprod[0]
    abar_next = np.where(following >= 0, schedule.alphas_cumprod[following], last)
    fresh = np.zeros_like(abar)
    if eta:
        fresh = np.float32(eta) * np.sqrt((one - abar_next) / (one - abar) * (one - abar / abar_next))  # eq. 16
    return _DdimStep(
        number=np.arange(len(t), dtype=np.int32),
        t=t,
        signal=schedule.signal[t],
        sigma=schedule.sigma[t],
        next_signal=np.sqrt(abar_next),
        next_sigma=np.sqrt(one - abar_next - fresh**2),
        fresh=fresh,
    )
