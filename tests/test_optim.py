"""Learning rates, optimizers and EMA against diffusers and torch, and the formulas written out."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from diffusers.optimization import get_polynomial_decay_schedule_with_warmup, get_scheduler
from diffusers.training_utils import EMAModel

from maxdiff.optim import apply_updates, decay_mask, ema_decay, learning_rate_schedule, make_optimizer, update_ema

STEPS, WARMUP, PEAK = 50, 7, 3e-4
CONSTANT = learning_rate_schedule("constant", 1e-2, 0, 100)


def torch_rates(make: Any, steps: int = STEPS) -> list[float]:
    """The rate with which each of torch's updates is made."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class TestLearningRate:
    @pytest.mark.parametrize("warmup", [0, WARMUP])
    @pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
    def test_equals_diffusers(self, name, warmup):
        theirs = "constant_with_warmup" if name == "constant" else name
        make = lambda o: get_scheduler(theirs, o, num_warmup_steps=warmup, num_training_steps=STEPS)
        schedule = learning_rate_schedule(name, PEAK, warmup, STEPS)
        ours = schedule(np.arange(STEPS + 1))
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, torch_rates(make), rtol=1e-6, atol=1e-18)

    @pytest.mark.parametrize(("power", "end"), [(1.0, 1e-7), (2.0, 0.0), (0.5, 1e-5)])
    def test_polynomial_equals_diffusers(self, power, end):
        make = lambda o: get_polynomial_decay_schedule_with_warmup(o, WARMUP, STEPS, end, power)
        ours = learning_rate_schedule("polynomial", PEAK, WARMUP, STEPS, power=power, end=end)(np.arange(STEPS + 1))
        np.testing.assert_allclose(ours, torch_rates(make), rtol=2e-6, atol=1e-18)

    @pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
    def test_stays_at_its_end(self, name):
        schedule = learning_rate_schedule(name, PEAK, WARMUP, STEPS, power=2.0)
        assert [float(schedule(n)) for n in (STEPS, STEPS + 1, 10 * STEPS)] == [0, 0, 0]

    def test_first_update_is_evaluated_at_zero(self):
        optimizer = make_optimizer("adamw", learning_rate_schedule("linear", PEAK, WARMUP, STEPS))
        params = {"kernel": jnp.ones(3)}
        updates, state = optimizer.update(params, optimizer.init(params), params)
        np.testing.assert_array_equal(updates["kernel"], np.zeros(3))
        updates, _ = optimizer.update(params, state, params)
        np.testing.assert_allclose(updates["kernel"], -PEAK / WARMUP * np.ones(3), rtol=1e-5)

    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            (("step", 1, 0, 9), {}, "learning_rate_schedule='step' is unknown; allowed: constant, linear, cosine, polynomial"),
            (("linear", -1.0, 0, 9), {}, "learning_rate=-1.0 must be 0 or more"),
            (("linear", 1.0, 10, 9), {}, "warmup_steps=10 must lie between 0 and the 9 steps"),
            (("linear", 1.0, -1, 9), {}, "warmup_steps=-1"),
            (("linear", 1.0, 0, 9), {"end": 2.0}, "final learning rate 2.0 must lie between 0 and learning_rate=1.0"),
            (("polynomial", 1.0, 0, 9), {"power": 0.0}, "power 0.0"),
        ],
    )
    def test_bad_values_are_named(self, arguments, options, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            learning_rate_schedule(*arguments, **options)


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "conv": {"kernel": (3, 4), "bias": (4,)},
        "norm": {"scale": (4,), "bias": (4,)},
        "blocks": {0: {"embedding": (5, 4)}},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def run(optimizer: optax.GradientTransformation, params: Any, gradient: Any, steps: int = 20) -> Any:
    """Parameters after `steps` updates with gradient(params)."""

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def run_torch(make: Any, params: Any, scale: float, max_norm: float | None, steps: int = 20, schedule: Any = None) -> Any:
    """The same on the quadratic whose gradient is scale * i * (p - 0.5), for the i-th leaf counted from 1."""
    leaves, structure = jax.tree.flatten(params)
    tensors = [torch.from_numpy(np.array(leaf)).requires_grad_() for leaf in leaves]
    optimizer = make(tensors)
    for n in range(steps):
        optimizer.zero_grad()
        sum((scale * i * (t - 0.5) ** 2 / 2).sum() for i, t in enumerate(tensors, 1)).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(tensors, max_norm)
        if schedule:
            for group in optimizer.param_groups:
                group["lr"] = float(schedule(n))
        optimizer.step()
    return structure.unflatten([t.detach().numpy() for t in tensors])


def quadratic(scale: float) -> Any:
    def gradient(params):
        leaves, structure = jax.tree.flatten(params)
        return structure.unflatten([scale * i * (p - 0.5) for i, p in enumerate(leaves, 1)])

    return gradient


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


class TestAdamW:
    @pytest.mark.parametrize("max_norm", [1.0, None])
    def test_equals_torch(self, max_norm):
        schedule = learning_rate_schedule("cosine", 0.05, 4, 25)
        make = lambda tensors: torch.optim.AdamW(tensors, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
        optimizer = make_optimizer("adamw", schedule, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=max_norm)
        # The gradient's norm starts above 1 and falls below.
        assert_close(run(optimizer, tree(), quadratic(0.2)), run_torch(make, tree(), 0.2, max_norm, schedule=schedule))

    def test_norms_and_biases_need_not_decay(self):
        def make(tensors):
            decays = jax.tree.leaves(decay_mask(tree()))
            groups = [{"params": [t], "weight_decay": 0.5 if d else 0.0} for t, d in zip(tensors, decays, strict=True)]
            return torch.optim.AdamW(groups, lr=1e-2)

        optimizer = make_optimizer("adamw", CONSTANT, weight_decay=0.5, decay_norms_and_biases=False)
        assert_close(run(optimizer, tree(), quadratic(1.0)), run_torch(make, tree(), 1.0, 1.0))

    def test_mask(self):
        assert decay_mask(tree()) == {
            "conv": {"kernel": True, "bias": False},
            "norm": {"scale": False, "bias": False},
            "blocks": {0: {"embedding": True}},
        }


def test_adafactor_equals_torch():
    """In two dimensions of at least 128, where torch and optax factor alike, and for vectors."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.standard_normal((130, 140)), jnp.float32), "scale": jnp.ones(4)}
    make = lambda tensors: torch.optim.Adafactor(tensors, lr=1e-2, weight_decay=0.1)
    optimizer = make_optimizer("adafactor", CONSTANT, weight_decay=0.1)
    # Torch decays before it measures the parameter's root mean square, optax measures first: 0.1% of a step.
    assert_close(run(optimizer, params, quadratic(1.0), 5), run_torch(make, params, 1.0, 1.0, 5), rtol=1e-4, atol=5e-5)
    undecayed = run(make_optimizer("adafactor", CONSTANT), params, quadratic(1.0), 5)
    make = lambda tensors: torch.optim.Adafactor(tensors, lr=1e-2, weight_decay=0.0)
    assert_close(undecayed, run_torch(make, params, 1.0, 1.0, 5))


@pytest.mark.parametrize(("betas", "b1", "b2"), [(None, 0.9, 0.99), ((0.8, 0.7), 0.8, 0.7)])
def test_lion(betas, b1, b2):
    """Algorithm 2 of Chen et al. 2023, arXiv 2302.06675."""
    p = np.array([1.0, -2.0, 0.1], np.float32)
    got = run(make_optimizer("lion", CONSTANT, betas=betas, weight_decay=0.3), {"kernel": jnp.asarray(p)}, lambda q: q, 10)
    m = np.zeros(3)
    for _ in range(10):
        g = p * min(1, 1 / np.linalg.norm(p))
        update = np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        p = p - 1e-2 * (update + 0.3 * p)
    np.testing.assert_allclose(got["kernel"], p, rtol=1e-5)


@pytest.mark.parametrize("off", [None, 0, -1.0])
def test_clipping_can_be_off(off):
    params = {"kernel": jnp.array([3.0, 4.0])}
    # Lion's state after one update is (1 - b2) times the gradient that it was given.
    momentum = lambda limit: optax.tree.get(
        (o := make_optimizer("lion", CONSTANT, max_grad_norm=limit)).update(params, o.init(params), params)[1], "mu"
    )
    np.testing.assert_allclose(momentum(off)["kernel"], [0.03, 0.04], rtol=1e-5)
    np.testing.assert_allclose(momentum(1.0)["kernel"], [0.006, 0.008], rtol=1e-5)


def test_clipping_takes_a_norm_that_is_known():
    params = {"kernel": jnp.array([3.0, 4.0])}
    optimizer = make_optimizer("lion", CONSTANT)
    _, state = optimizer.update(params, optimizer.init(params), params, norm=jnp.asarray(10.0))
    np.testing.assert_allclose(optax.tree.get(state, "mu")["kernel"], [0.003, 0.004], rtol=1e-5)


class TestMoments:
    @pytest.mark.parametrize("mu", ["float32", "bfloat16"])
    @pytest.mark.parametrize("nu", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
    def test_are_stored_as_asked(self, name, mu, nu):
        optimizer = make_optimizer(name, CONSTANT, moment_dtypes=(mu, nu), weight_decay=0.1, decay_norms_and_biases=False)
        params = tree()
        before = jax.eval_shape(optimizer.init, params)
        after = jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape, before, after[1]))
        assert {u.dtype for u in jax.tree.leaves(after[0])} == {jnp.dtype("float32")}
        fields = {"adamw": {"mu": mu, "nu": nu}, "lion": {"mu": mu}, "adafactor": {"v": nu, "v_row": nu, "v_col": nu}}[name]
        for field, dtype in fields.items():
            assert {leaf.dtype.name for leaf in jax.tree.leaves(optax.tree.get(before, field))} == {dtype}

    def test_bfloat16_trains_like_float32(self):
        exact, rounded = (
            run(make_optimizer("adamw", CONSTANT, moment_dtypes=(d, d)), tree(), quadratic(1.0))
            for d in ("float32", "bfloat16")
        )
        assert_close(rounded, exact, atol=0.01)
        assert not np.array_equal(rounded["conv"]["kernel"], exact["conv"]["kernel"])

    def test_small_updates_of_bfloat16_parameters_are_not_lost(self):
        rng = np.random.default_rng(0)
        start = jnp.asarray(rng.uniform(0.02, 0.06, 4096), jnp.bfloat16)  # where bfloat16's spacing is 1.2e-4 and more
        params = {"w": start}
        for count in range(1, 101):
            update = {"w": jnp.asarray(rng.normal(-1e-5, 1e-6, 4096), jnp.float32)}
            params = jax.jit(apply_updates)(params, update, jnp.int32(count))
        assert params["w"].dtype == jnp.bfloat16
        moved = params["w"].astype(jnp.float32) - start.astype(jnp.float32)
        assert float(moved.mean()) == pytest.approx(-1e-3, rel=0.02)
        whole = {"w": jnp.ones(3, jnp.float32)}
        np.testing.assert_array_equal(apply_updates(whole, {"w": jnp.full(3, 0.5)}, jnp.int32(1))["w"], [1.5] * 3)

    def test_bfloat16_second_moment_falls_as_it_should(self):
        """Rounding to nearest would leave it at its highest value for good."""
        optimizer = make_optimizer("adamw", CONSTANT, max_grad_norm=None, moment_dtypes=("float32", "bfloat16"))
        params = {"kernel": jnp.linspace(1.0, 3.0, 1000)}
        _, state = optimizer.update(params, optimizer.init(params), params)

        @jax.jit
        def coast(state):
            still = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.fori_loop(0, 700, lambda _, s: optimizer.update(still, s, params)[1], state)

        nu = optax.tree.get(coast(state), "nu")["kernel"].astype(jnp.float32)
        expected = 0.999**700 * 0.001 * params["kernel"] ** 2
        assert float((nu / expected).mean()) == pytest.approx(1, abs=0.01)
        np.testing.assert_allclose(nu, expected, rtol=0.25)

    @pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_optax_finds_the_moments(self, name, dtype):
        """Shardings of the state come from optax.tree.map_params."""
        rates = dict.fromkeys(tree(), CONSTANT)
        optimizer = make_optimizer(name, rates, moment_dtypes=(dtype, dtype), decay_norms_and_biases=False)
        params = tree()
        marks = jax.tree.map(lambda _: "sharded", params)
        state = jax.eval_shape(optimizer.init, params)
        marked = optax.tree.map_params(optimizer, lambda _, m: m, state, marks, transform_non_params=lambda _: "whole")
        count = len(jax.tree.leaves(params)) * {"adamw": 2, "adafactor": 3, "lion": 1}[name]
        assert jax.tree.leaves(marked).count("sharded") == count


def test_a_learning_rate_for_each_network():
    params = {"unet": tree(), "text_encoder": tree()}
    slow = learning_rate_schedule("constant", 1e-3, 0, 100)
    both = make_optimizer("adamw", {"unet": CONSTANT, "text_encoder": slow}, weight_decay=0.1)
    got = jax.jit(lambda p: both.update(p, both.init(p), p)[0])(params)
    for key, schedule in (("unet", CONSTANT), ("text_encoder", slow)):
        one = make_optimizer("adamw", schedule, weight_decay=0.1)
        assert_close(got[key], jax.jit(lambda p, one=one: one.update(p, one.init(p), p)[0])(params)[key])
    with pytest.raises(ValueError, match=re.escape("learning rates for ['text_encoder', 'unet'], but parameters ['unet']")):
        jax.eval_shape(lambda p: both.update(p, both.init(p), p), {"unet": tree()})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adam", {}, "optimizer='adam' is unknown; allowed: adamw, adafactor, lion"),
        ("adamw", {"betas": (0.9, 1.0)}, "betas (0.9, 1.0) must lie in [0, 1)"),
        ("adamw", {"eps": -1.0}, "eps=-1.0 must be 0 or more"),
        ("adamw", {"weight_decay": float("nan")}, "weight_decay=nan must be 0 or more"),
        ("adamw", {"moment_dtypes": ("float32", "float16")}, "moment_dtype='float16' is unknown; allowed: float32, bfloat16"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_optimizer(name, CONSTANT, **options)


class TestEma:
    @pytest.mark.parametrize("start", [0, 5])
    def test_decay_equals_diffusers(self, start):
        model = EMAModel([torch.zeros(1)], decay=0.7, update_after_step=start)
        steps = range(1, 60)
        expected = [model.get_decay(n) for n in steps]
        np.testing.assert_allclose(ema_decay(np.array(steps), 0.7, start_step=start), expected, rtol=1e-6)
        assert expected[-1] == 0.7
        assert expected[start] == 0

    def test_without_warmup(self):
        assert [float(ema_decay(n, 0.5, warmup=False, start_step=2)) for n in (1, 3, 4, 100)] == [0, 0, 0.5, 0.5]

    def test_average_equals_diffusers(self):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((12, 5)).astype(np.float32)
        model = EMAModel([torch.from_numpy(values[0])], decay=0.6, update_after_step=3)
        ema = {"kernel": jnp.asarray(values[0])}
        for step, value in enumerate(values, 1):
            model.step([torch.nn.Parameter(torch.from_numpy(value))])
            ema = update_ema(ema, {"kernel": jnp.asarray(value)}, ema_decay(step, 0.6, start_step=3))
            if step <= 4:
                np.testing.assert_array_equal(ema["kernel"], value)
        np.testing.assert_allclose(ema["kernel"], model.shadow_params[0].numpy(), rtol=1e-5, atol=1e-6)

    def test_parameters_at_rest_keep_their_value(self):
        params = tree()
        jax.tree.map(np.testing.assert_array_equal, update_ema(params, params, ema_decay(1000, 0.9999)), params)

    @pytest.mark.parametrize(
        ("decay", "start", "message"), [(1.0, 0, "ema_decay=1.0 must lie in [0, 1)"), (0.9, -1, "ema_start_step=-1")]
    )
    def test_bad_values_are_named(self, decay, start, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            ema_decay(1, decay, start_step=start)
