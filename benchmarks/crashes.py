"""A crash campaign: a small run killed at random moments and started again until it is done, as if nothing had happened.

    python benchmarks/crashes.py --kills 100 [--a-run 8] [--seed 0]

One run is made without interruption. Others are killed up to `--a-run` times each, until there were `--kills`, by SIGKILL at a
random moment of a phase drawn at random: in start-up, in a step, in a save, in the export; each is started again by the same
command until it ends. A fifth of those before the export is SIGTERM, which must save what there is, and end with status 75.
Then every array of the last checkpoint and every file of pipeline/ must be bit for bit those of the run without interruption.

Prints a JSON line a run, and one for all: kills by phase, starts, what differs, and what was lost: each start must go on
from the newest checkpoint that was whole when the run was killed.
"""

import argparse
import collections
import functools
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxdiff.checkpoint import Checkpoints, newest_step
from maxdiff.stop import STOPPED

ROOT = Path(__file__).parent.parent
UNET = ("{sample_size: 4, block_out_channels: [32], layers_per_block: 1, cross_attention_dim: 32, attention_head_dim: 8, "
        "down_block_types: [CrossAttnDownBlock2D], up_block_types: [CrossAttnUpBlock2D]}")  # fmt: skip
VAE = ("{block_out_channels: [32, 32], layers_per_block: 1, down_block_types: [DownEncoderBlock2D, DownEncoderBlock2D], "
       "up_block_types: [UpDecoderBlock2D, UpDecoderBlock2D]}")  # fmt: skip
TEXT = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}"
STEPS, BATCH, SAVES = 28, 4, 4
# What a run prints when a phase begins.
BEGINS = {"step": r"step \d+/", "save": r"step \d+ is being saved", "export": rf"step {STEPS}/{STEPS} "}
# Seconds after that at which it is killed, at most. A start-up is as long as the first start-up was.
LENGTHS = {"step": 0.3, "save": 1.0, "export": 1.5}


