"""Every sampler's whole trajectory against diffusers' schedulers, on the same answers of a network and the same noise."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from benchmarks.samplers import BOUND, SD, STEPS, difference, distance, make_scheduler, ours, theirs
from maxdiff.diffusion.grid import DISCRETE, FRACTIONAL, MULTISTEP, make_grid
from maxdiff.diffusion.sampler_config import CLASSES, SPACINGS, sampler_config
from maxdiff.diffusion.schedule import PREDICTION_TYPES, noise_schedule
from maxdiff.diffusion.solvers import SAMPLERS

# diffusers' schedulers hand tensors to numpy as it no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

V, X0 = {"prediction_type": "v_prediction"}, {"prediction_type": "sample"}
KARRAS, COSINE = {"use_karras_sigmas": True}, {"beta_schedule": "squaredcos_cap_v2"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
LAST = {"final_sigmas_type": "sigma_min"}
ENDS = {"sigma_min": 0.1, "sigma_max": 9}


@pytest.mark.parametrize("prediction", PREDICTION_TYPES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_trajectory_equals_diffusers(sampler: str, prediction: str):
    for steps in STEPS:
        assert difference({**SD, "prediction_type": prediction}, sampler, steps) <= BOUND, steps


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_spacings_and_offsets(sampler: str):
    for spacing in SPACINGS:
        for offset in (0, 1):
            config = {**SD, "timestep_spacing": spacing, "steps_offset": offset}
            assert difference(config, sampler, 7) <= BOUND, (spacing, offset)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_defaults_are_those_of_each_class(sampler: str):
    assert difference({"skip_prk_steps": True}, sampler, 7) <= BOUND


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_image_to_image(sampler: str):
    for strength, prediction in ((0.5, "epsilon"), (0.8, "v_prediction"), (1.0, "epsilon")):
        # More than 15 in all, so that multistep solvers have their order to the end; and few.
        for steps in (20, 7):
            config = {**SD, "prediction_type": prediction, "timestep_spacing": "leading"}
            assert difference(config, sampler, steps, strength=strength) <= BOUND, (strength, steps)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_zero_terminal_snr(sampler: str):
    """Whose first timestep some samplers begin at with no signal at all, some with 2^-12, and some don't know."""
    for prediction in PREDICTION_TYPES:
        if prediction == "epsilon" and sampler in DISCRETE and sampler != "pndm":
            continue
        config = {**SD, **ZERO_SNR, "prediction_type": prediction}
        # From sigma = 4096 diffusers gets to the next, a hundredth of that, by a subtraction, for which float32 is
        # too coarse; we by a factor.
        dtype = torch.float64 if sampler.startswith("euler") else torch.float32
        assert distance(ours(config, sampler, 7), theirs(config, sampler, 7, dtype=dtype)) <= BOUND, prediction


ORDERS = [{"solver_order": order, **last} for order in (1, 2, 3) for last in ({}, LAST)]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ddpm": [{"variance_type": kind} for kind in ("fixed_large", "fixed_small_log", None)]
    + [{"clip_sample": True, **V}, {"clip_sample": True, "clip_sample_range": 0.3}, {"num_train_timesteps": 37}, COSINE],
    "ddim": [{"set_alpha_to_one": True}, {"clip_sample": True}, {"clip_sample": True, "clip_sample_range": 0.3, **X0}, COSINE],
    "pndm": [{"set_alpha_to_one": True}, {"set_alpha_to_one": True, **V}, COSINE],
    "euler": [KARRAS, {**KARRAS, **ENDS}, {**KARRAS, **LAST}, LAST, {**KARRAS, "timestep_spacing": "leading"}],
    "heun": [KARRAS, {**KARRAS, **ENDS}, {"clip_sample": True}, {"clip_sample": True, "clip_sample_range": 0.3, **V}],
    "lms": [KARRAS, {**KARRAS, **ENDS}],
    "dpmpp_2m": [
        *ORDERS, {"euler_at_final": True, **LAST}, {"lower_order_final": False, **LAST}, {"lower_order_final": False},
        {"solver_type": "heun"}, {"solver_type": "heun", **LAST}, KARRAS, {**KARRAS, **ENDS}, {**KARRAS, **COSINE},
        {"solver_order": 3, "lower_order_final": False, **LAST}, {"solver_type": "bh2"}, {"algorithm_type": "dpmsolver"},
    ],
    "dpmpp_2m_sde": [
        *ORDERS[:4], {"solver_type": "heun"}, {"solver_type": "heun", **LAST}, {"lower_order_final": False, **LAST}, KARRAS,
    ],
    "unipc": [
        *ORDERS, *({**order, **LAST, "solver_type": "bh1"} for order in ORDERS[::2]), {"lower_order_final": False, **LAST},
        {"disable_corrector": [0, 2]}, {"solver_order": 3, "disable_corrector": [1]}, {"solver_type": "midpoint"}, KARRAS,
        {**KARRAS, **LAST}, {**KARRAS, **ENDS, **LAST},
    ],
    "lcm": [
        {"original_inference_steps": 20}, {"original_inference_steps": 1000}, {"timestep_scaling": 0.001},
        {"clip_sample": True, "clip_sample_range": 0.3},
    ],
}  # fmt: skip


