"""Compile a run's training step for TPUs that are not here: whether it fits, and what it sends.

    python -m maxdiff.aot configs/base15.yml topology=v5p-128 [num_slices=2] [optimization=full] [key=value ...] [--json]

It is the step that train.py makes, from the same configuration by the same functions, with the same shardings and donated
state, compiled by libtpu (pip install 'maxdiff[tpu]') on a CPU. Nothing is downloaded but configurations, and no images are
needed. `optimization=quick`, the default, compiles in minutes; `full` as a TPU would, in several times as many.
"""

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff import build, command, hlo, inputs
from maxdiff.config import Config
from maxdiff.data import encode
from maxdiff.sharding import Layout, make_mesh
from maxdiff.state import TrainState
from maxdiff.task import Task, make_task
from maxdiff.topologies import GIB, Topology, parse

# For libtpu, before it is loaded: it need not look for a TPU of this host, and other processes may load it too.
WITHOUT_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
               "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}  # fmt: skip
LEVELS = {"quick": "O1", "full": "UNKNOWN"}
USAGE = "python -m maxdiff.aot CONFIG.yml topology=NAME [num_slices=N] [optimization=quick|full] [key=value ...] [--json]"


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step before it is compiled.

    Attributes:
        config: with its global batch written out.
        accumulation: micro-batches of a batch.
        state, constants, batch: what it is called with, as jax.ShapeDtypeStructs with shardings.
        lowered: for jax's `compile`.
    """

    config: Config
    mesh: Mesh
    task: Task
    accumulation: int
    state: TrainState
    constants: Mapping[str, Any]
    batch: Mapping[str, Any]
    lowered: Any


def lower(config: Config, devices: Sequence[Any]) -> Step:
    """The step that train.py would make on these devices, which need not be here.

    Raises:
        ValueError: as train.py does, for what does not fit together.
    """
    section = config.mesh
    mesh = make_mesh(section.mesh_axes, section.sizes("ici"), section.sizes("dcn"), devices=devices,
                     allow_split_physical_axes=section.allow_split_physical_axes)  # fmt: skip
    layout = Layout(mesh, section.logical_axis_rules, section.max_replicated_mib)
    config, accumulation = build.settle_batch(config, mesh)
    task = make_task(config, layout, None, abstract=True)
    optimizer = build.make_adam(config, build.make_rates(config, task))
    state = build.abstract_of(config, layout, task, optimizer)
    task, batch = _batch(config, mesh, task)
    whole = NamedSharding(mesh, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
    step = build.make_step(config, layout, task, optimizer, state, accumulation)
    lowered = step.lower(state, task.constants, batch, key)
    return Step(config, mesh, task, accumulation, state, task.constants, batch, lowered)


def _batch(config: Config, mesh: Mesh, task: Task) -> tuple[Task, dict[str, Any]]:
    """(the task, a batch of it); of what would be encoded before, where the configuration says so."""
    split = build.batch_sharding(mesh)
    images = inputs.abstract_batch(inputs.make_plan(config), list(task.tokenizers.values()), split)
    if not config.data.cache_latents_text_encoder_outputs:
        return task, images
    encode.check_trains(config)
    program = encode.encoder(task, jnp.dtype(config.data.encoded_dtype))
    encoded = jax.eval_shape(program, task.constants["frozen"], images)
    kept = {name: images[name] for name in ("position", "original_size", "crop")}
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for name, x in encoded.items()}
    whole = NamedSharding(mesh, PartitionSpec())
    texts = {f"empty_{name}": jax.ShapeDtypeStruct(encoded[name].shape[1:], encoded[name].dtype, sharding=whole)
             for name in ("states", "pooled") if name in encoded}  # fmt: skip
    task = task.from_encoded({}, config.data.resolution)
    return dataclasses.replace(task, constants={**task.constants, **texts}), {**batch, **kept}


def report(step: Step, topology: Topology, level: str) -> dict[str, Any]:
    """Compile a step; what a chip then holds and sends, and whether it fits."""
    started = time.perf_counter()
    mesh, batch = step.mesh, step.config.batch
    found: dict[str, Any] = {
        "topology": str(topology), "chips": topology.chips, "mesh": dict(mesh.shape), "devices": mesh.size,
        "per_device_batch": batch.per_device_batch_size, "global_batch": batch.global_batch_size,
        "accumulation": step.accumulation, "optimization": level, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"),
        "bytes": held(step), "hbm": topology.of.hbm,
        "flops": step.task.flops * batch.global_batch_size / topology.chips,
    }  # fmt: skip
    jax.config.update("jax_optimization_level", LEVELS[level])
    try:
        compiled = step.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found |= _too_much(str(error))
    else:
        memory = compiled.memory_analysis()
        places = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
        found["bytes"] |= {"arguments": memory.argument_size_in_bytes, "peak": memory.peak_memory_in_bytes,
                           "activations": memory.peak_memory_in_bytes - memory.argument_size_in_bytes}  # fmt: skip
        found |= {"fits": True, "collectives": hlo.totals(hlo.collectives(compiled.as_text(), places.__getitem__))}
    return found | {"compile_s": round(time.perf_counter() - started, 1)}


def held(step: Step) -> dict[str, int]:
    """Bytes that each device has between steps, and of its batch."""
    parts = {"parameters": step.state.params, "average": step.state.ema, "moments": step.state.opt_state,
             "frozen": step.constants, "batch": step.batch}  # fmt: skip
    return {name: sum(map(_share, jax.tree.leaves(tree))) for name, tree in parts.items()}


def _share(leaf: Any) -> int:
    """Of an array, on each device that has a part of it."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _too_much(message: str) -> dict[str, Any]:
    """What XLA says when a program needs more memory than a chip has."""
    sizes = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+)([KMGT])\)", message)
    match = match or re.search(r"Used ([\d.]+)([KMGT])\w* of ([\d.]+)([KMGT])\w* hbm", message)
    if not match:
        return {"fits": False, "said": message.splitlines()[0]}
    used, have = (round(float(match[i]) * sizes[match[i + 1]]) for i in (1, 3))
    return {"fits": False, "needs": used, "has": have, "too_much_by": used - have}