def command(output: Path, cache: Path) -> list[str]:
    """The one command of a run: its first start, and every other."""
    keys = {
        "run_name": "r", "output_dir": output, "train_data_dir": ROOT / "data" / "emoji" / "heldout-000000.tar", "unet": UNET,
        "vae": VAE, "text_encoder": TEXT, "resolution": 8, "center_crop": "true", "global_batch_size": BATCH,
        "dataset_save_location": cache, "data_workers": 1, "max_train_steps": STEPS, "log_period": 1, "jax_cache_dir": cache,
        "checkpoint_every": SAVES * BATCH, "activations_dtype": "float32", "attention": "dot_product", "learning_rate": "1e-3",
        "skip_jax_distributed_system": "true",
    }  # fmt: skip
    return [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/base.yml"), *(f"{k}={v}" for k, v in keys.items())]


class Start:
    """One start of a run, with other keys if any are given, on devices that share the cores; its lines are watched."""

    def __init__(self, output: Path, cache: Path, overrides: Sequence[str] = (), devices: int = 1):
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path,
                       "XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}  # fmt: skip
        self.lines: list[str] = []
        self._came = threading.Condition()
        # A group of its own: what is killed is the process alone, and its data workers must find out by themselves.
        self.process = subprocess.Popen([*command(output, cache), *overrides], env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._came:
                    self.lines.append(line.rstrip())
                    self._came.notify_all()
        with self._came:
            self._came.notify_all()

    def wait_for(self, pattern: str, count: int = 1) -> bool:
        """Whether so many lines that begin so came before the process ended."""
        seen = lambda: sum(bool(re.match(pattern, line)) for line in self.lines) >= count
        with self._came:
            self._came.wait_for(lambda: seen() or self.process.poll() is not None, timeout=300)
            return seen()

    def end(self, number: int | None = None) -> int:
        """Send a signal, if one is given, and wait; the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(300)
        self._reader.join()
        return status


def fingerprint(output: Path) -> dict[str, Any]:
    """What must be equal: checksums of every array of the last checkpoint, and hashes of pipeline/'s files."""
    with Checkpoints(output / "r" / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        checkpoints.verify(step)
        arrays = {f"step {step}: {name}": value for name, value in checkpoints.checksums(step).items()}
    files = sorted(path for path in (output / "r" / "pipeline").rglob("*") if path.is_file())
    hashes = {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return arrays | hashes


def killed_run(begin: Callable[[], Start], output: Path, kills: int, draw: random.Random, start_up: float) -> dict[str, Any]:
    """A run killed so often and started again until it ends: what happened."""
    phases: collections.Counter[str] = collections.Counter()
    starts, lost, expected = 0, [], None
    while True:
        start = begin()
        starts += 1
        ended = sum(phases.values()) >= kills or not kill(start, phases, draw, start_up, kills)
        if ended and (status := start.end()):
            raise RuntimeError(f"start {starts} ended with status {status}:\n" + "\n".join(start.lines[-30:]))
        if expected is not None and (went_on := resumed(start.lines)) is not None and went_on != expected:
            lost.append({"start": starts, "from": went_on, "newest": expected})
        if ended:
            return {"kills": dict(phases), "starts": starts, "lost": lost}
        expected = newest_step(output / "r" / "checkpoints")


def kill(start: Start, phases: collections.Counter[str], draw: random.Random, start_up: float, kills: int) -> bool:
    """End a start in a phase drawn at random; False if it had ended before."""
    # The export comes once a run: the others first.
    late = sum(phases.values()) >= 0.8 * kills
    phase = draw.choice(["start-up", "export", "export"] if late else ["start-up", "step", "step", "save", "save"])
    if phase == "start-up":
        time.sleep(draw.uniform(0, start_up))
    elif not start.wait_for(BEGINS[phase], draw.randint(1, 3) if phase != "export" else 1):
        return False
    else:
        time.sleep(draw.uniform(0, LENGTHS[phase]))
    number = signal.SIGTERM if phase != "export" and draw.random() < 0.2 else signal.SIGKILL
    status = start.end(number)
    if status == 0:
        return False
    if number == signal.SIGTERM and status not in (STOPPED, -signal.SIGTERM):
        raise RuntimeError(f"SIGTERM ended the run with status {status}:\n" + "\n".join(start.lines[-30:]))
    phases[phase if number == signal.SIGKILL else f"{phase}, SIGTERM"] += 1
    return True


def resumed(lines: Sequence[str]) -> int | None:
    """The step that a start went on from."""
    found = [
        re.match(r"going on from step (\d+) ", line) or re.match(r"nothing is left .* made (\d+) ", line) for line in lines
    ]
    return next((int(match[1]) for match in found if match), None)


def campaign(folder: Path, kills: int, a_run: int, seed: int) -> dict[str, Any]:
    """All of it; prints a line a run, returns the summary."""
    began, cache = time.perf_counter(), folder / "cache"
    whole = Start(folder / "whole", cache)
    if status := whole.end():
        raise RuntimeError(f"the run without interruption ended with status {status}:\n" + "\n".join(whole.lines[-30:]))
    first = time.perf_counter()
    again = Start(folder / "again", cache)  # as long as a start-up is when programs are compiled already
    again.wait_for(BEGINS["step"])
    start_up = time.perf_counter() - first
    again.end(signal.SIGKILL)
    expected, draw = fingerprint(folder / "whole"), random.Random(seed)
    total: collections.Counter[str] = collections.Counter()
    runs, differ, lost, starts = 0, 0, 0, 0
    while (left := kills - sum(total.values())) > 0:
        output = folder / f"run-{runs}"
        found = killed_run(functools.partial(Start, output, cache), output, min(left, a_run), draw, start_up)
        got = fingerprint(output)
        different = sorted(name for name in {*expected, *got} if expected.get(name) != got.get(name))
        print(json.dumps({"run": runs, **found, "different": different[:8]}), flush=True)
        total.update(found["kills"])
        runs, starts = runs + 1, starts + found["starts"]
        differ, lost = differ + bool(different), lost + len(found["lost"])
    seconds = round(time.perf_counter() - began)
    return {"kills": sum(total.values()), "by_phase": dict(total), "runs": runs, "starts": starts, "compared": len(expected),
            "runs_that_differ": differ, "starts_that_lost_steps": lost, "seconds": seconds}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 1 if anything differs or was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--a-run", type=int, default=8, help="of one run, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        summary = campaign(Path(folder), args.kills, args.a_run, args.seed)
    print(json.dumps(summary), flush=True)
    return int(bool(summary["runs_that_differ"] or summary["starts_that_lost_steps"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
