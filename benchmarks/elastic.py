"""One run on one, two and four processes: stopped by a signal to one of them, it goes on on another number.

    python benchmarks/elastic.py

One process makes all steps; another run makes them on two processes, then four, then one, stopped in between by SIGTERM to
a single process. Both have the same global batch. Prints a JSON line a start, and one for all: the greatest difference of
any step's loss, relative, and whether every step had the same examples, timesteps and noise (`maxdiff.audit` of both runs;
each checkpoint says itself how many batches were drawn). Exit status 1 if a loss differs by more than 1e-5.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from crashes import ROOT, command  # beside this file
from together import free_port

from maxdiff import audit
from maxdiff.config import load_config
from maxdiff.metrics import read_metrics
from maxdiff.stop import STOPPED

STEPS, TOLERANCE = 60, 1e-5


def start(output: Path, cache: Path, processes: int, stop_after: int | None) -> dict:
    """One start on so many processes; with `stop_after` the last of them gets SIGTERM after so many steps of this start."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    # Adam divides by the gradient's size: where that is but rounding, other devices would make other steps.
    keys = ["global_batch_size=8", f"max_train_steps={STEPS}", "checkpoint_every=-1", "adam_eps=1e-4"]
    address = f"coordinator_address=localhost:{free_port()}"
    began, running = time.perf_counter(), []
    for number in range(processes):
        several = [address, f"num_processes={processes}", f"process_id={number}", "skip_jax_distributed_system=false"]
        running.append(subprocess.Popen([*command(output, cache), *keys, *(several if processes > 1 else [])], env=environment,
                                        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
    lines, made = [], 0
    assert running[0].stdout is not None
    for line in running[0].stdout:
        lines.append(line.rstrip())
        made += bool(re.match(r"step \d+/", line))
        if made == stop_after:
            running[-1].send_signal(signal.SIGTERM)
            made += 1  # once
    statuses = [process.wait(300) for process in running]
    for process in running:
        assert process.stdout is not None
        process.stdout.close()
    wanted = STOPPED if stop_after else 0
    if set(statuses) != {wanted}:
        raise RuntimeError(f"{processes} processes ended with {statuses}, not {wanted}:\n" + "\n".join(lines[-30:]))
    steps = [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/", line))]
    return {"processes": processes, "first_step": steps[0], "last_step": steps[-1], "statuses": statuses,
            "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def losses(output: Path) -> dict[int, float]:
    """Of each step."""
    return {record["step"]: record["loss"] for record in read_metrics(output / "r") if "loss" in record}


def main() -> int:
    """Print the lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, split = folder / "whole", folder / "split"
        print(json.dumps({"run": "whole", **start(whole, folder / "cache", 1, None)}), flush=True)
        for processes, stop_after in ((2, 3), (4, 3), (1, None)):
            print(json.dumps({"run": "split", **start(split, folder / "cache", processes, stop_after)}), flush=True)
        expected, found = losses(whole), losses(split)
        difference = max(abs(found[step] / expected[step] - 1) for step in expected)
        audits = lambda output: [
            list(audit.audit(load_config(output / "r" / "config.yml"), step))[1:] for step in sorted(expected)
        ]
        same_examples, same_steps = audits(whole) == audits(split), found.keys() == expected.keys()
        print(json.dumps({"steps": len(expected), "same_steps": same_steps, "same_examples": same_examples,
                          "greatest_relative_difference_of_a_loss": float(f"{difference:.2g}")}))  # fmt: skip
    return int(difference > TOLERANCE or not same_examples or not same_steps)


if __name__ == "__main__":
    sys.exit(main())
