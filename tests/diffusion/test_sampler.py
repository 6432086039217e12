"""The loop, guidance, and what both refuse; the samplers themselves are in test_solvers.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from maxdiff.diffusion.sampler import begin, guided, make_plan, sample
from maxdiff.diffusion.sampler_config import with_zero_snr
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.diffusion.solvers import SAMPLERS

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "skip_prk_steps": True}
V = {"prediction_type": "v_prediction"}
TRAILING = {"timestep_spacing": "trailing"}
SHAPE = (2, 4, 3, 4)
NOISE = np.random.default_rng(1).standard_normal((2, *SHAPE)).astype(np.float32)


def test_an_exact_network_leads_back_to_the_image():
    """With the one noise that there is, DDIM runs along a straight line and any number of steps (that divides 1000) ends at x_0."""
    x0, noise = jnp.asarray(NOISE[0]), jnp.asarray(NOISE[1])
    config = {**SD, **V, **TRAILING, "rescale_betas_zero_snr": True}
    schedule = noise_schedule(config)
    signal, sigma = jnp.asarray(schedule.signal), jnp.asarray(schedule.sigma)
    exact = lambda x, t: signal[t] * noise - sigma[t] * x0
    for steps in (1, 4, 10):
        plan = make_plan(config, "ddim", steps)
        np.testing.assert_allclose(sample(exact, begin(plan, noise), plan), x0, atol=1e-5)
    halfway = make_plan(config, "ddim", 10, strength=0.5)
    np.testing.assert_allclose(sample(exact, begin(halfway, noise, x0), halfway), x0, atol=1e-5)


@pytest.mark.parametrize(
    ("scheduler", "cls", "spacing"),
    [
        ({**SD, **V, "_class_name": "PNDMScheduler"}, "DDIMScheduler", "trailing"),  # diffusers' PNDM has no such schedule
        ({**SD, "_class_name": "PNDMScheduler"}, "DDIMScheduler", None),
        ({**SD, **V, "_class_name": "PNDMScheduler", "rescale_betas_zero_snr": True}, "DDIMScheduler", "trailing"),
        ({**SD, **V, "_class_name": "KDPM2DiscreteScheduler"}, "DDIMScheduler", "trailing"),  # none of ours
        (
            {**SD, **V, "_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"},
            "EulerDiscreteScheduler",
            "trailing",
        ),
        ({**V, "_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}, "DDIMScheduler", None),
    ],
)
def test_a_model_that_learns_pure_noise_is_drawn_from_it_by_diffusers_too(scheduler, cls, spacing):
    import diffusers

    found = with_zero_snr(scheduler)
    theirs = getattr(diffusers, cls).from_config(found)
    assert found["_class_name"] == cls
    assert theirs.alphas_cumprod[-1] < 1e-6
    assert found.get("timestep_spacing") == spacing
    assert theirs.config.get("prediction_type") == scheduler.get("prediction_type", "epsilon")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_loop_is_traced_once_however_long(sampler: str):
    calls = []
    denoise = lambda x, t: calls.append(t) or x
    plan = make_plan(SD, sampler, 50)
    jax.jit(lambda x: sample(denoise, x, plan, lambda i: x)).lower(jnp.asarray(NOISE[0]))
    assert len(calls) == 1


def test_clipping_is_off_unless_the_file_says_so():
    assert make_plan(SD, "ddim", 5).clip_sample_range is None
    assert make_plan({**SD, "clip_sample": True}, "ddim", 5).clip_sample_range == 1


def test_which_samplers_need_noise():
    assert [name for name in SAMPLERS if make_plan(SD, name, 5).stochastic] == [
        "ddpm",
        "euler_ancestral",
        "dpmpp_2m_sde",
        "lcm",
    ]
    assert make_plan(SD, "ddim", 5, eta=0.5).stochastic
    with pytest.raises(ValueError, match=re.escape("adds noise at its steps, and got none (ddim: with eta > 0)")):
        sample(lambda x, t: x, jnp.asarray(NOISE[0]), make_plan(SD, "ddpm", 5))


def predict(x: jax.Array, t: jax.Array, condition: dict[str, jax.Array]) -> jax.Array:
    assert t.shape == x.shape[:1]
    return x * condition["scale"][:, None, None, None] + condition["shift"][:, None, None, None] * jnp.square(x)


C, U = (
    {"scale": jnp.array(a, jnp.float32), "shift": jnp.array(b, jnp.float32)} for a, b in (([2, 3], [1, 0]), ([5, 7], [2, 3]))
)


def test_guidance():
    batches = []
    counted = lambda x, t, condition: batches.append(len(x)) or predict(x, t, condition)
    x, t = jnp.asarray(NOISE[0]), jnp.zeros(2, jnp.int32)
    c, u = predict(x, t, C), predict(x, t, U)
    for scale in (0.0, 1.0, 4.0):
        found = guided(counted, C, U, scale)(x, jnp.int32(3))
        np.testing.assert_allclose(found, u + max(scale, 1.0) * (c - u), rtol=1e-5, atol=1e-5)
    assert batches == [2, 2, 4]


def test_guidance_rescale_equals_diffusers():
    x, t = jnp.asarray(NOISE[0]), jnp.zeros(2, jnp.int32)
    c, u = (np.array(predict(x, t, condition)) for condition in (C, U))
    for rescale in (0.0, 0.7, 1.0):
        found = guided(predict, C, U, 7.5, rescale)(x, jnp.int32(3))
        expected = rescale_noise_cfg(torch.from_numpy(u + 7.5 * (c - u)), torch.from_numpy(c), rescale)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=re.escape("guidance_rescale=1.1 must lie in [0, 1]")):
        guided(predict, C, U, 7.5, 1.1)


EPSILON = "prediction_type='epsilon' cannot begin at a timestep of zero signal-to-noise ratio (rescale_betas_zero_snr=True)"


@pytest.mark.parametrize(
    ("sampler", "changed", "steps", "options", "message"),
    [
        ("ddim", {}, 0, {}, "num_inference_steps=0 must lie between 1 and num_train_timesteps=1000"),
        ("euler", {}, 1001, {}, "num_inference_steps=1001 must lie"),
        ("unipc", {}, 1000, {}, "num_inference_steps=1000 must lie between 1 and num_train_timesteps - 1 = 999"),
        ("lcm", {}, 51, {}, "num_inference_steps=51 must lie between 1 and original_inference_steps=50"),
        ("lcm", {"original_inference_steps": 1001}, 4, {}, "original_inference_steps=1001 must be at most num_train_timesteps=1000"),
        ("ddpm", {"steps_offset": 1}, 1000, {}, "steps_offset=1 with num_inference_steps=1000 leads to timestep 1000; allowed: at most 999"),
        ("ddim", {}, 10, {"eta": 1.5}, "eta=1.5 must lie in [0, 1]"),
        ("euler", {}, 10, {"eta": 0.5}, "eta=0.5 is for sampler='ddim'; with 'euler' allowed: 0"),
        ("ddim", {}, 10, {"strength": 0.0}, "strength=0.0 must lie in (0, 1] and leave at least one of num_inference_steps=10"),
        ("ddim", {}, 10, {"strength": 0.09}, "strength=0.09 must lie"),
        ("ddim", {}, 10, {"strength": 1.1}, "strength=1.1 must lie"),
        ("ddim", {"rescale_betas_zero_snr": True, **TRAILING}, 10, {}, EPSILON),
        ("ddpm", {"rescale_betas_zero_snr": True, **TRAILING}, 10, {}, EPSILON),
        ("lcm", {"rescale_betas_zero_snr": True}, 4, {}, EPSILON),
        ("unipc", {"lower_order_final": False}, 10, {}, "lower_order_final=False with final_sigmas_type='zero' has no finite last step"),
        ("ddim", {"trained_betas": [0.0, 0.5, 0.5], "num_train_timesteps": 3}, 3, {}, "trained_betas have no noise at timestep 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_said(sampler: str, changed: dict, steps: int, options: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan({**SD, **changed}, sampler, steps, **options)


def test_image_to_image_may_begin_after_the_timestep_without_signal():
    make_plan({**SD, **TRAILING, "rescale_betas_zero_snr": True}, "ddim", 10, strength=0.9)
