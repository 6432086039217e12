"""Compile a run's training step for TPUs that are not here: whether it fits, and what it sends.

    python -m maxdiff.aot configs/base15.yml topology=v5p-128 [num_slices=2] [optimization=full] [key=value ...] [--json]

It is the step that train.py makes, from the same configuration by the same functions, with the same shardings and donated
state, compiled by libtpu (pip install 'maxdiff[tpu]') on a CPU. Nothing is downloaded but configurations, and no images are
needed. `optimization=full` compiles as a TPU would; `quick`, the default, optimizes less, and takes less time.

The step's time is an estimate (roofline.py); docs/TPU.md compares it with published ones. Where the step does not fit, settings
that would are predicted, the nearest first, and compiled until one does. Exit status: 0 it fits, 1 it does not, 2 a mistake,
3 the compiler failed.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff import build, command, fitting, hlo, inputs, roofline
from maxdiff.command import split_number
from maxdiff.config import KEYS, Config, closest
from maxdiff.data import encode
from maxdiff.data.encoded import EncodedSource, is_encoded
from maxdiff.data.pipeline import TOKEN_NAMES
from maxdiff.sharding import abstract, bytes_a_device
from maxdiff.state import TrainState
from maxdiff.task import Task, judges_images, make_task
from maxdiff.topologies import GIB, Topology, parse
from maxdiff.torus import slice_of

# For libtpu, before it is loaded: it need not look for a TPU of this host, and other processes may load it too.
WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
               "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}  # fmt: skip
LEVELS = {"quick": "O1", "full": "UNKNOWN"}
OPTIONS = "topology=NAME [num_slices=N] [optimization=quick|full] [--json]"
USAGE = f"python -m maxdiff.aot CONFIG.yml [OTHER.yml ...] [key=value ...] {OPTIONS}"
OWN_KEYS = ("topology", "num_slices", "optimization")
UNCOMPILED = 3
OTHER_PROGRAMS = (
    "what draws validation_prompts and measures held-out images are programs of their own, which are not compiled here"
)


class Uncompiled(RuntimeError):
    """The compiler failed, and not for a lack of memory."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step before it is compiled.

    Attributes:
        config: with its global batch written out.
        accumulation: micro-batches of a batch.
        state, batch: what it is called with, beside the task's constants, as jax.ShapeDtypeStructs with shardings.
        lower: makes of it what jax's `compile` is a method of.
    """

    config: Config
    mesh: Mesh
    task: Task
    accumulation: int
    state: TrainState
    batch: Mapping[str, Any]
    lower: Callable[[], Any]

    def held(self) -> dict[str, int]:
        """Bytes that each device has between steps, and of its batch."""
        parts = {"parameters": self.state.params, "average": self.state.ema, "moments": self.state.opt_state,
                 "frozen": self.task.constants, "batch": self.batch}  # fmt: skip
        return {name: sum(map(bytes_a_device, jax.tree.leaves(tree))) for name, tree in parts.items()}


def prepare(config: Config, devices: Sequence[Any]) -> Step:
    """The step that train.py would make on these devices, which need not be here.

    Raises:
        ValueError: as train.py does, for what does not fit together.
    """
    layout = build.layout_of(config, devices)
    mesh, whole = layout.mesh, NamedSharding(layout.mesh, PartitionSpec())
    config, accumulation = build.settle_batch(config, mesh)
    task = make_task(config, layout, None, abstract=True)
    optimizer = build.make_adam(config, build.make_rates(config, task))
    state = build.abstract_of(config, layout, task, optimizer)
    task, batch = batch_of(config, mesh, task)
    key = abstract(jax.eval_shape(lambda: jax.random.key(0)), whole)
    step = build.make_step(config, layout, task, optimizer, state, accumulation)
    return Step(config, mesh, task, accumulation, state, batch, lambda: step.lower(state, task.constants, batch, key))


def batch_of(config: Config, mesh: Mesh, task: Task) -> tuple[Task, dict[str, Any]]:
    """(the task, an abstract batch of it); of what would be encoded before, where the configuration says so.

    Of such a task constants beside the frozen networks, which are gone if nothing needs them, are abstract.
    """
    split, whole = build.batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())
    images = inputs.abstract_batch(inputs.make_plan(config), list(task.tokenizers.values()), split)
    if not config.data.cache_latents_text_encoder_outputs and not is_encoded(config.data.train_data_dir):
        return task, images
    encode.check_trains(config)
    text = encode.encodes_text(config)
    if is_encoded(config.data.train_data_dir):
        source = EncodedSource(Path(config.data.train_data_dir))
        encode.check_text(config, source)
        text = source.has_text
    program = encode.encoder(task, jnp.dtype(config.data.encoded_dtype), text=text)
    encoded = jax.eval_shape(program, task.constants["frozen"], images)
    kept = {name: x for name, x in images.items() if name != "image" and not (text and name in TOKEN_NAMES)}
    one = lambda name: jax.ShapeDtypeStruct(encoded[name].shape[1:], encoded[name].dtype)
    texts = {f"empty_{name}": one(name) for name in ("states", "pooled") if name in encoded}
    task = task.from_encoded({}, config.data.resolution, text=text)
    frozen = task.constants["frozen"] if judges_images(config) else task.frozen_still(text=text)
    constants = {**task.constants, **abstract(texts, whole), "frozen": frozen}
    return dataclasses.replace(task, constants=constants), {**abstract(encoded, split), **kept}


def report(step: Step, topology: Topology, level: str) -> dict[str, Any]:
    """Compile a step; what a chip then holds and sends, whether it fits, and an estimate of its time.

    Raises:
        Uncompiled: if the compiler fails.
    """
    started = time.perf_counter()
    mesh, batch = step.mesh, step.config.batch
    found: dict[str, Any] = {
        "topology": str(topology), "chips": topology.chips, "mesh": dict(mesh.shape), "devices": mesh.size,
        "per_device_batch": batch.per_device_batch_size, "global_batch": batch.global_batch_size,
        "accumulation": step.accumulation, "optimization": level, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"),
        "notes": build.left_whole(step.config, mesh, step.task, step.state) + [OTHER_PROGRAMS] * judges_images(step.config),
        "bytes": step.held(),
        "flops": step.task.flops * batch.global_batch_size / topology.chips,
    }  # fmt: skip
    jax.config.update("jax_optimization_level", LEVELS[level])
    try:
        compiled = step.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise Uncompiled(str(error).splitlines()[0]) from error
        found |= _too_much(str(error), _beside(step))
    else:
        memory = compiled.memory_analysis()
        arguments, peak = memory.argument_size_in_bytes, memory.peak_memory_in_bytes
        needs = peak + _beside(step)
        found["bytes"] |= {"arguments": arguments, "activations": peak - arguments, "peak": peak}
        found |= _compared(needs, topology.of.hbm)
        try:
            found |= _sent_and_estimated(step, topology, compiled.as_text(), found["flops"])
        except ValueError as error:  # a form of HLO that is not known: what the compiler says of memory is said all the same
            found["notes"].append(f"what the step sends, and its time, could not be read: {error}")
    return found | {"compile_s": round(time.perf_counter() - started, 1)}


def _sent_and_estimated(step: Step, topology: Topology, text: str, flops: float) -> dict[str, Any]:
    """What a compiled step sends, and an estimate of its time; raises ValueError for what cannot be read of it."""
    chip = topology.of
    sent = hlo.totals(hlo.collectives(text, [slice_of(device) for device in step.mesh.devices.flat]))
    parts = roofline.seconds(roofline.work(text, chip.matrix), sent, chip, topology.linked)
    seconds = sum(parts.values())
    return {"collectives": sent,
            "estimate": {"step_s": seconds, "images_per_s": step.config.batch.global_batch_size / seconds,
                         "mfu": flops / chip.flops / seconds, "parts_s": parts}}  # fmt: skip


def predict(step: Step, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For a step that does not fit: settings that would, and what they would need, as predicted."""
    devices = list(step.mesh.devices.flat)
    fits = fitting.nearest(step.config, found["needs"], found["has"], lambda config: prepare(config, devices))
    return [{"set": changes, "needs": needs} for changes, needs in fits]


