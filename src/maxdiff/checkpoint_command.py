"""The command line of `python -m maxdiff.checkpoint`: what there is, whether it is whole, and its weights for others."""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from maxdiff import bucket
from maxdiff.checkpoint import Checkpoints, DamagedCheckpoint
from maxdiff.command import split_number
from maxdiff.config import Run, load_config
from maxdiff.export import export_step
from maxdiff.metrics import METRICS, read_metrics

COMMANDS = ("list", "verify", "export")
USAGE = f"python -m maxdiff.checkpoint {'|'.join(COMMANDS)} RUN_FOLDER [step=N] [key=value ...]"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a checkpoint is damaged, 2 for a user's mistake, told in one line."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(f"usage: {USAGE}")
            return 0
        rest, step = split_number(argv, "step")
        name, *rest = rest
        if name not in COMMANDS:
            raise ValueError(f"{name!r} is not one of {', '.join(COMMANDS)}: {USAGE}")
        if not rest:
            raise ValueError(f"which run? {USAGE}")
        folder, *overrides = rest
        run = _run(folder)
        if name == "export":
            _export(run, step(), overrides)
            return 0
        if overrides:
            raise ValueError(f"{overrides[0]} is not for {name} (allowed: step=N)")
        with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            wanted = step()
            steps = checkpoints.steps() if wanted is None else [wanted]
            if not steps:
                raise FileNotFoundError(f"{checkpoints.folder} has no checkpoint")
            return _list(run, steps) if name == "list" else _verify(checkpoints, steps)
    except (ValueError, OSError) as error:
        print(f"maxdiff.checkpoint: {error}", file=sys.stderr)
        return 2


def _run(folder: str) -> Run:
    """The run in this folder, wherever that was moved to since."""
    bucket.check_path("RUN_FOLDER", folder)
    where = bucket.place(folder)
    where = where if bucket.is_bucket(where) else where.resolve()
    return Run(run_name=where.name, output_dir=str(where.parent))


def _list(run: Run, steps: Sequence[int]) -> int:
    bucket.fetch(run.place, run.folder, [str(METRICS)])
    records = read_metrics(run.folder) if (run.folder / METRICS).is_file() else []
    losses = {record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record}
    for step in steps:
        size, when = _size_and_time(run.checkpoints / str(step))
        loss = f"  held-out loss {losses[step]:.4g}" if step in losses else ""
        print(f"step {step}  {size / 1e6:.1f} MB  {when}{loss}")
    return 0


def _size_and_time(folder: Path) -> tuple[int, str]:
    """The bytes of a checkpoint's files, and when it was written."""
    if bucket.is_bucket(folder):
        files = [stored for _, stored in bucket.listing(folder) if stored]
        size, time = sum(file.size for file in files), max(file.time for file in files)
    else:
        size, time = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), folder.stat().st_mtime
    return size, datetime.datetime.fromtimestamp(time).astimezone().isoformat(" ", "seconds")


def _verify(checkpoints: Checkpoints, steps: Sequence[int]) -> int:
    damaged = 0
    for step in steps:
        try:
            print(f"step {step}: whole, {checkpoints.verify(step) / 1e6:.1f} MB of arrays", flush=True)
        except DamagedCheckpoint as error:
            damaged += 1
            print(f"step {step}: {error}", flush=True)
    return int(damaged > 0)


def _export(run: Run, step: int | None, overrides: Sequence[str]) -> None:
    bucket.fetch(run.place, run.folder, ["config.yml"])
    where = [f"output_dir={run.output_dir}", f"run_name={run.run_name}"]
    export_step(load_config(run.folder / "config.yml", [*overrides, *where]), step)
