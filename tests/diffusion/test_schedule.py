"""The noise schedule against diffusers' DDPMScheduler and against the formulas written out."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from maxdiff.diffusion.schedule import NoiseSchedule, add_noise, noise_schedule, snr, velocity

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CONFIGS = {
    "defaults": {},
    "sd": SD,
    "sd, zero snr": {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    "linear, zero snr": {"rescale_betas_zero_snr": True},
    "cosine": {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample"},
    "odd number": {**SD, "num_train_timesteps": 37},
    "trained": {"trained_betas": [0.1, 0.2, 0.4], "num_train_timesteps": 3},
}


def batch(t: list[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x0, noise = (jnp.asarray(rng.standard_normal((len(t), 2, 3, 4)), jnp.float32) for _ in range(2))
    return x0, noise, jnp.array(t, jnp.int32)


@pytest.fixture
def rounded_roots(monkeypatch: pytest.MonkeyPatch):
    """torch's float32 roots rounded to the nearest, as IEEE 754 has it.

    On AMD's processors MKL, which torch takes them by, is often a last bit off, and a schedule of zero terminal SNR ends in
    differences of such roots.
    """
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.sqrt(x.double()).to(x.dtype))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_diffusers(rounded_roots, config):
    ours, theirs = noise_schedule(config), DDPMScheduler(**config)
    assert ours.alphas_cumprod.dtype == np.float32
    assert ours.prediction_type == theirs.config.prediction_type
    np.testing.assert_allclose(ours.alphas_cumprod, theirs.alphas_cumprod.numpy(), rtol=1e-6)

    t = [0, 1, ours.num_timesteps // 2, ours.num_timesteps - 1]
    arrays = batch(t)
    tensors = [torch.from_numpy(np.array(a)) for a in arrays]
    for mine, other in [(add_noise, theirs.add_noise), (velocity, theirs.get_velocity)]:
        value = mine(ours, *arrays)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, other(*tensors[:2], tensors[2].long()).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(snr(ours, arrays[2]), compute_snr(theirs, tensors[2].long()).numpy(), rtol=1e-5)


def test_zero_terminal_snr_follows_algorithm_1():
    abar = np.sqrt(np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2))
    expected = ((abar - abar[-1]) * abar[0] / (abar[0] - abar[-1])) ** 2
    got = noise_schedule({**SD, "rescale_betas_zero_snr": True})
    np.testing.assert_allclose(got.alphas_cumprod, expected, rtol=1e-4, atol=1e-9)
    assert got.alphas_cumprod[-1] == 0
    x0, noise, t = batch([999])
    assert snr(got, t)[0] == 0
    np.testing.assert_array_equal(add_noise(got, x0, noise, t), noise)
    np.testing.assert_array_equal(velocity(got, x0, noise, t), -x0)


def test_formulas():
    schedule = NoiseSchedule(np.array([0.9, 0.36, 0.1], np.float32))
    x0, noise, t = batch([1, 1])
    np.testing.assert_allclose(add_noise(schedule, x0, noise, t), 0.6 * x0 + 0.8 * noise, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(velocity(schedule, x0, noise, t), 0.6 * noise - 0.8 * x0, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(snr(schedule, jnp.array([0, 1, 2])), [9, 0.5625, 1 / 9], rtol=1e-6)


def test_no_noise_is_infinite_snr():
    schedule = noise_schedule({"trained_betas": [0.0, 0.5], "num_train_timesteps": 2})
    assert snr(schedule, jnp.array([0]))[0] == jnp.inf


def test_keys_of_samplers_are_ignored():
    config = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None, **SD}
    np.testing.assert_array_equal(noise_schedule(config).alphas_cumprod, noise_schedule(SD).alphas_cumprod)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"beta_schedule": "sigmoid"}, "beta_schedule='sigmoid' is unknown; allowed: linear, scaled_linear, squaredcos_cap_v2"),
        ({"beta_schedule": ["linear"]}, "beta_schedule=['linear'] is unknown"),
        ({"prediction_type": "flow"}, "prediction_type='flow' is unknown; allowed: epsilon, v_prediction, sample"),
        ({"num_train_timesteps": 1}, "num_train_timesteps=1 must be an integer of at least 2"),
        ({"num_train_timesteps": 10.0}, "num_train_timesteps=10.0"),
        ({"num_train_timesteps": True}, "num_train_timesteps=True"),
        ({"beta_start": 0}, "beta_start=0 must be a number between 0 and 1"),
        ({"beta_end": 1.5}, "beta_end=1.5 must be"),
        ({"beta_end": "0.02"}, "beta_end='0.02' must be"),
        ({"rescale_betas_zero_snr": "yes"}, "rescale_betas_zero_snr='yes' must be true or false"),
        ({"trained_betas": [0.1, 0.2]}, "trained_betas of shape [2] must have num_train_timesteps=1000 entries"),
        ({"trained_betas": [0.1, 1.2], "num_train_timesteps": 2}, "must all lie in [0, 1]"),
        ({"trained_betas": [0.1, float("nan")], "num_train_timesteps": 2}, "must all lie in [0, 1]"),
        ({"trained_betas": [0.0, 0.0], "num_train_timesteps": 2, "rescale_betas_zero_snr": True}, "signal falls"),
    ],
)
def test_bad_values_are_named(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        noise_schedule(config)