def confirm(step: Step, fits: Sequence[Mapping[str, Any]], topology: Topology, level: str) -> Iterator[dict[str, Any]]:
    """Reports of what `predict` found, up to the first that fits."""
    for fit in fits:
        other = prepare(fitting.changed(step.config, fit["set"]), list(step.mesh.devices.flat))
        try:
            found = report(other, topology, level)
        except Uncompiled as error:  # it is not to take the others along
            found = {"fits": False, "uncompiled": str(error)}
        yield {"set": fit["set"], **found}
        if found["fits"]:
            break


def _beside(step: Step) -> int:
    """Bytes of networks that the step does not need, as it trains from what they have encoded."""
    runs = lambda name: ("image" if name == "vae" else "input_ids") in step.batch
    idle = {name: params for name, params in step.task.constants["frozen"].items() if not runs(name)}
    return sum(map(bytes_a_device, jax.tree.leaves(idle)))


def _too_much(message: str, beside: int) -> dict[str, Any]:
    """What XLA says when a program needs more memory than a chip has, and what lies beside it there."""
    sizes = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+)([KMGT])\)", message)
    match = match or re.search(r"Used ([\d.]+)([KMGT])\w* of ([\d.]+)([KMGT])\w* hbm", message)
    if not match:
        return {"fits": False, "said": message.splitlines()[0]}
    used, have = (round(float(match[i]) * sizes[match[i + 1]]) for i in (1, 3))
    return _compared(used + beside, have)


