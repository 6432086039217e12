"""The training step that train.py runs, timed without its data: images/s, TFLOP/s, memory, and the host's part.

    python benchmarks/train_step.py --model sd15 sd2 --batch 16 use_ema=false        needs no weights and no data
    python benchmarks/train_step.py --model sd2 --batch 32 remat=full attention=cudnn
    python benchmarks/train_step.py --model sd15 --resolution 64 --batch 1 --steps 1 use_ema=false   24 GB and a CPU do

key=value is as for train.py. The step is the whole one (autoencoder, text encoder, UNet, optimizer, average if
use_ema), from uint8 images and token ids that are on the device already; weights are random.

Prints one JSON line per case; several cases run in a process each, so that one's peak of memory is not another's:
  * step_ms (and _min, _max): of windows of steps that are sent off without waiting, as train.py does, over their number.
  * dispatch_ms, host_free: of a step alone, how long its call holds the host, and the share of its time for which it doesn't.
  * tflops, unet_tflops: a device's TFLOP/s, counted from the architecture (three forward passes of what is trained, one
    of the rest; nothing that remat repeats), and the UNet's part of it.
  * busy_ms, idle_share, kinds_ms, largest (--profile): see kernels.py.
  * matmul_tflops: of a bfloat16 matrix product of random numbers on the same device, just before the steps.
  * mfu, mfu_of_matmul: tflops over the card's data sheet, and over that product's.
  * peak_gib: what the device had allocated at most, where it says so; host_peak_gib: this process's memory at most.
  * loss, last_loss: of the first and the last step; about 1 at first, as a new UNet's prediction is near 0. Exit status 1
    if they are not finite.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from kernels import profile
from report import parse

from maxdiff import aot, build
from maxdiff.accelerators import make_deterministic, peak_flops
from maxdiff.checkpoint import Checkpoints
from maxdiff.config import Config, load_config
from maxdiff.data.encode import encodes_text
from maxdiff.models import flops
from maxdiff.task import Task, make_task

CONFIGS = {"sd15": "base15.yml", "sd2": "base_2_base.yml", "sdxl": "base_xl.yml"}
WINDOWS = 5


def configuration(model: str, resolution: int, batch: int, overrides: Sequence[str]) -> Config:
    """train.py's configuration of the model, all of whose networks begin with random weights."""
    ours = [f"{part}={json.dumps(given)}" for part, given in ARCHITECTURES[model].items()]
    # A run_name that no run has: a folder's config.yml would say what the global batch is.
    ours += ["pretrained_model_name_or_path=", "run_name=train_step_benchmark", f"resolution={resolution}"]
    path = Path(__file__).parent.parent / "configs" / CONFIGS[model]
    return load_config(path, [*ours, f"per_device_batch_size={batch}", *overrides])


def prepare(config: Config) -> tuple[Config, Task, Callable[[], list[Any]], float, Callable[[], Any]]:
    """As train.py: (configuration, task, what makes a step and returns its metrics, seconds of compilation, the state now)."""
    if config.run.deterministic:
        make_deterministic()
    layout = build.layout_of(config)
    mesh = layout.mesh
    config, accumulation = build.settle_batch(config, mesh)
    task = make_task(config, layout, None, abstract=config.data.cache_latents_text_encoder_outputs)
    optimizer = build.make_adam(config, build.make_rates(config, task))
    abstract = build.abstract_of(config, layout, task, optimizer)
    task, abstract_batch = aot.batch_of(config, mesh, task)
    task = dataclasses.replace(task, constants=jax.tree.map(concrete, task.constants))
    key = build.run_key(config, mesh)
    started = time.perf_counter()
    step = build.make_step(config, layout, task, optimizer, abstract, accumulation)
    step = step.lower(abstract, task.constants, abstract_batch, key).compile()
    seconds = time.perf_counter() - started
    # After the compilation, which on a CPU takes gigabytes of the same memory.
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as none:
        state = build.begin(config, task, optimizer, abstract, none)
    batch = build.place(build.batch_sharding(mesh), random_batch(abstract_batch, task))

    def run() -> list[Any]:
        nonlocal state
        state, metrics = step(state, task.constants, batch, key)
        return [metrics["loss"], metrics["grad_norm"]]

    return config, task, run, seconds, lambda: state


