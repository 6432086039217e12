"""Sampling: from noise to latents, by a table of factors and one loop.

Three things stay apart. The network, with its text and its guidance, is a function `denoise`, handed in; which
sampler walks which timesteps, and what the network's answer means there, is a `Plan`, made on the host; `sample`
knows neither.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxdiff.diffusion.grid import DISCRETE, FRACTIONAL, Grid, make_grid
from maxdiff.diffusion.sampler_config import known_keys, sampler_config
from maxdiff.diffusion.schedule import NoiseSchedule, noise_schedule
from maxdiff.diffusion.solvers import SAMPLERS

# (x_t float32 [b h w c], t int32 or float32 []) -> the network's answer [b h w c].
Denoise = Callable[[jax.Array, jax.Array], jax.Array]
# The number of the step (int32 [], from 0) -> standard normal float32 [b h w c].
Noise = Callable[[jax.Array], jax.Array]
Condition = TypeVar("Condition")
_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A sampler on a schedule, for so many steps; made by `make_plan`. A pytree: it can be an argument of a program.

    n is the number of evaluations of the network, of which some samplers have more than steps. Factors are float32,
    computed in float64.

    Attributes:
        timesteps: [n], int32, or float32 where some are fractions.
        input_scale: [n]; the network sees input_scale * x.
        meaning: [n 2 2]: x_0 and the noise from x and the network's answer.
        moves: [n s s+3]: the new state, x and s - 1 remembered tensors, from the old one, x_0, the noise that the
            answer means, and fresh noise.
        initial_scale: sampling from nothing begins with x = initial_scale * standard normal noise.
        image_scale, noise_scale: sampling from an image with image_scale * its latents + noise_scale * such noise.
        clip_sample_range: x_0 is clipped to within plus and minus this; None clips nothing.
        stochastic: whether fresh noise is used.
    """

    timesteps: np.ndarray
    input_scale: np.ndarray
    meaning: np.ndarray
    moves: np.ndarray
    initial_scale: np.floating
    image_scale: np.floating
    noise_scale: np.floating
    clip_sample_range: float | None = dataclasses.field(metadata=_STATIC)
    stochastic: bool = dataclasses.field(metadata=_STATIC)


def make_plan(
    scheduler: Mapping[str, Any],
    sampler: str,
    num_inference_steps: int,
    *,
    eta: float = 0.0,
    strength: float = 1.0,
) -> Plan:
    """The plan of a sampler on the schedule that a diffusers scheduler_config.json describes.

    Args:
        scheduler: the file, of any class: see `sampler_config`.
        sampler: one of SAMPLERS; `sampler_name(scheduler)` is the one that the file asks for.
        eta: of ddim: 0 is deterministic, 1 adds as much noise as ddpm does.
        strength: the part of the steps that is made, from an image with noise up to there; as in diffusers.

    Raises:
        ValueError: for a value that is not allowed or supported, naming its key; for more steps than timesteps, or
            none left by strength; for epsilon prediction from a timestep without signal, out of which no x_0 can be
            computed (diffusers gives NaN), and other plans that would give NaN.
    """
    config = sampler_config(scheduler, sampler)
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta} must lie in [0, 1]")
    if eta and sampler != "ddim":
        raise ValueError(f"eta={eta} is for sampler='ddim'; with {sampler!r} allowed: 0")
    schedule = _schedule(scheduler, sampler)
    grid = make_grid(sampler, schedule, config, num_inference_steps)
    if not 0 < strength <= 1 or not (made := int(num_inference_steps * strength)):
        raise ValueError(
            f"strength={strength} must lie in (0, 1] and leave at least one of num_inference_steps={num_inference_steps}"
        )
    start = num_inference_steps - made
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # said below
        visited, states = zip(*SAMPLERS[sampler](grid, config, eta, start), strict=True)
    points = np.array(visited)
    signal, sigma = grid.signal[points], grid.sigma[points]
    _check_levels(grid, points)
    moves = np.array(states, np.float32)
    if not np.isfinite(moves).all():
        raise ValueError(
            f"lower_order_final={config.lower_order_final} with final_sigmas_type={config.final_sigmas_type!r} has no finite "
            f"last step for sampler={sampler!r}; allowed: lower_order_final=true"
        )
    explodes = sampler in FRACTIONAL
    scale = signal if explodes else np.ones_like(signal)
    # Leading timesteps begin where some of the image is left; diffusers counts its variance there, and only there.
    most = grid.sigmas.max(initial=0.0)
    initial = np.hypot(most, 1) if config.timestep_spacing == "leading" else most
    return Plan(
        timesteps=grid.timesteps[points],
        input_scale=scale.astype(np.float32),
        meaning=_meaning(schedule.prediction_type, signal, sigma, scale).astype(np.float32),
        moves=moves,
        initial_scale=np.float32(initial if explodes else 1),
        image_scale=np.float32(signal[0] / scale[0]),
        noise_scale=np.float32(sigma[0] / scale[0]),
        clip_sample_range=config.clip_sample_range,
        stochastic=bool(moves[..., -1].any()),
    )


def _schedule(scheduler: Mapping[str, Any], sampler: str) -> NoiseSchedule:
    """The noise schedule as the sampler's scheduler has it: betas may have other defaults, zero SNR be unknown to it."""
    known = known_keys(scheduler, sampler)
    schedule = noise_schedule({**known, **scheduler, "rescale_betas_zero_snr": known.get("rescale_betas_zero_snr", False)})
    if known.get("rescale_betas_zero_snr") and sampler not in DISCRETE:
        # Where sigma / signal is needed, diffusers keeps the last signal from being 0.
        abar = np.append(schedule.alphas_cumprod[:-1], np.float32(2**-24))
        schedule = dataclasses.replace(schedule, alphas_cumprod=abar)
    return schedule


