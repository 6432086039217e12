"""What a diffusers scheduler_config.json says of sampling, and which sampler it asks for.

Any sampler can be put on any checkpoint. As with diffusers' `OtherScheduler.from_config(config)`, keys that the
sampler does not know are ignored, be it `rescale_betas_zero_snr`, and missing ones have that scheduler's own
defaults, which differ: leading timesteps for DDIM, linspace for Euler.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

SPACINGS = ("leading", "trailing", "linspace")

# The schedulers of diffusers, by the name that the key `sampler` has for them.
CLASSES = {
    "ddpm": "DDPMScheduler",
    "ddim": "DDIMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "dpmpp_2m_sde": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "lcm": "LCMScheduler",
}

_LEADING = {"timestep_spacing": "leading", "steps_offset": 0}
_LINSPACE = {"timestep_spacing": "linspace", "steps_offset": 0}
_ZERO_SNR = {"rescale_betas_zero_snr": False}
_NO_THRESHOLDING = {"thresholding": False}
_CLIP = {"clip_sample": False, "clip_sample_range": 1.0}
_KARRAS = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
# Whether they are that class's own or not: diffusers' Karras sigmas keep to them where a file has them.
_ENDS = {"sigma_min": None, "sigma_max": None}
_MULTISTEP = {
    **_LINSPACE, **_ZERO_SNR, **_NO_THRESHOLDING, **_KARRAS, **_ENDS, "solver_order": 2, "lower_order_final": True,
    "final_sigmas_type": "zero", "use_flow_sigmas": False, "use_dynamic_shifting": False,
}  # fmt: skip
_DPM = {
    **_MULTISTEP, "solver_type": "midpoint", "euler_at_final": False, "use_lu_lambdas": False,
    "lambda_min_clipped": -math.inf, "variance_type": None, "beta_schedule": "linear",
}  # fmt: skip

# The keys that each sampler reads, with its defaults; num_train_timesteps, beta_..., trained_betas and
# prediction_type come to all of them.
KEYS: dict[str, dict[str, Any]] = {
    "ddpm": {**_LEADING, **_ZERO_SNR, **_NO_THRESHOLDING, **_CLIP, "variance_type": "fixed_small"},
    "ddim": {**_LEADING, **_ZERO_SNR, **_NO_THRESHOLDING, **_CLIP, "set_alpha_to_one": True},
    "pndm": {**_LEADING, "set_alpha_to_one": False, "skip_prk_steps": True},
    "euler": {
        **_LINSPACE, **_ZERO_SNR, **_KARRAS, **_ENDS, "final_sigmas_type": "zero", "interpolation_type": "linear",
        "timestep_type": "discrete",
    },
    "euler_ancestral": {**_LINSPACE, **_ZERO_SNR},
    "heun": {**_LINSPACE, **_KARRAS, **_ENDS, **_CLIP, "beta_start": 0.00085, "beta_end": 0.012},
    "lms": {**_LINSPACE, **_KARRAS},
    "dpmpp_2m": _DPM,
    "dpmpp_2m_sde": _DPM,
    "unipc": {**_MULTISTEP, "solver_type": "bh2", "predict_x0": True, "disable_corrector": (), "solver_p": None},
    "lcm": {
        **_ZERO_SNR, **_NO_THRESHOLDING, **_CLIP, "original_inference_steps": 50, "timestep_scaling": 10.0,
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    },
}  # fmt: skip

# What the words of one key may be. fixed_small_log is fixed_small, written differently; with null DDPM has that too.
_WORDS: dict[str, tuple[Any, ...]] = {
    "timestep_spacing": SPACINGS,
    "final_sigmas_type": ("zero", "sigma_min"),
    "interpolation_type": ("linear",),
    "timestep_type": ("discrete",),
}
_SOLVER_TYPES = {"unipc": ("bh2", "bh1"), "dpmpp_2m": ("midpoint", "heun"), "dpmpp_2m_sde": ("midpoint", "heun")}
_VARIANCES = ("fixed_small", "fixed_small_log", "fixed_large", None)
_FLAGS = (
    "set_alpha_to_one",
    "clip_sample",
    "lower_order_final",
    "euler_at_final",
    "use_karras_sigmas",
    "rescale_betas_zero_snr",
)
# What has one value that is supported.
_ONLY: dict[str, Any] = {
    "thresholding": False,
    "skip_prk_steps": True,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_flow_sigmas": False,
    "use_lu_lambdas": False,
    "use_dynamic_shifting": False,
    "lambda_min_clipped": -math.inf,
    "predict_x0": True,
    "solver_p": None,
}
_REASONS = {
    "thresholding": "it is for pixels, not latents",
    "skip_prk_steps": "PNDM begins with linear multistep steps",
}


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How a sampler walks; made by `sampler_config`. What a sampler does not know has the default here.

    Attributes:
        timestep_spacing, steps_offset: how timesteps are chosen: see `grid.timesteps`.
        set_alpha_to_one: whether the last step goes to abar = 1, no noise at all, or to timestep 0.
        clip_sample_range: x_0 is clipped to within plus and minus this at each step; None clips nothing.
        variance_type: of DDPM: fixed_small, the posterior's, or fixed_large, beta (Ho et al. 2020, section 3.2).
        use_karras_sigmas: whether noise levels are spaced as in Karras et al. 2022, eq. 5; between the schedule's own
            ends or, where they are given, sigma_min and sigma_max.
        cut_timesteps: whether DPM-Solver++ cuts the timesteps of Karras's noise levels to whole ones, where it else
            rounds: diffusers does under the beta_schedule squaredcos_cap_v2.
        final_sigmas_type: whether the last step goes to no noise (zero) or to the schedule's least (sigma_min).
        solver_order: of multistep solvers: how many answers of the network a step uses.
        solver_type: midpoint or heun of DPM-Solver++, bh1 or bh2 of UniPC: see there.
        lower_order_final: whether the last steps, of fewer than 15 with DPM-Solver++, have a lower order.
        euler_at_final: whether the last one has order 1 anyhow.
        disable_corrector: of UniPC: steps (from 0) after which the corrector is left out.
        original_inference_steps: of LCM: how many timesteps the student was distilled on.
        timestep_scaling: of LCM: how fast its boundary condition gives way, per timestep.
    """

    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    clip_sample_range: float | None = None
    variance_type: str = "fixed_small"
    use_karras_sigmas: bool = False
    sigma_min: float | None = None
    sigma_max: float | None = None
    cut_timesteps: bool = False
    final_sigmas_type: str = "zero"
    solver_order: int = 2
    solver_type: str = ""
    lower_order_final: bool = True
    euler_at_final: bool = False
    disable_corrector: tuple[int, ...] = ()
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0