def concrete(leaf: Any) -> jax.Array:
    """An array that is there, or one of noise for one that is not."""
    if isinstance(leaf, jax.Array):
        return leaf
    values = np.zeros(leaf.shape, leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        values = np.random.default_rng(0).standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
    return jax.device_put(values, leaf.sharding)


def random_batch(inputs: dict[str, Any], task: Task) -> dict[str, np.ndarray]:
    """Images and captions of noise, or what would be encoded of them, of these shapes and dtypes."""
    rng = np.random.default_rng(0)
    limits = {"image": 256, "original_size": 1025, "crop": 1}
    for name, network in task.networks.items():
        if name.startswith("text_encoder"):
            limits[f"input_ids{name.removeprefix('text_encoder')}"] = network.config.vocab_size
    batch = {name: rng.integers(limits[name], size=s.shape, dtype=s.dtype) for name, s in inputs.items() if name in limits}
    noise = {name: rng.standard_normal(s.shape, np.float32).astype(s.dtype)
             for name, s in inputs.items() if jnp.issubdtype(s.dtype, jnp.floating)}  # fmt: skip
    return {**batch, **noise, "position": np.arange(inputs["position"].shape[0], dtype=np.int32)}


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """The average time of a call, of several sent off at once."""
    started = time.perf_counter()
    for _ in range(repeats):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeats


def matmul_tflops() -> float:
    """TFLOP/s of a large bfloat16 matrix product on the first device; a CPU gets a smaller one."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    rng = np.random.default_rng(0)
    # Random: a product of zeros draws less power, and so runs at a higher clock.
    a, b = (jnp.asarray(rng.standard_normal((size, size), np.float32), jnp.bfloat16) for _ in range(2))
    product = jax.jit(jnp.matmul)
    multiply = lambda: product(a, b)
    seconds_of(multiply, 3)
    return 2 * size**3 / statistics.median(seconds_of(multiply, 10) for _ in range(5)) / 1e12


def times(run: Callable[[], list[Any]], steps: int) -> dict[str, float]:
    """How long steps take in a row, and how long one of them holds the host."""
    window = math.ceil(steps / WINDOWS)
    rows = [1e3 * seconds_of(run, window) for _ in range(math.ceil(steps / window))]
    calls, alone = [], []
    for _ in range(min(3, steps)):
        started = time.perf_counter()
        metrics = run()
        calls.append(1e3 * (time.perf_counter() - started))
        jax.block_until_ready(metrics)
        alone.append(1e3 * (time.perf_counter() - started))
    return {
        "step_ms": round(statistics.median(rows), 2),
        "step_ms_min": round(min(rows), 2),
        "step_ms_max": round(max(rows), 2),
        "step_alone_ms": round(statistics.median(alone), 2),
        "dispatch_ms": round(statistics.median(calls), 2),
        "host_free": round(1 - statistics.median(calls) / statistics.median(alone), 4),
    }


def rates(config: Config, task: Task, step_ms: float, matmul: float) -> dict[str, float | None]:
    """What a step's time comes to: images and operations a second, and their share of what there could be."""
    images = config.batch.global_batch_size / step_ms * 1e3
    # One forward pass is a third of training: what training the UNet adds is the other two.
    encoded = config.data.cache_latents_text_encoder_outputs
    rest = flops.training(
        task.networks, [name for name in task.trained if name != "unet"], config.data.resolution, has_latents=encoded,
        has_text=encoded and encodes_text(config),
    )  # fmt: skip
    unet = 1.5 * (task.flops - rest.total)
    each = images / jax.device_count() / 1e12
    peak = peak_flops(jax.devices()[0])
    return {
        "images_per_s": digits(images),
        "tflops": digits(each * task.flops),
        "unet_tflops": digits(each * unet),
        "matmul_tflops": digits(matmul),
        "mfu": digits(each * task.flops / peak * 1e12) if peak else None,
        "mfu_of_matmul": digits(each * task.flops / matmul),
    }


def digits(x: float) -> float:
    """Rounded to four digits, on a CPU as on a cluster."""
    return float(f"{x:.4g}")


def peaks() -> dict[str, float | None]:
    """GiB at most of the first device, if it knows, and of this process."""
    known = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_gib": known and round(known / 2**30, 2), "host_peak_gib": round(process / 2**30, 2)}


def measure(model: str, resolution: int, batch: int, args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """One case."""
    config, task, run, compiled, _ = prepare(configuration(model, resolution, batch, overrides))
    matmul = matmul_tflops()
    first, _ = jax.block_until_ready([run(), run()])  # the two warm up
    timed = times(run, args.steps)
    if args.profile:
        timed |= profile(run, 3)
    loss, last = float(first[0]), float(run()[0])
    return {
        "system": "maxdiff",
        "model": model,
        "pipeline": "cached" if config.data.cache_latents_text_encoder_outputs else "full",
        "resolution": config.data.resolution,
        "batch": config.batch.per_device_batch_size,
        "global_batch": config.batch.global_batch_size,
        "remat": config.model.remat,
        "attention": config.model.attention,
        "ema": config.optimizer.use_ema,
        "overrides": list(overrides),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "compile_s": round(compiled, 1),
        "steps": args.steps,
        **timed,
        **rates(config, task, timed["step_ms"], matmul),
        **peaks(),
        "loss": round(loss, 4),
        "last_loss": round(last, 4),
    }


def main(argv: Sequence[str]) -> int:
    """Print a line for each case; 1 if one failed or its loss is not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["sd15", "sd2"], choices=CONFIGS)
    parser.add_argument("--resolution", nargs="+", type=int, default=[512], help="side of the images, pixels")
    parser.add_argument("--batch", nargs="+", type=int, default=[16], help="images that a device takes at once")
    parser.add_argument("--steps", type=int, default=20, help="steps timed, in windows of a fifth of them")
    parser.add_argument("--cached", action="store_true", help="latents and text states come from a cache")
    parser.add_argument("--profile", action="store_true", help="GPU time by kind of kernel, and the share in which none ran")
    args, overrides = parse(parser, argv)
    flags = ["--profile"] if args.profile else []
    overrides += ["cache_latents_text_encoder_outputs=true"] if args.cached else []
    cases = list(itertools.product(args.model, args.resolution, args.batch))
    try:
        for case in cases:
            configuration(*case, overrides)
    except ValueError as error:  # a key or value that there is not: said before minutes are spent
        parser.error(str(error))
    if len(cases) == 1:
        result = measure(*cases[0], args, overrides)
        print(json.dumps(result), flush=True)
        return int(not math.isfinite(result["loss"] + result["last_loss"]))
    failed = False
    for model, resolution, batch in cases:
        case = ["--model", model, "--resolution", str(resolution), "--batch", str(batch), "--steps", str(args.steps)]
        done = subprocess.run([sys.executable, __file__, *case, *flags, *overrides])
        if done.returncode:
            print(json.dumps({"system": "maxdiff", "model": model, "resolution": resolution, "batch": batch,
                              "overrides": overrides, "error": f"exit status {done.returncode}"}), flush=True)  # fmt: skip
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