def describe(found: Mapping[str, Any]) -> list[str]:
    """A report as lines for people."""
    gib = lambda size: f"{size / GIB:.2f} GiB"
    shape = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    lines = [
        f"{found['topology']}: {found['chips']} chips, mesh {shape}",
        f"batch {found['global_batch']}: {found['per_device_batch']} a device at once, {found['accumulation']} times a step",
        *(f"{name}: {gib(size)} a device" for name, size in found["bytes"].items()),
        f"model FLOPs: {found['flops'] / 1e12:.2f} T a chip and step",
    ]
    if found["fits"]:
        lines.append(f"it FITS: {gib(found['bytes']['peak'])} of a chip's {gib(found['hbm'])}")
        for name, total in found["collectives"].items():
            lines.append(f"{name}: {total['count']} a step, {total['bytes'] / 2**20:.1f} MiB sent by a device")
    elif "needs" in found:
        lines.append(
            f"it does NOT fit: {gib(found['needs'])}, {gib(found['too_much_by'])} more than the {gib(found['has'])} there are"
        )
    else:
        lines.append(f"it does NOT fit: {found['said']}")
    lines.append(f"compiled in {found['compile_s']} s at optimization={found['optimization']}")
    return lines


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 1 if the step does not fit, 2 for a user's mistake."""
    if not argv or {"-h", "--help"} & set(argv):
        print(f"usage: {USAGE}")
        return 0
    options = {"topology": "", "num_slices": "1", "optimization": "quick"}
    for key in options:
        given = [argument.partition("=")[2] for argument in argv if argument.startswith(f"{key}=")]
        options[key] = given[-1] if given else options[key]
    rest = [argument for argument in argv if argument.partition("=")[0] not in options and argument != "--json"]
    fits = []

    def action(config: Config) -> None:
        topology = parse(options["topology"], _slices(options["num_slices"]))
        if options["optimization"] not in LEVELS:
            raise ValueError(f"optimization={options['optimization']!r} is not supported (allowed: {', '.join(LEVELS)})")
        found = report(lower(config, topology.devices()), topology, options["optimization"])
        fits.append(found["fits"])
        print(json.dumps(found) if "--json" in argv else "\n".join(describe(found)))

    return command.run("maxdiff.aot", rest, action) or int(not all(fits))


def _slices(given: str) -> int:
    if not given.isdigit() or int(given) < 1:
        raise ValueError(f"num_slices={given!r} is not supported (allowed: 1 or more)")
    return int(given)


if __name__ == "__main__":
    os.environ |= {**WITHOUT_TPU, **os.environ}
    sys.exit(main(sys.argv[1:]))
