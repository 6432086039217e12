"""How parameters move: learning-rate schedules, the optimizers, and the moving average of weights.

An optimizer is an optax chain: clip the gradient's norm, scale by moments, decay weights, scale by the
learning rate. Weight decay is decoupled and multiplied by the learning rate for all three, as in torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Schedule = Callable[[Any], jax.Array]
Tree = Any  # nested dicts of arrays, with leaves named kernel, scale, embedding, bias

# What is left of the peak, from what is left of the steps (1 after warm-up, 0 at the end). In this form,
# and with the half cosine as a squared sine, small rates keep their relative precision in float32.
_DECAYS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "constant": lambda left, _: jnp.ones_like(left),
    "linear": lambda left, _: left,
    "cosine": lambda left, _: jnp.square(jnp.sin(math.pi / 2 * left)),
    "polynomial": lambda left, power: left**power,
}


def learning_rate_schedule(
    name: str, peak: float, warmup_steps: int, total_steps: int, *, power: float = 1.0, end: float = 0.0
) -> Schedule:
    """A function of the number of updates already made, equal to diffusers' get_scheduler.

    The first update is evaluated at 0, like torch's LambdaLR, so with warm-up it has rate 0. The rate rises
    linearly to `peak` at warmup_steps, then falls to `end` at total_steps and stays there. The schedule
    constant does not fall. `power` is that of polynomial.

    Raises:
        ValueError: for an unknown name, or numbers outside what is allowed.
    """
    _check_member("learning_rate_schedule", name, _DECAYS)
    _check_not_negative(learning_rate=peak)
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must lie between 0 and the {total_steps} steps of the run")
    if not 0 <= end <= peak:
        raise ValueError(f"the final learning rate {end} must lie between 0 and learning_rate={peak}")
    if not 0 < power < math.inf:
        raise ValueError(f"the power {power} of the polynomial schedule must be above 0")

    def rate(count: Any) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        rising = count.astype(jnp.float32) / max(1, warmup_steps)
        left = jnp.maximum(total_steps - count, 0).astype(jnp.float32) / max(1, total_steps - warmup_steps)
        # Clipped, so that powers of the numbers not chosen stay finite.
        falling = _DECAYS[name](jnp.minimum(left, 1.0), power)
        return jnp.where(count < warmup_steps, peak * rising, end + (peak - end) * falling)

    return rate


def make_optimizer(
    name: str,
    learning_rate: Schedule | Mapping[str, Schedule],
    *,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_norms_and_biases: bool = True,
    max_grad_norm: float | None = 1.0,
    moment_dtypes: tuple[str, str] = ("float32", "float32"),
) -> optax.GradientTransformationExtraArgs:
    """An optax chain for float32 parameters.

    Args:
        name: adamw (Loshchilov & Hutter 2019), adafactor (Shazeer & Stern 2018) or lion (Chen et al. 2023).
        learning_rate: of the number of updates made; or one for each key at the top of the parameters
            ({"unet": ..., "text_encoder": ...}). The norm is clipped over all of them together.
        betas: decay of both moments; None is (0.9, 0.999), for lion (0.9, 0.99). Adafactor reads neither.
        eps: added to adamw's root of the second moment; the others do not read it.
        weight_decay: per update, times the learning rate.
        decay_norms_and_biases: whether parameters named scale and bias decay too.
        max_grad_norm: the gradient's global norm is scaled down to this; None or <= 0 is off.
        moment_dtypes: in which the first and second moments are stored, float32 or bfloat16; see `_stored`.

    Raises:
        ValueError: for an unknown name or dtype, or numbers outside what is allowed.
    """
    _check_member("optimizer", name, _OPTIMIZERS)
    if betas is not None and not all(0 <= b < 1 for b in betas):
        raise ValueError(f"the optimizer's betas {tuple(betas)} must lie in [0, 1)")
    _check_not_negative(eps=eps, weight_decay=weight_decay)
    for dtype in moment_dtypes:
        _check_member("moment_dtype", dtype, _DTYPES)
    return optax.chain(
        _clip(max_grad_norm) if max_grad_norm is not None and max_grad_norm > 0 else optax.identity(),
        _OPTIMIZERS[name](betas, eps, moment_dtypes),
        optax.add_decayed_weights(weight_decay, None if decay_norms_and_biases else decay_mask),
        _scale_by_learning_rate(learning_rate),
    )


def decay_mask(params: Tree) -> Tree:
    """True for each leaf that is neither a norm's scale nor a bias, by the last name of its path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)


def apply_updates(params: Tree, updates: Tree, count: jax.Array) -> Tree:
    """params + updates, added in float32 and stored in the parameters' dtype.

    Rounding to bfloat16 is stochastic: most updates are less than half of its spacing, and would be lost.

    Args:
        count: the number of the update, int32 [].
    """

    def add(p: jax.Array, u: jax.Array) -> jax.Array:
        moved = p.astype(jnp.float32) + u.astype(jnp.float32)
        return _round_stochastically(moved, count) if p.dtype == jnp.bfloat16 else moved.astype(p.dtype)

    return jax.tree.map(add, params, updates)


