"""The training objective: every formula written out, and randomness that no split of the batch changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.diffusion import objective as objectives
from maxdiff.diffusion.objective import (
    Objective,
    Purpose,
    draw_timesteps,
    drop_caption,
    loss_weight,
    mean_loss,
    noisy_batch,
    timestep_probabilities,
    vae_noise,
)
from maxdiff.diffusion.schedule import NoiseSchedule, noise_schedule

KEY = jax.random.key(7)
EVERYTHING = Objective(
    snr_gamma=5.0,
    noise_offset=0.1,
    input_perturbation=0.2,
    caption_dropout=0.5,
    timestep_probabilities=timestep_probabilities(1000, "later", 3.0, 0, 0, 0.25),
)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
V = noise_schedule({**SD, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True})


def latents(n: int = 8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((n, 4, 4, 3)), jnp.float32)


def everything(x0: jax.Array, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
    """Every random thing that a step draws."""
    batch = noisy_batch(EVERYTHING, V, x0, key, positions)
    return {
        **batch._asdict(),
        "drop": drop_caption(EVERYTHING, key, positions),
        "vae": vae_noise(key, positions, x0.shape[1:]),
        "uniform_t": draw_timesteps(Objective(), V, key, positions),
    }


jitted = jax.jit(everything)


def assert_same(got, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def schedule_of(*abar: float, prediction_type: str = "epsilon") -> NoiseSchedule:
    return NoiseSchedule(np.array(abar, np.float32), prediction_type)


@functools.partial(jax.jit, static_argnums=2)
def normal(position: int, purpose: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.fold_in(KEY, position), purpose), shape)


class TestSplits:
    positions = jnp.arange(8, dtype=jnp.int32)

    def test_any_order(self):
        x0, order = latents(), np.random.default_rng(1).permutation(8)
        whole = jitted(x0, KEY, self.positions)
        assert_same(jitted(x0[order], KEY, self.positions[order]), {name: value[order] for name, value in whole.items()})

    def test_one_by_one_on_eight_devices(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, P("data"))
        x0, positions = (jax.device_put(a, split) for a in (latents(), self.positions))
        compiled = jitted.lower(x0, KEY, positions).compile()
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        assert_same(compiled(x0, KEY, positions), jitted(latents(), KEY, self.positions))

    def test_two_halves_in_an_accumulation_scan(self):
        x0 = latents()
        split = lambda a: a.reshape(2, 4, *a.shape[1:])
        body = lambda _, piece: (None, everything(piece[0], KEY, piece[1]))
        _, pieces = jax.jit(lambda *a: jax.lax.scan(body, None, a))(split(x0), split(self.positions))
        assert_same({k: v.reshape(8, *v.shape[2:]) for k, v in pieces.items()}, jitted(x0, KEY, self.positions))

    def test_steps_and_positions_differ(self):
        x0 = latents()
        now, then = jitted(x0, KEY, self.positions), jitted(x0, jax.random.key(8), self.positions)
        assert not np.array_equal(now["noisy"], then["noisy"])
        assert len({float(v) for v in now["vae"][:, 0, 0, 0]}) == 8


def test_what_is_drawn_for_what():
    """The formulas, one example at a time, from keys made by hand."""
    x0, positions = latents(), jnp.array([5, 0, 11, 1, 2, 3, 4, 2**31 - 1], jnp.int32)
    batch = jitted(x0, KEY, positions)
    assert batch["t"].dtype == jnp.int32
    for i, position in enumerate(positions.tolist()):
        abar = V.alphas_cumprod[batch["t"][i]]
        noise = normal(position, 0, (4, 4, 3)) + 0.1 * normal(position, 2, (1, 1, 3))
        seen = noise + 0.2 * normal(position, 3, (4, 4, 3))
        velocity = abar**0.5 * noise - (1 - abar) ** 0.5 * x0[i]
        np.testing.assert_allclose(batch["noisy"][i], abar**0.5 * x0[i] + (1 - abar) ** 0.5 * seen, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch["target"][i], velocity, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch["vae"][i], normal(position, 5, (4, 4, 3)), rtol=1e-6)


def test_purposes_keep_their_numbers():
    assert {p.name: p.value for p in Purpose} == {
        "NOISE": 0, "TIMESTEP": 1, "NOISE_OFFSET": 2, "INPUT_PERTURBATION": 3, "CAPTION_DROPOUT": 4, "VAE_SAMPLE": 5,
        "INITIAL_LATENTS": 6, "SAMPLER_STEP": 7,
    }  # fmt: skip


def test_bfloat16_latents_are_noised_in_float32():
    batch = jax.eval_shape(everything, latents().astype(jnp.bfloat16), KEY, jnp.arange(8, dtype=jnp.int32))
    assert {batch[name].dtype for name in ("noisy", "target", "weight")} == {jnp.dtype("float32")}


def test_targets():
    x0, noise, t = latents(1), latents(2)[1:], jnp.array([1], jnp.int32)
    for prediction_type, expected in [("epsilon", noise), ("v_prediction", 0.6 * noise - 0.8 * x0), ("sample", x0)]:
        schedule = schedule_of(0.9, 0.36, prediction_type=prediction_type)
        np.testing.assert_allclose(objectives.target(schedule, x0, noise, t), expected, rtol=1e-5, atol=1e-6)


# snr: 9, 1, 0 (zero terminal SNR); gamma 5.
@pytest.mark.parametrize(
    ("prediction_type", "expected"),
    [("epsilon", [5 / 9, 1, 1]), ("v_prediction", [5 / 10, 1 / 2, 0]), ("sample", [5, 1, 0])],
)
def test_min_snr_weights(prediction_type, expected):
    schedule = schedule_of(0.9, 0.5, 0.0, prediction_type=prediction_type)
    t = jnp.arange(3, dtype=jnp.int32)
    np.testing.assert_allclose(loss_weight(schedule, t, 5.0), expected, rtol=1e-6)
    for off in (None, 0, -1.0):
        np.testing.assert_array_equal(loss_weight(schedule, t, off), np.ones(3, np.float32))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_min_snr_is_one_loss_in_three_parametrisations(prediction_type):
    """With t fixed, an error of x_0 costs the same whichever way the network states it."""
    abar, gamma = 0.8, 2.0
    schedule = schedule_of(abar, prediction_type=prediction_type)
    x0, noise, wrong = latents(1), latents(2)[1:], latents(3)[2:]
    t = jnp.zeros(1, jnp.int32)
    x_t = abar**0.5 * x0 + (1 - abar) ** 0.5 * noise
    implied = (x_t - abar**0.5 * wrong) / (1 - abar) ** 0.5  # the noise, were x_0 `wrong`
    prediction = objectives.target(schedule, wrong, implied, t)
    loss = mean_loss(prediction, objectives.target(schedule, x0, noise, t), loss_weight(schedule, t, gamma))
    np.testing.assert_allclose(loss, [gamma * np.square(x0 - wrong).mean()], rtol=1e-5)


def test_mean_loss():
    prediction, target, weight = latents(2).astype(jnp.bfloat16), latents(4)[2:], jnp.array([1.0, 0.5])
    loss = mean_loss(prediction, target, weight)
    error = np.asarray(prediction, np.float32) - np.asarray(target)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [(error[0] ** 2).mean(), 0.5 * (error[1] ** 2).mean()], rtol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "biased"), [("earlier", range(250)), ("later", range(750, 1000)), ("range", range(200, 300))]
)
def test_timestep_bias(strategy, biased):
    expected = np.ones(1000)
    expected[list(biased)] = 4
    got = timestep_probabilities(1000, strategy, 4.0, 200, 300, 0.25)
    np.testing.assert_allclose(got, expected / expected.sum())
    assert timestep_probabilities(1000, "none", 4.0, 200, 300, 0.25) is None


def test_draws_are_distributed_as_asked():
    schedule, positions = schedule_of(*np.linspace(0.9, 0.1, 10)), jnp.arange(20_000, dtype=jnp.int32)
    later = timestep_probabilities(10, "later", 5.0, 0, 0, 0.3)

    @jax.jit
    def draw():
        t = [draw_timesteps(Objective(timestep_probabilities=p), schedule, KEY, positions) for p in (None, later)]
        dropped = [drop_caption(Objective(caption_dropout=p), KEY, positions) for p in (0.0, 0.1, 1.0)]
        return t, dropped, vae_noise(KEY, positions, (2,))

    timesteps, dropped, noise = draw()
    for t, expected in zip(timesteps, (np.full(10, 0.1), later), strict=True):
        np.testing.assert_allclose(np.bincount(t, minlength=10) / 20_000, expected, atol=0.01)
    assert [float(dropped[0].mean()), float(dropped[2].mean())] == [0, 1]
    assert float(dropped[1].mean()) == pytest.approx(0.1, abs=0.01)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("late", 2.0, 0, 10, 0.5), "timestep_bias_strategy='late' is unknown; allowed: none, earlier, later, range"),
        (("later", 0.0, 0, 10, 0.5), "timestep_bias_multiplier=0.0 must be above 0"),
        (("later", float("nan"), 0, 10, 0.5), "timestep_bias_multiplier=nan"),
        (("range", 2.0, -1, 10, 0.5), "timestep_bias_begin=-1, timestep_bias_end=10 must satisfy 0 <= begin < end <= 10"),
        (("range", 2.0, 0, 11, 0.5), "timestep_bias_end=11"),
        (("range", 2.0, 4, 4, 0.5), "timestep_bias_begin=4"),
        (("earlier", 2.0, 0, 10, 0.0), "timestep_bias_portion=0.0 must lie in (0, 1]"),
        (("later", 2.0, 0, 10, 1.5), "timestep_bias_portion=1.5 must lie in (0, 1]"),
        (("later", 2.0, 0, 10, 0.01), "timestep_bias_portion=0.01 must lie in (0, 1] and cover one of 10 timesteps"),
    ],
)
def test_bad_bias_is_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        timestep_probabilities(10, *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snr_gamma": float("inf")}, "snr_gamma=inf must be finite"),
        ({"noise_offset": -0.1}, "noise_offset=-0.1 must be 0 (off) or more"),
        ({"input_perturbation": float("nan")}, "input_perturbation=nan"),
        ({"caption_dropout": 1.1}, "caption_dropout=1.1 must lie in [0, 1]"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Objective(**options)


def test_probabilities_of_another_schedule():
    with pytest.raises(ValueError, match=re.escape("has shape [1000], but the schedule 2 timesteps")):
        noisy_batch(EVERYTHING, schedule_of(0.9, 0.1), latents(), KEY, jnp.arange(8, dtype=jnp.int32))


@pytest.mark.parametrize("key", [jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)], ids=["rbg", "raw"])
def test_only_threefry_keys(key):
    with pytest.raises(ValueError, match="must be jax.random.key"):
        vae_noise(key, jnp.arange(2, dtype=jnp.int32), (1,))
