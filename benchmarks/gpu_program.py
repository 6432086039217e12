"""What XLA makes of a training step for NVIDIA H200s, compiled where there is none, and the least that it can take.

    pip install -e '.[cuda]'
    python benchmarks/gpu_program.py --model sd2 --batch 4 use_ema=false [cache_latents_text_encoder_outputs=true]
    python benchmarks/gpu_program.py --gpus 2 ici_fsdp_parallelism=2

key=value is as for train.py. A minute or two and 3 GB of memory; SDXL takes three to six and 5 GB. XLA chooses kernels for
products without timing them, so that these are others than on the GPU; the rest is the same program. A line of JSON, of one
of the GPUs:
  * operations: kernels and library calls that a step launches; gib: what they read and write, if each moves an array once.
  * memory_gib: of what the step is given (state, batch, constants), and of what it needs besides.
  * kinds: by kind (see kernels.py), [operations, GiB, least ms]: by the card's memory bandwidth, or of products and
    convolutions by its bfloat16 peak, if that takes longer; null for what is sent from GPU to GPU.
"""

import argparse
import collections
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import jax
from jax.experimental import topologies
from kernels import kind_of
from report import parse
from train_step import CONFIGS, configuration

from maxdiff import aot
from maxdiff.accelerators import GPU_FLOPS
from maxdiff.models import flops

NAME, BANDWIDTH = "NVIDIA H200", 4.8e12  # bytes/s, as its data sheet has it
# What jax says of the card where there is one: get_topology_for_devices(...).target_config.
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {BANDWIDTH:.0f} l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{NAME}"
"""
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # no kernel
INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<operands>.*?)\)(?:, |$)"
)


def launched(program: str) -> Iterator[tuple[str, int]]:
    """(kind, bytes read and written) of what a compiled program launches."""
    sizes: dict[str, int] = {}
    for line in program[program.index("\nENTRY ") :].splitlines():
        if not (found := INSTRUCTION.match(line)):
            continue
        operands = sum(sizes.get(name, 0) for name in re.findall(r"%([\w.-]+)", found["operands"]))
        # What is begun here and done elsewhere counts there, with what it was given.
        begun = found["opcode"].endswith("-start")
        sizes[found["name"]] = operands if begun else size_of(found["shape"])
        if found["opcode"] not in NOTHING and not begun:
            operation = re.search(r'op_name="([^"]*)"', line)
            kind = kind_of(found["name"] + (operation[1] if operation and "pallas" in operation[1] else ""))
            yield kind, sizes[found["name"]] + operands


def size_of(shape: str) -> int:
    """Bytes of an array, or of a tuple's arrays, as HLO writes them."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(WIDTHS.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)


def measure(step: aot.Step) -> dict[str, Any]:
    """Of the step's program: how long it took to compile, and what it does."""
    lowered = step.lower()
    started = time.perf_counter()
    compiled = lowered.compile({"xla_gpu_autotune_level": 0})
    program, memory = compiled.as_text(), compiled.memory_analysis()
    seconds = time.perf_counter() - started
    operations, sizes = collections.Counter(), collections.Counter()
    for kind, size in launched(program):
        operations[kind] += 1
        sizes[kind] += size
    task, data, batch = step.task, step.config.data, step.config.batch.global_batch_size / step.mesh.size
    cached = data.cache_latents_text_encoder_outputs
    arithmetic = flops.training(
        task.networks, list(task.trained), data.resolution, has_latents=cached, has_text=cached
    )._asdict()
    seconds_of = lambda kind, size: max(size / BANDWIDTH, batch * arithmetic.get(kind, 0) / GPU_FLOPS[NAME])
    least = {kind: None if kind == "communication" else round(1e3 * seconds_of(kind, size), 2) for kind, size in sizes.items()}
    return {
        "device": NAME, "jax": jax.__version__, "compile_s": round(seconds, 1), "operations": operations.total(),
        "gib": round(sizes.total() / 2**30, 2),
        "memory_gib": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30, 2),
        "kinds": {kind: [operations[kind], round(size / 2**30, 2), least[kind]] for kind, size in sizes.most_common()},
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=CONFIGS)
    parser.add_argument("--resolution", type=int, default=512, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=16, help="images a GPU")
    parser.add_argument("--gpus", type=int, default=1, help="of one host")
    args, overrides = parse(parser, argv)
    case = {"model": args.model, "resolution": args.resolution, "batch": args.batch, "gpus": args.gpus, "overrides": overrides}
    if args.gpus < 1:
        parser.error(f"--gpus={args.gpus} must be at least 1")
    jax.config.update("jax_platforms", "cpu")  # no GPU is looked for
    try:
        config = configuration(args.model, args.resolution, args.batch, overrides)
        devices = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{args.gpus}").devices
        step = aot.prepare(config, devices)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        parser.error(f"JAX has no compiler for NVIDIA GPUs here ({error}); pip install -e '.[cuda]' brings it")
    if step.accumulation > 1:  # of which the program has a loop
        parser.error(f"a step of {step.accumulation} micro-batches is not counted (allowed: 1, by global_batch_size)")
    print(json.dumps(case | measure(step)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