def ema_decay(step: Any, decay: float, warmup: bool = True, start_step: int = 0) -> jax.Array:
    """The decay to use after update number `step` (the first is 1), float32; as diffusers' EMAModel.

    With n = step - start_step - 1 it is 0 for n <= 0, so that the average equals the parameters until then;
    afterwards min(decay, (1 + n) / (10 + n)) if `warmup`, else `decay`.

    Raises:
        ValueError: for a decay outside [0, 1) or a negative start_step.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema_decay={decay} must lie in [0, 1)")
    if start_step < 0:
        raise ValueError(f"ema_start_step={start_step} must be 0 or more")
    n = jnp.maximum(jnp.asarray(step, jnp.int32) - start_step - 1, 0).astype(jnp.float32)
    limit = jnp.minimum(decay, (1 + n) / (10 + n)) if warmup else jnp.full_like(n, decay)
    return jnp.where(n > 0, limit, 0.0)


def update_ema(ema: Tree, params: Tree, decay: jax.Array) -> Tree:
    """decay * ema + (1 - decay) * params, leaf by leaf, in the average's dtype (float32)."""
    # In this form a decay of 0 gives the parameters, and parameters at rest their own value, to the bit.
    return jax.tree.map(lambda e, p: p.astype(e.dtype) + decay.astype(e.dtype) * (e - p.astype(e.dtype)), ema, params)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale updates so that their global norm is at most this; `update` takes it as `norm` where it is known."""

    def update(updates: Tree, state: Any, params: Tree = None, *, norm: jax.Array | None = None, **_: Any) -> tuple[Tree, Any]:
        del params
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def _scale_by_learning_rate(learning_rate: Schedule | Mapping[str, Schedule]) -> optax.GradientTransformation:
    if not isinstance(learning_rate, Mapping):
        return optax.scale_by_learning_rate(learning_rate)

    def init(params: Tree) -> jax.Array:
        del params
        return jnp.zeros([], jnp.int32)  # updates made

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        del params
        if updates.keys() != learning_rate.keys():
            raise ValueError(f"learning rates for {sorted(learning_rate)}, but parameters {sorted(updates)}")
        rates = {key: -schedule(state) for key, schedule in learning_rate.items()}
        scaled = {key: jax.tree.map(lambda u, rate=rates[key]: rate * u, tree) for key, tree in updates.items()}
        return scaled, state + 1

    return optax.GradientTransformation(init, update)


def _adamw(betas: tuple[float, float] | None, eps: float, dtypes: tuple[str, str]) -> optax.GradientTransformation:
    # Rounded to float32 first: optax takes 1 - b2 in double but 1 - b2**n in float32, 1.3e-5 apart for 0.999.
    b1, b2 = (float(np.float32(b)) for b in betas or (0.9, 0.999))
    return _stored(optax.scale_by_adam(b1, b2, eps), {"mu": dtypes[0], "nu": dtypes[1]})


def _lion(betas: tuple[float, float] | None, _eps: float, dtypes: tuple[str, str]) -> optax.GradientTransformation:
    b1, b2 = betas or (0.9, 0.99)
    return _stored(optax.scale_by_lion(b1, b2), {"mu": dtypes[0]})


def _adafactor(_betas: Any, _eps: float, dtypes: tuple[str, str]) -> optax.GradientTransformation:
    # optax.adafactor would decay weights by weight_decay itself, not times the learning rate.
    moments = optax.scale_by_factored_rms()
    return optax.chain(
        _stored(moments, dict.fromkeys(("v_row", "v_col", "v"), dtypes[1])),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


_OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "lion": _lion}
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def _stored(inner: optax.GradientTransformation, dtypes: dict[str, str]) -> optax.GradientTransformation:
    """`inner`, computing in float32, with these fields of its state stored in these dtypes.

    Rounding to bfloat16 is stochastic. A second moment with b2 = 0.999 shrinks by at most 0.1% per update, less
    than half of bfloat16's spacing: rounded to nearest it would never fall (optax, too, offers only mu_dtype).
    """
    rounding = {"float32": lambda x, _: x.astype(jnp.float32), "bfloat16": _round_stochastically}

    def store(state: Any) -> Any:
        fields = {name: (getattr(state, name), rounding[dtype]) for name, dtype in dtypes.items()}
        return state._replace(
            **{name: jax.tree.map(lambda x, r=r: r(x, state.count), tree) for name, (tree, r) in fields.items()}
        )

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        state = state._replace(**{name: optax.tree.cast(getattr(state, name), jnp.float32) for name in dtypes})
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python's floats to the power of int32 counts
            updates, state = inner.update(updates, state, params)
        return updates, store(state)

    return optax.GradientTransformation(lambda params: store(inner.init(params)), update)


def _round_stochastically(x: jax.Array, count: jax.Array) -> jax.Array:
    """float32 to bfloat16, up or down with the probabilities that keep the mean.

    The dice are a hash of the value and the number of updates (MurmurHash3's finaliser): the same on any mesh and
    after a restart, and without the compile time of a random draw for each parameter.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    dice = bits ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        dice = (dice ^ (dice >> jnp.uint32(shift))) * jnp.uint32(factor)
    rounded = (bits + (dice >> jnp.uint32(16))) >> jnp.uint32(16)
    return jax.lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)


def _check_member(key: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key}={value!r} is unknown; allowed: {', '.join(allowed)}")


def _check_not_negative(**values: float) -> None:
    for key, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{key}={value} must be 0 or more, and finite")
