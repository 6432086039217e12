"""Whether a run on this machine repeats bit for bit, with and without deterministic=true.

    python benchmarks/determinism.py --model sd15 --resolution 512 --batch 4 --steps 20        key=value is as for train.py

Two processes compile and make the same steps from the same random weights, with each of the two settings; nothing is shared
between them, no compiled program and no choice of kernels. Prints a JSON line a setting: whether losses, gradient norms and the
checksum of every array of the state are equal, and the first step that differs. Exit status 1 if deterministic=true differs.

What it costs: python benchmarks/train_step.py with deterministic=true and without.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent))
from report import parse
from train_step import configuration, prepare

from maxdiff.checksums import checksums, named


def one(config: Any, steps: int) -> dict[str, Any]:
    """The steps, and what came of them."""
    _, _, run, _, state = prepare(config)
    scalars = [[float(value).hex() for value in run()] for _ in range(steps)]
    sums = {name: int(value) for name, value in jax.device_get(checksums(named(state()))).items()}
    return {"scalars": scalars, "checksums": sums, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def compare(setting: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The line of a setting."""
    pairs = zip(first["scalars"], second["scalars"], strict=True)
    differ = [number for number, (a, b) in enumerate(pairs, 1) if a != b]
    arrays = sum(first["checksums"][name] != second["checksums"][name] for name in first["checksums"])
    return {"deterministic": setting, "equal": not differ and not arrays, "first_step_that_differs": min(differ, default=None),
            "arrays_that_differ": arrays, "arrays": len(first["checksums"]), "steps": len(first["scalars"]),
            "device": first["device"], "jax": first["jax"], "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="images a device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", choices=["true", "false"], help="one process alone: prints what came of it")
    args, overrides = parse(parser, argv)
    if args.one:
        keys = ["learning_rate=1e-4", *overrides, f"deterministic={args.one}"]
        print(json.dumps(one(configuration(args.model, args.resolution, args.batch, keys), args.steps)))
        return 0
    # All at once, each with its part of the memory: what is compared does not depend on time.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.23"}
    settings = ["true", "true", "false", "false"]
    started = [subprocess.Popen([sys.executable, __file__, *argv, "--one", setting], env=environment, text=True,
                                stdout=subprocess.PIPE) for setting in settings]  # fmt: skip
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    lines = [compare(setting, *found[i : i + 2]) for i, setting in ((0, "true"), (2, "false"))]
    for line in lines:
        print(json.dumps(line), flush=True)
    return int(not lines[0]["equal"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
