"""Where a sampler evaluates the network: timesteps and the noise levels there, chosen on the host."""

from typing import NamedTuple

import numpy as np

from maxdiff.diffusion.sampler_config import SamplerConfig
from maxdiff.diffusion.schedule import NoiseSchedule

# These walk from one timestep of the schedule to another.
DISCRETE = ("ddpm", "ddim", "pndm", "lcm")
# These walk noise levels, and interpolate the timesteps of linspace; the others' are whole.
FRACTIONAL = ("euler", "euler_ancestral", "heun", "lms")
# So do these, which choose one timestep more, and leave out the last.
MULTISTEP = ("dpmpp_2m", "dpmpp_2m_sde", "unipc")


class Grid(NamedTuple):
    """Points at which the network may be evaluated, from noise to image.

    Attributes:
        timesteps: [n], falling; int32, or float32 where some are fractions.
        signal, sigma: float64 [n], of x = signal x_0 + sigma noise at each, with signal^2 + sigma^2 = 1.
        sigmas: float64 [n + 1]: sigma / signal of each point and of where the last step goes (k-diffusion's sigma);
            empty for samplers that walk timesteps.
        abar: float64 [T] of the whole schedule.
        stride: timesteps of a step as DDIM and PNDM count them, T // n.
        prediction_type: what the network predicts.
    """

    timesteps: np.ndarray
    signal: np.ndarray
    sigma: np.ndarray
    sigmas: np.ndarray
    abar: np.ndarray
    stride: int
    prediction_type: str


def make_grid(sampler: str, schedule: NoiseSchedule, config: SamplerConfig, num_inference_steps: int) -> Grid:
    """The grid of a sampler; raises ValueError as `timesteps` and `lcm_timesteps`."""
    total, n = schedule.num_timesteps, num_inference_steps
    abar = schedule.alphas_cumprod.astype(np.float64)
    if sampler in DISCRETE:
        t = (lcm_timesteps if sampler == "lcm" else timesteps)(config, total, n)
        return Grid(t, np.sqrt(abar[t]), np.sqrt(1 - abar[t]), np.empty(0), abar, total // n, schedule.prediction_type)
    t = timesteps(config, total, n, whole=sampler in MULTISTEP, left_out=int(sampler in MULTISTEP))
    t, sigmas = _noise_levels(sampler, schedule, config, t)
    if (t == t.round()).all():
        t = t.astype(np.int32)
    signal = 1 / np.sqrt(sigmas[:-1] ** 2 + 1)
    return Grid(t, signal, sigmas[:-1] * signal, sigmas, abar, total // n, schedule.prediction_type)


def _noise_levels(sampler: str, schedule: NoiseSchedule, config: SamplerConfig, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps [n] and sigmas float64 [n + 1] of a sampler that walks noise levels, for the timesteps it has chosen."""
    # In float32, as diffusers has it: these are what it computes everything else from.
    table = np.sqrt((np.float32(1) - schedule.alphas_cumprod) / schedule.alphas_cumprod)
    sigmas = np.interp(t, np.arange(len(table)), table)
    final = 0.0 if config.final_sigmas_type == "zero" else table[0]
    if config.use_karras_sigmas:
        ends = (table[-1], table[0]) if sampler in MULTISTEP else (sigmas[0], sigmas[-1])
        sigmas = karras(config.sigma_max or float(ends[0]), config.sigma_min or float(ends[1]), len(t))
        t = np.interp(np.log(sigmas), np.log(table), np.arange(len(table)))
        if sampler in MULTISTEP:
            t = np.floor(t) if config.cut_timesteps else t.round()
        if sampler == "unipc" and final:
            final = sigmas[-1]
    return t.astype(np.float32), np.append(sigmas, final).astype(np.float32).astype(np.float64)


def timesteps(config: SamplerConfig, total: int, n: int, *, whole: bool = True, left_out: int = 0) -> np.ndarray:
    """n timesteps to visit, falling, of a schedule with `total`; float32 if not whole, else int32.

    leading and trailing are multiples of a step counted from 0 or from the end; linspace has both ends (Lin et al.
    2023, arXiv 2305.08891, table 2). Only the last two begin where the noise is complete.

    Args:
        whole: whether those of linspace are rounded.
        left_out: so many more are chosen and the last ones left out; not for trailing.

    Raises:
        ValueError: if there are not that many timesteps, or steps_offset leads past the last.
    """
    if not 1 <= n <= total - left_out:
        limit = f"num_train_timesteps={total}" if not left_out else f"num_train_timesteps - {left_out} = {total - left_out}"
        raise ValueError(f"num_inference_steps={n} must lie between 1 and {limit}")
    points = n + left_out
    match config.timestep_spacing:
        case "leading":
            chosen = np.arange(points)[::-1] * (total // points) + config.steps_offset
        case "trailing":
            # Some n leave a last element by rounding alone, which would be timestep -1.
            chosen = np.round(np.arange(total, 0, -total / n)) - 1
        case _:
            chosen = np.linspace(0, total - 1, points, dtype=np.float32 if not whole else np.float64)[::-1]
            chosen = chosen.round() if whole else chosen
    if chosen[0] >= total:
        raise ValueError(
            f"steps_offset={config.steps_offset} with num_inference_steps={n} leads to timestep {chosen[0]}; "
            f"allowed: at most {total - 1}"
        )
    return chosen[:n].astype(np.int32 if whole else np.float32)


def lcm_timesteps(config: SamplerConfig, total: int, n: int) -> np.ndarray:
    """n of the timesteps that an LCM was distilled on, evenly by their number; int32 [n], falling.

    Raises:
        ValueError: if it was distilled on fewer, or on more than `total`.
    """
    distilled = config.original_inference_steps
    if distilled > total:
        raise ValueError(f"original_inference_steps={distilled} must be at most num_train_timesteps={total}")
    if not 1 <= n <= distilled:
        raise ValueError(f"num_inference_steps={n} must lie between 1 and original_inference_steps={distilled}")
    every = np.arange(distilled, 0, -1) * (total // distilled) - 1
    return every[np.floor(np.linspace(0, distilled, n, endpoint=False)).astype(int)].astype(np.int32)


def karras(sigma_max: float, sigma_min: float, n: int) -> np.ndarray:
    """n noise levels, falling (Karras et al. 2022, arXiv 2206.00364, eq. 5, rho = 7), float64 [n]."""
    rho = 7.0
    return (sigma_max ** (1 / rho) + np.linspace(0, 1, n) * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
