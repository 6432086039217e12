"""Settings with which a step that needs too much memory would fit: predicted, the nearest first."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from maxdiff.config import Config, flat, make_config
from maxdiff.torus import slice_of

# What is kept of an example for the backward pass, as a share of what remat=none keeps; rounded up from figures in docs/TPU.md.
KEPT = {"none": 1.0, "dots": 0.5, "selective": 0.3, "full": 0.25}
Changes = dict[str, Any]


class Prepared(Protocol):
    """What is asked of a step before it is compiled, see aot.Step."""

    @property
    def config(self) -> Config: ...
    @property
    def mesh(self) -> Any: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def state(self) -> Any: ...
    def held(self) -> dict[str, int]: ...


def nearest(config: Config, needs: int, has: int, prepare: Callable[[Config], Prepared]) -> list[tuple[Changes, int]]:
    """The smallest changes with which a step would fit, and what it would need; empty if there are none.

    The more of per_device_batch_size is left the better; the optimizer step keeps its examples, by accumulation.

    Args:
        config: that of the step which needs `needs` bytes of a device.
        has: bytes of a device.
        prepare: makes the step of another configuration.
    """
    step = prepare(config)
    beyond = needs - sum(step.held().values())
    # XLA keeps less than all of it where it must.
    spared = max(0, _working(step) - beyond // 2)
    an_example = max(0.0, beyond - _working(step) + spared) / _examples(config)
    choices = _choices(config, step.mesh)
    for count in range(1, len(choices) + 1):
        fits = []
        for keys in itertools.combinations(choices, count):
            # The batch is changed last: what fits with the largest is found first.
            outermost = sorted(keys, key=lambda name: name != "batch")
            for values in itertools.product(*(choices[key] for key in outermost)):
                changes = {key: value for part in values for key, value in part.items()}
                try:
                    other = prepare(changed(config, changes))
                except ValueError:  # such as a kernel that so many chips don't divide
                    continue
                predicted = sum(other.held().values()) + _working(other) - spared + an_example * _examples(other.config)
                if predicted <= has:
                    fits.append((changes, round(predicted)))
                    break
        if fits:
            return fits
    return []


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with these keys."""
    return make_config({**flat(config), **changes})


def _choices(config: Config, mesh: Any) -> dict[str, list[Changes]]:
    """What can be changed, each to what keeps most first; a choice may take several keys."""
    found: dict[str, list[Changes]] = {}
    if mesh.shape.get("data", 1) > 1 and not config.optimizer.shard_optimizer:
        found["shard_optimizer"] = [{"shard_optimizer": True}]
    slices = len({*map(slice_of, mesh.devices.flat)})
    if {"data", "fsdp"} <= {*mesh.shape}:
        split = mesh.shape["data"] * mesh.shape["fsdp"] // slices
        sizes = [size for size in (4, 16, split) if mesh.shape["fsdp"] < size <= split and split % size == 0]
        found["fsdp"] = [{"ici_fsdp_parallelism": n, "ici_data_parallelism": split // n} for n in dict.fromkeys(sizes)]
    if config.optimizer.moment_dtype == "float32":
        found["moments"] = [{"moment_dtype": "bfloat16"}]
    found["remat"] = [{"remat": remat} for remat, kept in KEPT.items() if kept < KEPT[config.model.remat]]
    found["batch"] = [{"per_device_batch_size": size, "global_batch_size": config.batch.global_batch_size}
                      for size in _smaller(config.batch.per_device_batch_size)]  # fmt: skip
    return {name: values for name, values in found.items() if values}


def _smaller(size: int) -> Iterator[int]:
    """The proper divisors, the greatest first: so the global batch can be accumulated."""
    return (part for part in range(size // 2, 0, -1) if size % part == 0)


def _examples(config: Config) -> float:
    """Examples that a device takes at once, as activations go."""
    return config.batch.per_device_batch_size * KEPT[config.model.remat]


def _working(step: Prepared) -> int:
    """Bytes of a step that do not go with the batch: whole float32 gradients, and the weights where they are gathered.

    With fsdp a gradient is scattered as it comes; the sums of an accumulation, which is a loop, are whole, beside the gradients
    of a micro-batch.
    """
    numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(step.state.params))
    split = step.mesh.shape.get("fsdp", 1) > 1
    gradients = 8 if step.accumulation > 1 else 0 if split else 4
    gathered = jnp.dtype(step.config.model.activations_dtype).itemsize if split else 0
    return numbers * (gradients + gathered) // step.mesh.shape.get("tensor", 1)