# Defaults, spelled out or in other words, and what comes into play only without a last step to no noise.
SAME: list[dict[str, Any]] = [
    {"variance_type": "fixed_small_log"}, {"variance_type": None}, {"lower_order_final": False}, {"solver_order": 2},
    {"solver_type": "bh2"}, {"solver_type": "midpoint"}, {"algorithm_type": "dpmsolver"},
]  # fmt: skip


@pytest.mark.parametrize("sampler", OPTIONS)
def test_every_key_is_read_as_diffusers_reads_it(sampler: str):
    """And changes something, but for those that diffusers, too, takes for the same."""
    plain = {steps: ours(SD, sampler, steps)[-1][0] for steps in (7, 20)}
    for changed in OPTIONS[sampler]:
        moved = []
        for steps in (7, 20):
            found = ours({**SD, **changed}, sampler, steps)
            assert distance(found, theirs({**SD, **changed}, sampler, steps)) <= BOUND, (changed, steps)
            moved.append(not np.array_equal(found[-1][0], plain[steps]))
        assert any(moved) == (changed not in SAME), changed


def test_eta():
    for eta in (0.3, 1.0):
        for changed in ({}, V, {"clip_sample": True, "timestep_spacing": "linspace"}):
            assert difference({**SD, **changed}, "ddim", 7, eta=eta) <= BOUND, (eta, changed)


@pytest.mark.parametrize(
    ("saved", "sampler"),
    [("PNDMScheduler", "dpmpp_2m"), ("EulerDiscreteScheduler", "ddim"), ("DDIMScheduler", "euler"), ("DDIMScheduler", "unipc"),
     ("DPMSolverMultistepScheduler", "unipc"), ("DPMSolverMultistepScheduler", "ddpm"), ("UniPCMultistepScheduler", "dpmpp_2m_sde"),
     ("LCMScheduler", "euler_ancestral"), ("DDPMScheduler", "dpmpp_2m"), ("EulerDiscreteScheduler", "heun")],
)  # fmt: skip
def test_another_sampler_than_the_checkpoints(saved: str, sampler: str, tmp_path: Path):
    """As diffusers' OtherScheduler.from_config(pipeline.scheduler.config), for a scheduler that came from a file."""
    getattr(diffusers, saved)(beta_start=0.001, beta_end=0.013, steps_offset=1).save_pretrained(tmp_path)
    file = json.loads((tmp_path / "scheduler_config.json").read_text())
    loaded = getattr(diffusers, saved).from_pretrained(tmp_path)
    if sampler == "ddim":  # the one default that differs
        loaded.register_to_config(clip_sample=False)
    assert distance(ours(file, sampler, 7), theirs(loaded.config, sampler, 7)) <= BOUND


@pytest.mark.parametrize(
    ("sampler", "changed"),
    [
        ("unipc", {"solver_type": "bh1"}),  # 0 times an infinite B(h), at a last step to no noise
        ("unipc", {**KARRAS, **LAST, "solver_order": 3, "lower_order_final": False}),  # a last step of no length, and so on
        ("dpmpp_2m", {**KARRAS, **LAST, "solver_order": 3}),
        ("dpmpp_2m", {**KARRAS, **LAST, "solver_type": "heun"}),
    ],
)
def test_where_diffusers_last_step_is_not_a_number(sampler: str, changed: dict):
    """Ours is, and all before it are equal."""
    found, expected = ours({**SD, **changed}, sampler, 20), theirs({**SD, **changed}, sampler, 20)
    assert not np.isfinite(expected[-1][0]).all()
    assert distance(found[:-1], expected[:-1]) <= BOUND
    assert np.abs(found[-1][0]).max() < 2 * np.abs(found[-2][0]).max()


@pytest.mark.parametrize("sampler", ["ddim", "euler", "lms", "dpmpp_2m", "lcm"])
def test_timesteps_equal_diffusers(sampler: str):
    for spacing in SPACINGS:
        for offset in (0, 1):
            config = {**SD, "timestep_spacing": spacing, "steps_offset": offset, "original_inference_steps": 1000}
            schedule, settings = noise_schedule(config), sampler_config(config, sampler)
            scheduler, _ = make_scheduler(config, sampler)
            for steps in range(1, 998, 7):
                scheduler.set_timesteps(steps)
                found = make_grid(sampler, schedule, settings, steps).timesteps
                # For some numbers of steps diffusers has one more, timestep -1, where trailing rounds badly.
                np.testing.assert_allclose(found, scheduler.timesteps[:steps], rtol=1e-6)


def test_each_sampler_walks_one_way():
    assert set(SAMPLERS) == set(CLASSES) == {*DISCRETE, *FRACTIONAL, *MULTISTEP}
    assert len(SAMPLERS) == len(DISCRETE) + len(FRACTIONAL) + len(MULTISTEP)