def _check_levels(grid: Grid, points: np.ndarray) -> None:
    if grid.prediction_type == "epsilon" and not grid.signal[points].all():
        raise ValueError(
            "prediction_type='epsilon' cannot begin at a timestep of zero signal-to-noise ratio (rescale_betas_zero_snr="
            "True); allowed: v_prediction, sample, timestep_spacing leading, or a sampler that walks noise levels"
        )
    if not grid.sigma[points].all():
        t = grid.timesteps[points][grid.sigma[points] == 0][0]
        raise ValueError(f"trained_betas have no noise at timestep {t}, which this sampler visits; allowed: noise there")


def _meaning(prediction_type: str, signal: np.ndarray, sigma: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """[n 2 2] from [n] each: (x_0, noise) of (x, answer), where scale x = signal x_0 + sigma noise.

    v inverts by Salimans & Ho 2022, appendix D.
    """
    zero, one = np.zeros_like(signal), np.ones_like(signal)
    match prediction_type:
        case "epsilon":
            rows = [[scale / signal, -sigma / signal], [zero, one]]
        case "v_prediction":
            rows = [[signal * scale, -sigma], [sigma * scale, signal]]
        case _:
            rows = [[zero, one], [scale / sigma, -signal / sigma]]
    return np.moveaxis(np.array(rows), -1, 0)


def begin(plan: Plan, noise: jax.Array, latents: jax.Array | None = None) -> jax.Array:
    """What `sample` begins with, float32 [b h w c], from standard normal noise and, for image-to-image, an image's latents."""
    if latents is None:
        return noise * plan.initial_scale
    return latents * plan.image_scale + noise * plan.noise_scale


def sample(denoise: Denoise, x: jax.Array, plan: Plan, noise: Noise | None = None) -> jax.Array:
    """x_0, float32 [b h w c], from what `begin` makes; one loop in one program, which traces `denoise` once.

    Raises:
        ValueError: for a stochastic plan without noise.
    """
    if plan.stochastic and noise is None:
        raise ValueError("this sampler adds noise at its steps, and got none (ddim: with eta > 0)")

    def body(state: tuple[jax.Array, ...], step: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], None]:
        number, t, scale, meaning, moves = step
        answer = denoise(scale * state[0], t).astype(jnp.float32)
        x0, epsilon = (_combine(row, (state[0], answer)) for row in meaning)
        if plan.clip_sample_range is not None:
            x0 = jnp.clip(x0, -plan.clip_sample_range, plan.clip_sample_range)
        fresh = (noise(number),) if plan.stochastic and noise is not None else ()
        return tuple(_combine(row, (*state, x0, epsilon, *fresh)) for row in moves), None

    x = x.astype(jnp.float32)
    state = (x, *(jnp.zeros_like(x) for _ in range(plan.moves.shape[1] - 1)))
    numbers = np.arange(len(plan.timesteps), dtype=np.int32)
    return lax.scan(body, state, (numbers, plan.timesteps, plan.input_scale, plan.meaning, plan.moves))[0][0]


def _combine(factors: jax.Array, tensors: tuple[jax.Array, ...]) -> jax.Array:
    # Not a product of matrices, which an accelerator may compute in lower precision.
    return sum((f * x for f, x in zip(factors[1:], tensors[1:], strict=False)), factors[0] * tensors[0])


def guided(
    predict: Callable[[jax.Array, jax.Array, Condition], jax.Array],
    conditional: Condition,
    unconditional: Condition,
    guidance_scale: float,
    guidance_rescale: float = 0.0,
) -> Denoise:
    """Classifier-free guidance (Ho & Salimans 2022; with scale w as in Imagen, eq. 2): u + w (c - u).

    Args:
        predict: (x [m h w c], t int32 [m], condition) -> the network's answer [m h w c].
        conditional, unconditional: pytrees of arrays [b ...]; both go through the network in one batch [2b ...].
        guidance_scale: at 1 and below the image is not guided, and the unconditional half not computed.
        guidance_rescale: how far, from 0 to 1, the guided answer is scaled to the standard deviation over an image
            that the conditional one has (Lin et al. 2023, arXiv 2305.08891, eq. 15-16); against overexposure.

    Raises:
        ValueError: if guidance_rescale lies outside [0, 1].
    """
    if not 0 <= guidance_rescale <= 1:
        raise ValueError(f"guidance_rescale={guidance_rescale} must lie in [0, 1]")

    def plain(x: jax.Array, t: jax.Array) -> jax.Array:
        return predict(x, jnp.broadcast_to(t, x.shape[:1]), conditional)

    if guidance_scale <= 1:
        return plain
    both = jax.tree.map(_interleave, unconditional, conditional)

    def denoise(x: jax.Array, t: jax.Array) -> jax.Array:
        answer = predict(_interleave(x, x), jnp.broadcast_to(t, (2 * x.shape[0],)), both).astype(jnp.float32)
        u, c = jnp.moveaxis(answer.reshape(-1, 2, *answer.shape[1:]), 1, 0)
        answer = u + guidance_scale * (c - u)
        if guidance_rescale:
            ratio = c.std((1, 2, 3), keepdims=True) / answer.std((1, 2, 3), keepdims=True)
            answer = (guidance_rescale * ratio + (1 - guidance_rescale)) * answer
        return answer

    return denoise


def _interleave(u: jax.Array, c: jax.Array) -> jax.Array:
    """[b ...] twice -> [2b ...]: u of each image, then its c.

    Where images are split over devices, both of one stay on its device; concatenated, they would change places.
    """
    return jnp.stack([u, c], axis=1).reshape(-1, *u.shape[1:])
