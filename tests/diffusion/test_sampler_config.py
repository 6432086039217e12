"""Which sampler a scheduler_config.json asks for, and which values are refused; the rest is in test_solvers.py."""

import re
from pathlib import Path

import pytest

from maxdiff.diffusion.sampler_config import CLASSES, KEYS, sampler_config, sampler_name


def test_the_sampler_of_a_class():
    for sampler, cls in CLASSES.items():
        config = {"_class_name": cls} | ({"algorithm_type": "sde-dpmsolver++"} if sampler == "dpmpp_2m_sde" else {})
        assert sampler_name(config) == sampler
    with pytest.raises(
        ValueError, match=r"_class_name='DEISMultistepScheduler' is unknown .* allowed: DDPMScheduler, .*LCMScheduler$"
    ):
        sampler_name({"_class_name": "DEISMultistepScheduler"})
    with pytest.raises(ValueError, match=re.escape("_class_name=None is unknown")):
        sampler_name({})
    with pytest.raises(ValueError, match=r"algorithm_type='dpmsolver' .* allowed: dpmsolver\+\+, deis, sde-dpmsolver\+\+$"):
        sampler_name({"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver"})
    with pytest.raises(ValueError, match=r"sampler='ddmi' is unknown .* allowed: ddpm, ddim, .*lcm$"):
        sampler_config({}, "ddmi")


@pytest.mark.parametrize(
    ("sampler", "config", "message"),
    [
        ("ddim", {"timestep_spacing": "even"}, "timestep_spacing='even' is unknown or not supported; allowed: leading, trailing, linspace"),
        ("ddim", {"timestep_spacing": ["leading"]}, "timestep_spacing=['leading'] is unknown"),
        ("ddim", {"steps_offset": -1}, "steps_offset=-1 must be an integer of at least 0"),
        ("ddim", {"steps_offset": 1.0}, "steps_offset=1.0 must be"),
        ("ddim", {"steps_offset": True}, "steps_offset=True must be"),
        ("ddim", {"set_alpha_to_one": 1}, "set_alpha_to_one=1 must be true or false"),
        ("ddim", {"clip_sample": None}, "clip_sample=None must be true or false"),
        ("heun", {"clip_sample_range": 0}, "clip_sample_range=0 must be a number above 0"),
        ("ddim", {"clip_sample_range": "1"}, "clip_sample_range='1' must be"),
        ("ddim", {"thresholding": True}, "thresholding=True is not supported: it is for pixels, not latents; allowed: false"),
        ("ddpm", {"variance_type": "learned_range"}, "variance_type='learned_range' is unknown or not supported; allowed: fixed_small, "),
        ("dpmpp_2m", {"variance_type": "learned"}, "variance_type='learned' is"),
        ("pndm", {"skip_prk_steps": False}, "skip_prk_steps=False is not supported: PNDM begins with linear multistep steps"),
        ("euler", {"use_exponential_sigmas": True}, "use_exponential_sigmas=True is not supported; allowed: false"),
        ("lms", {"use_beta_sigmas": True}, "use_beta_sigmas=True is not supported"),
        ("unipc", {"use_flow_sigmas": True}, "use_flow_sigmas=True is not supported"),
        ("euler", {"use_karras_sigmas": 1}, "use_karras_sigmas=1 must be true or false"),
        ("euler", {"sigma_min": -1}, "sigma_min=-1 must be a number above 0, or null"),
        ("euler", {"interpolation_type": "log_linear"}, "interpolation_type='log_linear' is unknown or not supported; allowed: linear"),
        ("euler", {"timestep_type": "continuous"}, "timestep_type='continuous' is unknown or not supported; allowed: discrete"),
        ("unipc", {"final_sigmas_type": "one"}, "final_sigmas_type='one' is unknown or not supported; allowed: zero, sigma_min"),
        ("unipc", {"predict_x0": False}, "predict_x0=False is not supported; allowed: true"),
        ("unipc", {"disable_corrector": [-1]}, "disable_corrector=[-1] must be a list of steps"),
        ("unipc", {"solver_order": 4}, "solver_order=4 with sampler='unipc' is not supported; allowed: 1, 2, 3"),
        ("dpmpp_2m_sde", {"solver_order": 3}, "solver_order=3 with sampler='dpmpp_2m_sde' is not supported; allowed: 1, 2"),
        ("dpmpp_2m", {"solver_type": "rk4"}, "solver_type='rk4' is unknown or not supported; allowed: midpoint, heun"),
        ("dpmpp_2m", {"use_lu_lambdas": True}, "use_lu_lambdas=True is not supported"),
        ("dpmpp_2m", {"lambda_min_clipped": -5.1}, "lambda_min_clipped=-5.1 is not supported; allowed: -inf"),
        ("lcm", {"original_inference_steps": 0}, "original_inference_steps=0 must be an integer of at least 1"),
        ("lcm", {"timestep_scaling": 0}, "timestep_scaling=0 must be a number above 0"),
    ],
)  # fmt: skip
def test_bad_keys_are_named(sampler: str, config: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler_config(config, sampler)


def test_keys_of_another_sampler_are_ignored():
    for sampler in KEYS:
        strange = {
            "skip_prk_steps" if sampler != "pndm" else "clip_sample": "?",
            "_use_default_values": [],
            "disable_corrector" if sampler != "unipc" else "clip_sample": "?",
        }
        assert sampler_config(strange, sampler) == sampler_config({}, sampler)


def test_the_documentation_names_every_key_and_sampler():
    text = (Path(__file__).parents[2] / "docs" / "SAMPLERS.md").read_text()
    assert not [key for keys in KEYS.values() for key in keys if f"`{key}`" not in text]
    assert not [sampler for sampler in KEYS if f"| {sampler} | {CLASSES[sampler]}" not in text and sampler != "dpmpp_2m_sde"]
