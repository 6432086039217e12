"""Drawing, timed: images/s of Pipeline.generate, and how long the first images take, with and without a cache of programs.

    python benchmarks/generate.py --model sd15 --batch 8
    python benchmarks/generate.py --model sdxl --batch 4 --steps 20 --sampler euler

Weights are random bfloat16, and needed from nowhere. Each case runs in two new processes: the first finds an empty
jax_cache_dir, the second what the first has left there. Prints one JSON line for each process:
  * first_s: from the start of the process to the first batch of images, imports, weights and compilation included.
  * images_per_s, batch_s (and _min, _max): of the batches after it, each waited for.
  * peak_gib: what the device had allocated at most, where it says so.
  * with --profile, of the second process: GPU time by kind of kernel, see kernels.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from kernels import profile

RESOLUTIONS = {"sd15": 512, "sd2": 512, "sdxl": 1024}
BATCHES = 5
PROMPT = "a photograph of an astronaut riding a horse"


def measure(args: argparse.Namespace, started: float) -> dict:
    """One case, in this process."""
    import jax
    import jax.numpy as jnp

    from maxdiff import Pipeline
    from maxdiff.models.attention import kernel
    from maxdiff.models.layers import Compute
    from maxdiff.task import fused_kernels

    jax.config.update("jax_compilation_cache_dir", args.cache)
    compute = Compute(dtype=jnp.bfloat16, attention=kernel(args.attention), fused=fused_kernels(args.norms))
    pipeline = Pipeline.load("", new=ARCHITECTURES[args.model], dtype=jnp.bfloat16, compute=compute)
    side = args.resolution or RESOLUTIONS[args.model]

    def draw() -> float:
        begun = time.perf_counter()
        pipeline.generate([PROMPT] * args.batch, steps=args.steps, sampler=args.sampler, height=side, width=side)
        return time.perf_counter() - begun

    draw()
    first = time.time() - started
    seconds = [draw() for _ in range(BATCHES)]
    middle = statistics.median(seconds)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "system": "maxdiff", "model": args.model, "resolution": side, "batch": args.batch, "steps": args.steps,
        "sampler": args.sampler, "norms": args.norms, "cache": "warm" if args.warm else "cold",
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"),
        "first_s": round(first, 1), "images_per_s": float(f"{args.batch / middle:.4g}"),
        "batch_s": round(middle, 3), "batch_s_min": round(min(seconds), 3), "batch_s_max": round(max(seconds), 3),
        "peak_gib": peak and round(peak / 2**30, 2), **(profile(draw) if args.profile and args.warm else {}),
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print a line for each process; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=ARCHITECTURES)
    parser.add_argument("--resolution", type=int, default=0, help="side of the images, pixels; 0: the model's own")
    parser.add_argument("--batch", type=int, default=8, help="images drawn at once")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", default="euler")
    parser.add_argument("--attention", default="flash")
    parser.add_argument("--norms", default="auto", choices=["auto", "plain"], help="as the key norms of train.py")
    parser.add_argument("--profile", action="store_true", help="also print GPU time by kind of kernel")
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cache:
        print(json.dumps(measure(args, args.started)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as cache:
        for extra in ([], ["--warm"]):
            command = [sys.executable, __file__, *argv, "--cache", cache, "--started", repr(time.time()), *extra]
            if code := subprocess.run(command, env=os.environ).returncode:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
