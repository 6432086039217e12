"""Seconds from starting a training to its first step: with nothing compiled yet, and with what an earlier start has compiled.

    python benchmarks/startup.py --model sd15 --batch 16                     random weights, and the emoji of data/
    python benchmarks/startup.py --model sd15 --resolution 64 --batch 1      24 GB and a CPU do

Each start is `python train.py` in a process of its own, with a run of its own and one jax_cache_dir for all. A line of
JSON a start: when its step was compiled (and how long that took), when its first step was done, and when the second. key=value
is as for train.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from train_step import CONFIGS

ROOT = Path(__file__).parent.parent
# What train.py prints, and the name of the moment.
MOMENTS = {r"compiled in ([\d.]+) s": "compiled", r"step 1/": "first_step", r"step 2/": "second_step"}


def environment() -> dict[str, str]:
    """That of a process which imports this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def start(command: Sequence[str]) -> dict[str, Any]:
    """Run it; seconds from its start to each of MOMENTS, and what it said of compilation.

    Raises:
        RuntimeError: with the end of what it printed, if it fails or prints no such line.
    """
    found: dict[str, Any] = {}
    lines = []
    started = time.monotonic()
    with subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for pattern, name in MOMENTS.items():
                if match := re.search(pattern, line):
                    found.setdefault(f"{name}_s", round(time.monotonic() - started, 1))
                    found |= {"compile_s": float(match[1])} if match.groups() else {}
    if process.returncode or len(found) < len(MOMENTS) + 1:
        raise RuntimeError(f"exit status {process.returncode}: {''.join(lines[-20:])}")
    return found


def command(model: str, resolution: int, batch: int, folder: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """train.py's, of a run of two steps."""
    keys = {
        "run_name": name,
        "output_dir": folder / "runs",
        "jax_cache_dir": folder / "programs",
        "dataset_save_location": folder / "indexes",
        "train_data_dir": str(ROOT / "data" / "emoji" / "heldout-*.tar"),
        "pretrained_model_name_or_path": "",
        "resolution": resolution,
        "per_device_batch_size": batch,
        "max_train_steps": 2,
        "log_period": 1,
        "use_ema": "false",
        **{part: json.dumps(architecture) for part, architecture in ARCHITECTURES[model].items()},
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    return [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / CONFIGS[model]), *given, *overrides]


def main(argv: Sequence[str]) -> int:
    """Print a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=CONFIGS)
    parser.add_argument("--resolution", type=int, default=512, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=16, help="images that a device takes at once")
    args, overrides = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            found = start(command(args.model, args.resolution, args.batch, Path(folder), name, overrides))
            print(json.dumps({"start": name, "model": args.model, "resolution": args.resolution, "batch": args.batch, **found}),
                  flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
