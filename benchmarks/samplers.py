"""Our samplers beside diffusers' schedulers: whole trajectories on the same answers of a network, float32 on a CPU.

    python benchmarks/samplers.py     every sampler, kind of prediction and 1, 4, 20, 50 steps (half a minute)

Prints a table of the largest relative difference ||ours - diffusers|| / ||diffusers|| over the network's inputs and
the result. The network is half its input and a random table, so that every step's answer depends on the one before.
Stochastic samplers get the same noise. The exit status is 1 if a difference exceeds 1e-5.
"""

import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import io_callback

from maxdiff.diffusion.sampler import Plan, begin, make_plan, sample
from maxdiff.diffusion.sampler_config import CLASSES
from maxdiff.diffusion.schedule import PREDICTION_TYPES

diffusers.logging.set_verbosity_error()  # its schedulers warn of each other's keys

BOUND = 1e-5
STEPS = (1, 4, 20, 50)
# Stable Diffusion's own; every sampler's file has some of these keys.
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "set_alpha_to_one": False,
      "steps_offset": 1, "skip_prk_steps": True}  # fmt: skip
SHAPE = (2, 4, 3, 4)
ANSWERS = np.random.default_rng(0).standard_normal((101, *SHAPE)).astype(np.float32)
NOISE = np.random.default_rng(1).standard_normal((101, *SHAPE)).astype(np.float32)
LATENTS = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)


class Recorder:
    """A network that remembers each input and timestep."""

    def __init__(self):
        self.calls: list[tuple[np.ndarray, float]] = []

    def __call__(self, x: Any, t: Any) -> np.ndarray:
        x = np.asarray(x)
        answer = np.float32(0.5) * x + ANSWERS[len(self.calls)]
        self.calls.append((x, float(t)))
        return answer


_recorder = Recorder()


@jax.jit
def _run(plan: Plan, x: jax.Array, noise: jax.Array) -> jax.Array:
    answer = lambda x, t: io_callback(lambda *a: _recorder(*a), jax.ShapeDtypeStruct(SHAPE, jnp.float32), x, t, ordered=True)
    return sample(answer, x, plan, lambda i: noise[i])


def ours(config: Mapping[str, Any], sampler: str, steps: int, **options: Any) -> list[tuple[np.ndarray, float]]:
    """(input, timestep) of each evaluation of the network, and the result; options are `make_plan`'s."""
    global _recorder
    _recorder = Recorder()
    plan = make_plan(config, sampler, steps, **options)
    x = begin(plan, jnp.asarray(NOISE[-1]), jnp.asarray(LATENTS) if "strength" in options else None)
    result = np.asarray(_run(plan, x, NOISE))
    return [*_recorder.calls, (result, 0.0)]


def theirs(
    config: Mapping[str, Any],
    sampler: str,
    steps: int,
    *,
    eta: float = 0.0,
    strength: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[np.ndarray, float]]:
    """The same of diffusers, whose pipelines this follows; dtype is what its steps compute in."""
    scheduler, translated = make_scheduler(config, sampler)
    scheduler.set_timesteps(steps)
    noise, network = torch.from_numpy(NOISE).to(dtype), Recorder()
    if hasattr(scheduler, "sigmas"):
        scheduler.sigmas = scheduler.sigmas.to(dtype)
    x, start = noise[-1] * scheduler.init_noise_sigma, 0
    if strength is not None:
        start = (steps - int(steps * strength)) * scheduler.order
    if hasattr(scheduler, "set_begin_index"):
        # From an image as its pipelines do; from nothing so that a first timestep that rounding has doubled is not skipped.
        scheduler.set_begin_index(start)
    if strength is not None:
        x = scheduler.add_noise(torch.from_numpy(LATENTS).to(dtype), noise[-1], scheduler.timesteps[start : start + 1])
    module, current = importlib.import_module(type(scheduler).__module__), 0

    def drawn(*_args: Any, **_options: Any) -> torch.Tensor:
        return noise[current]

    # torch.float32 is where a scheduler says it.
    with mock.patch.object(module, "randn_tensor", drawn, create=True), mock.patch.object(torch, "float32", dtype):
        for current, t in enumerate(scheduler.timesteps[start:]):
            seen = scheduler.scale_model_input(x, t)
            answer = torch.from_numpy(network(seen.numpy(), t))
            if translated:
                answer = _as_epsilon(scheduler, seen, t, answer)
            given: dict[str, Any] = {"eta": eta} if eta else {}
            if sampler == "lms":
                # Where they begin in the middle, diffusers takes factors of an order that it has no slopes for.
                given["order"] = min(current + 1, 4)
            x = scheduler.step(answer, t, x, **given).prev_sample
    return [*network.calls, (x.numpy(), 0.0)]


def make_scheduler(config: Mapping[str, Any], sampler: str) -> tuple[Any, bool]:
    """diffusers' scheduler, and whether it must be given epsilon where the network predicts x_0."""
    given = dict(config)
    cls = getattr(diffusers, CLASSES[sampler])
    if sampler in ("ddpm", "ddim"):
        given.setdefault("clip_sample", False)  # the one default that differs
    if sampler.startswith("dpmpp"):
        given["algorithm_type"] = "sde-dpmsolver++" if sampler == "dpmpp_2m_sde" else "dpmsolver++"
    # Those two know no prediction of x_0.
    translated = sampler in ("pndm", "euler_ancestral") and config.get("prediction_type") == "sample"
    if translated:
        given["prediction_type"] = "epsilon"
    return cls.from_config(given), translated


def _as_epsilon(scheduler: Any, x: torch.Tensor, t: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    if hasattr(scheduler, "sigmas"):
        abar = 1 / (scheduler.sigmas[scheduler.step_index].double() ** 2 + 1)
    else:
        abar = scheduler.alphas_cumprod[t].double()
    return ((x - abar.sqrt() * x0) / (1 - abar).sqrt()).to(x.dtype)


def difference(config: Mapping[str, Any], sampler: str, steps: int, **options: Any) -> float:
    """The largest relative difference over the trajectory; infinite if the timesteps differ."""
    return distance(ours(config, sampler, steps, **options), theirs(config, sampler, steps, **options))


def distance(found: list[tuple[np.ndarray, float]], expected: list[tuple[np.ndarray, float]]) -> float:
    """The same, of two trajectories."""
    if len(found) != len(expected) or not np.allclose([t for _, t in found], [t for _, t in expected], rtol=1e-6, atol=1e-4):
        return np.inf
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for (a, _), (b, _) in zip(found, expected, strict=True)]
    return float(np.max(np.nan_to_num(errors, nan=np.inf)))


def rows() -> Iterator[tuple[str, str, list[float]]]:
    """(sampler, prediction type, the difference for each of STEPS)."""
    for sampler in CLASSES:
        for prediction in PREDICTION_TYPES:
            config = {**SD, "prediction_type": prediction}
            yield sampler, prediction, [difference(config, sampler, steps) for steps in STEPS]


def main(say: Callable[[str], None] = print) -> int:
    """Print the table; 1 if a difference exceeds the bound."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpy", "torch", "diffusers"))
    say(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}\n")
    say("| sampler | prediction type | " + " | ".join(f"{steps} steps" for steps in STEPS) + " |")
    say("|---|---|" + "---|" * len(STEPS))
    worst = 0.0
    for sampler, prediction, errors in rows():
        worst = max(worst, *errors)
        say(f"| {sampler} | {prediction} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
        sys.stdout.flush()
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