def sampler_name(scheduler: Mapping[str, Any]) -> str:
    """The sampler that a scheduler_config.json asks for by its _class_name and algorithm_type.

    Raises:
        ValueError: for a class that is none of ours, or the noise prediction of the first DPM-Solver.
    """
    name = scheduler.get("_class_name")
    if name == CLASSES["dpmpp_2m"]:
        # deis is another class's, whose configuration diffusers reads as DPM-Solver++.
        algorithms = {"dpmsolver++": "dpmpp_2m", "deis": "dpmpp_2m", "sde-dpmsolver++": "dpmpp_2m_sde"}
        algorithm = scheduler.get("algorithm_type", "dpmsolver++")
        _check_word("algorithm_type", algorithm, tuple(algorithms))
        return algorithms[algorithm]
    _check_word("_class_name", name, tuple(dict.fromkeys(CLASSES.values())))
    return next(sampler for sampler, cls in CLASSES.items() if cls == name)


def with_zero_snr(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler_config.json of a model that learns the last timestep as pure noise (Lin et al. 2023, section 3.1 to 3.3).

    A scheduler that does not know `rescale_betas_zero_snr`, ours or not, gives way to DDIM; and timesteps are trailing, so that
    drawing begins with the last. A model of noise has no answer to that one: its timesteps stay.
    """
    knows = {CLASSES[sampler] for sampler, keys in KEYS.items() if "rescale_betas_zero_snr" in keys}
    ours = scheduler.get("_class_name") in knows
    if ours and scheduler.get("rescale_betas_zero_snr"):
        return dict(scheduler)
    found = {**scheduler, "rescale_betas_zero_snr": True}
    if scheduler.get("prediction_type", "epsilon") != "epsilon":
        found["timestep_spacing"] = "trailing"
    if not ours:
        found |= {"_class_name": CLASSES["ddim"], "clip_sample": False}
        found.pop("skip_prk_steps", None)
    return found


def sampler_config(scheduler: Mapping[str, Any], sampler: str) -> SamplerConfig:
    """What a diffusers scheduler_config.json says to this sampler, with its scheduler's defaults but one.

    clip_sample is off unless the file turns it on: schedulers that don't clip leave the key out, and latents, unlike
    pixels, lie beyond [-1, 1].

    Raises:
        ValueError: for an unknown sampler, or a value that is not allowed or not supported, naming its key.
    """
    given = known_keys(scheduler, sampler)
    # Names of another class's solvers; diffusers has each class fall back to its default.
    foreign = {"bh1", "bh2", "logrho"} if sampler.startswith("dpmpp") else {"midpoint", "heun", "logrho"}
    if given.get("solver_type") in foreign:
        given["solver_type"] = KEYS[sampler]["solver_type"]
    for key, value in given.items():
        _check(sampler, key, value)
    clip, limit = given.pop("clip_sample", False), given.pop("clip_sample_range", None)
    if sampler == "ddpm" and given["variance_type"] != "fixed_large":
        given["variance_type"] = "fixed_small"
    elif sampler != "ddpm":
        given.pop("variance_type", None)
    given["cut_timesteps"] = sampler.startswith("dpmpp") and given["beta_schedule"] == "squaredcos_cap_v2"
    given["disable_corrector"] = tuple(given.get("disable_corrector", ()))
    fields = {field.name for field in dataclasses.fields(SamplerConfig)}
    return SamplerConfig(
        **{key: value for key, value in given.items() if key in fields}, clip_sample_range=float(limit) if clip else None
    )


def known_keys(scheduler: Mapping[str, Any], sampler: str) -> dict[str, Any]:
    """The value of each key of `KEYS[sampler]`: the file's, else its default; raises ValueError for an unknown sampler."""
    _check_word("sampler", sampler, tuple(KEYS))
    return {key: scheduler.get(key, default) for key, default in KEYS[sampler].items()}


def _check(sampler: str, key: str, value: Any) -> None:
    if key in _ONLY:
        if value is not _ONLY[key] and value != _ONLY[key]:
            reason = f": {_REASONS[key]}" if key in _REASONS else ""
            allowed = {True: "true", False: "false", None: "null"}.get(_ONLY[key], _ONLY[key])
            raise ValueError(f"{key}={value!r} is not supported{reason}; allowed: {allowed}")
    elif key in _WORDS:
        _check_word(key, value, _WORDS[key])
    elif key == "solver_type":
        _check_word(key, value, _SOLVER_TYPES[sampler])
    elif key == "variance_type":
        _check_word(key, value, _VARIANCES)
    elif key in _FLAGS:
        if not isinstance(value, bool):
            raise ValueError(f"{key}={value!r} must be true or false")
    elif key == "steps_offset":
        if not _is_integer(value) or value < 0:
            raise ValueError(f"{key}={value!r} must be an integer of at least 0")
    elif key == "solver_order":
        # diffusers' third order of the SDE has a sign wrong: see `solvers.dpmpp_2m_sde`.
        allowed = (1, 2) if sampler == "dpmpp_2m_sde" else (1, 2, 3)
        if not _is_integer(value) or value not in allowed:
            raise ValueError(f"{key}={value!r} with sampler={sampler!r} is not supported; allowed: {_list(allowed)}")
    elif key == "original_inference_steps":
        if not _is_integer(value) or value < 1:
            raise ValueError(f"{key}={value!r} must be an integer of at least 1")
    elif key == "disable_corrector":
        if not isinstance(value, list | tuple) or not all(_is_integer(step) and step >= 0 for step in value):
            raise ValueError(f"{key}={value!r} must be a list of steps, integers of at least 0")
    elif key in _ENDS:
        if value is not None and not _is_positive(value):
            raise ValueError(f"{key}={value!r} must be a number above 0, or null")
    elif key in ("clip_sample_range", "timestep_scaling") and not _is_positive(value):
        raise ValueError(f"{key}={value!r} must be a number above 0")


def _check_word(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not isinstance(value, str | None) or value not in allowed:
        raise ValueError(f"{key}={value!r} is unknown or not supported; allowed: {_list(allowed)}")


def _list(allowed: tuple[Any, ...]) -> str:
    return ", ".join("null" if value is None else str(value) for value in allowed)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