def _compared(needs: int, has: int) -> dict[str, Any]:
    return {"fits": needs <= has, "needs": needs, "has": has}


def describe(found: Mapping[str, Any]) -> list[str]:
    """A report as lines for people."""
    names = {"activations": "activations, gradients and temporaries"}
    shape = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    lines = [
        f"{found['topology']}: {found['chips']} chips, mesh {shape}",
        f"batch {found['global_batch']}: {found['per_device_batch']} a device at once, {found['accumulation']} times a step",
        *(f"{names.get(name, name)}: {shown(size)} a device" for name, size in found["bytes"].items()),
        f"model FLOPs: {found['flops'] / 1e12:.2f} T a device and step",
    ]
    for name, total in found.get("collectives", {}).items():
        lines.append(f"{name}: {total['count']} a step, {total['bytes'] / 2**20:.1f} MiB sent by a device")
    if estimate := found.get("estimate"):
        lines.append(
            f"about {1e3 * estimate['step_s']:.0f} ms a step by rooflines, an ESTIMATE: "
            f"{estimate['images_per_s']:.0f} images/s, MFU {estimate['mfu']:.0%}"
        )
        parts = ", ".join(f"{name} {1e3 * part:.1f}" for name, part in estimate["parts_s"].items() if part)
        lines.append(f"of which, in ms: {parts}")
    if "needs" not in found:
        lines.append(f"it does NOT fit: {found['said']}")
    elif found["fits"]:
        beside = found["needs"] - found["bytes"]["peak"]
        of_these = f", the {shown(beside)} of networks among them that stay for pictures and held-out images" if beside else ""
        lines.append(f"it FITS: {shown(found['needs'])} of a device's {shown(found['has'])}{of_these}")
    else:
        over = shown(found["needs"] - found["has"])
        lines.append(f"it does NOT fit: {shown(found['needs'])}, {over} more than the {shown(found['has'])} there are")
    lines += [f"note: {note}" for note in found["notes"]]
    lines.append(f"compiled in {found['compile_s']} s at optimization={found['optimization']}")
    return lines


