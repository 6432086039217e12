"""The sampler against diffusers' DDIMScheduler, and against the formulas written out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from maxdiff.diffusion.sampler import SPACINGS, SamplerConfig, ddim, guided, sampler_config, timesteps
from maxdiff.diffusion.schedule import PREDICTION_TYPES, noise_schedule

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False,
      "set_alpha_to_one": False, "steps_offset": 1}  # fmt: skip
SHAPE = (2, 4, 3, 4)
# The network: a table of answers by timestep, and something of its input.
ANSWERS = np.random.default_rng(0).standard_normal((1000, *SHAPE)).astype(np.float32)
NOISE = np.random.default_rng(1).standard_normal((51, *SHAPE)).astype(np.float32)


def ours(config: dict, runs: list[tuple[int, float]]) -> list[jax.Array]:
    """Where each run of (steps, eta) ends; one program for all, as compiling takes the time."""
    answers, noise = jnp.asarray(ANSWERS), jnp.asarray(NOISE)
    schedule, sampler = noise_schedule(config), sampler_config(config)
    denoise = lambda x, t: 0.5 * x + answers[t]
    run = lambda x: [ddim(denoise, x, schedule, sampler, steps, eta, lambda i: noise[i]) for steps, eta in runs]
    return jax.jit(run)(noise[-1])


def theirs(config: dict, steps: int, eta: float = 0.0) -> np.ndarray:
    scheduler = DDIMScheduler(**config)
    scheduler.set_timesteps(steps)
    answers, noise = torch.from_numpy(ANSWERS), torch.from_numpy(NOISE)
    x = noise[-1]
    for i, t in enumerate(scheduler.timesteps):
        given = {"variance_noise": noise[i]} if eta else {}
        x = scheduler.step(0.5 * x + answers[t], int(t), x, eta=eta, **given).prev_sample
    return x.numpy()


def assert_equal_diffusers(config: dict, runs: list[tuple[int, float]]) -> None:
    for found, (steps, eta) in zip(ours(config, runs), runs, strict=True):
        expected = theirs(config, steps, eta)
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), (steps, eta)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_timesteps_equal_diffusers(spacing: str):
    for offset in (0, 1):
        scheduler = DDIMScheduler(timestep_spacing=spacing, steps_offset=offset)
        config = sampler_config(scheduler.config)
        for steps in range(1, 1000):
            scheduler.set_timesteps(steps)
            # For 62 of these numbers of steps diffusers has one more, timestep -1, where trailing rounds badly.
            np.testing.assert_array_equal(timesteps(config, 1000, steps), scheduler.timesteps[:steps])


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTION_TYPES)
def test_the_trajectory_equals_diffusers(prediction: str, spacing: str):
    config = {**SD, "prediction_type": prediction, "timestep_spacing": spacing}
    assert_equal_diffusers(config, [(steps, eta) for steps in (1, 4, 20, 50) for eta in (0.0, 1.0)])


@pytest.mark.parametrize(
    "changed",
    [
        {"set_alpha_to_one": True},
        {"steps_offset": 0},
        {"clip_sample": True},
        {"clip_sample": True, "clip_sample_range": 0.3, "prediction_type": "sample"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
        {"rescale_betas_zero_snr": True, "timestep_spacing": "linspace", "prediction_type": "sample"},
        {"rescale_betas_zero_snr": True},
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "linspace"},
        {"num_train_timesteps": 37, "timestep_spacing": "trailing"},
    ],
)
def test_every_key_is_read_as_diffusers_reads_it(changed: dict):
    assert_equal_diffusers({**SD, **changed}, [(7, 0.0), (7, 0.3)])


def test_an_exact_network_leads_back_to_the_image():
    """With the one noise that there is, DDIM runs along a straight line and any number of steps (that divides 1000) ends at x_0."""
    x0, noise = jnp.asarray(NOISE[0]), jnp.asarray(NOISE[1])
    schedule = noise_schedule({**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"})
    signal, sigma = jnp.asarray(schedule.signal), jnp.asarray(schedule.sigma)
    exact = lambda x, t: signal[t] * noise - sigma[t] * x0
    for steps in (1, 4, 10):
        found = ddim(exact, noise, schedule, SamplerConfig("trailing"), steps)
        np.testing.assert_allclose(found, x0, atol=1e-5)


def test_the_loop_is_traced_once_however_long():
    calls = []
    denoise = lambda x, t: calls.append(t) or x
    jax.jit(lambda x: ddim(denoise, x, noise_schedule(SD), sampler_config(SD), 50)).lower(jnp.asarray(NOISE[0]))
    assert len(calls) == 1


def test_guidance():
    batches = []

    def predict(x, t, condition):
        assert t.shape == x.shape[:1]
        batches.append(len(x))
        return x * condition["scale"][:, None, None, None]

    x = jnp.asarray(NOISE[0])
    c, u = ({"scale": jnp.array(scale, jnp.float32)} for scale in ([2, 3], [5, 7]))
    for scale in (0.0, 1.0, 4.0):
        found = guided(predict, c, u, scale)(x, jnp.int32(3))
        w = max(scale, 1.0)
        factor = u["scale"] + w * (c["scale"] - u["scale"])
        np.testing.assert_allclose(found, x * factor[:, None, None, None], rtol=1e-6)
    assert batches == [2, 2, 4]


def test_clipping_is_off_unless_the_file_says_so():
    assert sampler_config({}).clip_sample_range is None
    assert sampler_config({"clip_sample": True}).clip_sample_range == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timestep_spacing": "even"}, "timestep_spacing='even' is unknown; allowed: leading, trailing, linspace"),
        ({"timestep_spacing": ["leading"]}, "timestep_spacing=['leading'] is unknown"),
        ({"steps_offset": -1}, "steps_offset=-1 must be an integer of at least 0"),
        ({"steps_offset": 1.0}, "steps_offset=1.0 must be"),
        ({"steps_offset": True}, "steps_offset=True must be"),
        ({"set_alpha_to_one": 1}, "set_alpha_to_one=1 must be true or false"),
        ({"clip_sample": None}, "clip_sample=None must be true or false"),
        ({"clip_sample_range": 0}, "clip_sample_range=0 must be a number above 0"),
        ({"clip_sample_range": "1"}, "clip_sample_range='1' must be"),
        ({"thresholding": True}, "thresholding=True is not supported"),
    ],
)
def test_bad_keys_are_named(config: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler_config(config)


@pytest.mark.parametrize(
    ("changed", "steps", "eta", "message"),
    [
        ({}, 0, 0.0, "num_inference_steps=0 must lie between 1 and num_train_timesteps=1000"),
        ({}, 1001, 0.0, "num_inference_steps=1001 must lie"),
        ({}, 1000, 0.0, "steps_offset=1 with num_inference_steps=1000 leads to timestep 1000; allowed: at most 999"),
        ({}, 10, 1.5, "eta=1.5 must lie in [0, 1]"),
        ({}, 10, 0.5, "eta=0.5 needs noise; without it allowed: 0"),
        (
            {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
            10,
            0.0,
            "prediction_type='epsilon' cannot begin at a timestep of zero signal-to-noise ratio (rescale_betas_zero_snr=True, "
            "timestep_spacing='trailing'); allowed: v_prediction, sample",
        ),
    ],
)
def test_what_cannot_be_sampled_is_said(changed: dict, steps: int, eta: float, message: str):
    config = {**SD, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        ddim(lambda x, t: x, jnp.asarray(NOISE[0]), noise_schedule(config), sampler_config(config), steps, eta)