def describe_advice(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `predict` found, as lines for people."""
    if not fits:
        return ["no change of remat, batch, moment_dtype, fsdp or shard_optimizer is predicted to make it fit: take more chips"]
    return [f"would fit, as predicted: {written(fit['set'])} ({shown(fit['needs'])})" for fit in fits]


def shown(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def written(changes: Mapping[str, Any]) -> str:
    """Changes of a configuration as train.py takes them."""
    return " ".join(f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in changes.items())


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 1 if the step does not fit, 2 for a user's mistake, UNCOMPILED if the compiler fails."""
    if not argv or {"-h", "--help"} & set(argv):
        print(f"usage: {USAGE}")
        return 0
    as_json = "--json" in argv
    say = lambda lines: None if as_json else print("\n".join(lines), flush=True)
    rest, slices = split_number([argument for argument in argv if argument != "--json"], "num_slices")
    given = [(key, value) for key, equals, value in (argument.partition("=") for argument in rest) if equals]
    rest = [argument for argument in rest if argument.partition("=")[0] not in OWN_KEYS]
    fits = []

    def action(config: Config) -> None:
        options = _own(given)
        topology, level = parse(options["topology"], slices() or 1), options["optimization"]
        with contextlib.redirect_stdout(sys.stderr):  # what train.py says of a configuration
            step = prepare(config, topology.devices())
            found = report(step, topology, level)
        fits.append(found["fits"])
        say(describe(found))
        if not found["fits"] and "needs" in found:
            with contextlib.redirect_stdout(sys.stderr):
                found["would_fit"], found["compiled"] = predict(step, found), []
            say(describe_advice(found["would_fit"]))  # before they are compiled, which takes minutes
            for one in confirm(step, found["would_fit"], topology, level):
                found["compiled"].append(one)
                lines = [f"could not be compiled: {one['uncompiled']}"] if "uncompiled" in one else describe(one)
                say([f"with {written(one['set'])}:", *(f"    {line}" for line in lines)])
            if found["compiled"] and not found["compiled"][-1]["fits"]:
                say(["none of these fits: take more chips, or change more of it"])
        if as_json:
            print(json.dumps(found))

    try:
        check_own_keys(given)
        if not rest:  # which `command.run` takes for a call for help
            raise ValueError(f"which configuration? usage: {USAGE}")
        return command.run("maxdiff.aot", rest, action, OPTIONS) or int(not all(fits))
    except ValueError as error:
        return command.tell_mistake("maxdiff.aot", error)
    except Uncompiled as error:
        print(f"maxdiff.aot: the step could not be compiled: {error}", file=sys.stderr)
        return UNCOMPILED


def check_own_keys(given: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError for what is nearly one of OWN_KEYS: the configuration would not know it."""
    known = [*OWN_KEYS, *KEYS]
    for key, value in given:
        if key not in known and (close := closest(key, known)) in OWN_KEYS:
            raise ValueError(f"there is no key {key!r} (of {key}={value}); did you mean {close!r}?")


def _own(given: Sequence[tuple[str, str]]) -> dict[str, str]:
    """`topology` and `optimization`; raises ValueError for one that stands twice, or a level that there is not."""
    options = {"topology": "", "optimization": "quick"}
    for key in options:
        values = [value for name, value in given if name == key]
        if len(values) > 1:
            raise ValueError(f"{key}={','.join(values)} stands {len(values)} times (allowed: once)")
        options[key] = values[0] if values else options[key]
    if options["optimization"] not in LEVELS:
        raise ValueError(f"optimization={options['optimization']!r} is not supported (allowed: {', '.join(LEVELS)})")
    return options


if __name__ == "__main__":
    os.environ |= {**WITHOUT_TPU, **os.environ}
    jax.config.update("jax_platforms", "cpu")  # a TPU that is here is left to others
    sys.exit(main(sys.argv[1:]))
