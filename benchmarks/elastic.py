"""One run on one, two and four processes: stopped by a signal to one of them, it goes on on another number.

    python benchmarks/elastic.py

One process makes all steps; another run makes them on two processes, then four, then one, interrupted in between: by SIGTERM
to a single process, which all save for; by SIGKILL to one of two, whom the other names and ends. Both have the same global
batch. Prints a JSON line a start, and one for all: the greatest difference of any step's loss, relative, and whether every
step had the same examples, timesteps and noise (`maxdiff.audit` of both runs; each checkpoint says itself how many batches
were drawn). Exit status 1 if a loss differs by more than 1e-5.
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
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from crashes import ROOT, command  # beside this file
from together import free_port

from maxdiff import audit
from maxdiff.command import LOST
from maxdiff.config import load_config
from maxdiff.metrics import read_metrics
from maxdiff.stop import STOPPED

STEPS, TOLERANCE, LOST_SECONDS = 60, 1e-5, 10
# Processes, which of them gets which signal after three steps, and the statuses that they end with.
INTERRUPTED = [
    (2, 1, signal.SIGTERM, [STOPPED, STOPPED]),
    (2, 1, signal.SIGKILL, [LOST, -signal.SIGKILL]),
    (2, 0, signal.SIGKILL, [-signal.SIGKILL, -signal.SIGABRT]),
    (4, 3, signal.SIGTERM, [STOPPED] * 4),
]


def start(
    output: Path, cache: Path, processes: int, who: int = 0, number: int | None = None, wanted: Any = None
) -> dict[str, Any]:
    """One start on so many processes, one of which gets a signal, if any is given, after three steps."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    # Adam divides by the gradient's size: where that is but rounding, other devices would make other steps.
    keys = ["global_batch_size=8", f"max_train_steps={STEPS}", "checkpoint_every=16", "adam_eps=1e-4",
            f"lost_process_seconds={LOST_SECONDS}"]  # fmt: skip
    address, running = f"coordinator_address=localhost:{free_port()}", []
    began, sent = time.perf_counter(), 0.0
    for process in range(processes):
        several = [address, f"num_processes={processes}", f"process_id={process}", "skip_jax_distributed_system=false"]
        said = (output.parent / f"said-{process}").open("w+")
        running.append((subprocess.Popen([*command(output, cache), *keys, *(several if processes > 1 else [])], env=environment,
                                         stdout=said, stderr=subprocess.STDOUT), said))  # fmt: skip
    steps = lambda: re.findall(r"^step (\d+)/", Path(running[0][1].name).read_text(), re.MULTILINE)
    while number and len(steps()) < 3 and running[0][0].poll() is None:
        time.sleep(0.05)
    if number:
        running[who][0].send_signal(number)
        sent = time.perf_counter()
    statuses = [process.wait(300) for process, _ in running]
    ended = time.perf_counter()
    time.sleep(3 if number == signal.SIGKILL else 0)  # last words come a second later
    texts = [Path(said.name).read_text() for _, said in running]
    for _, said in running:
        said.close()
    if statuses != (wanted or [0] * processes):
        raise RuntimeError(
            f"{processes} processes ended with {statuses}, not {wanted}:\n" + "\n".join(t[-2000:] for t in texts)
        )
    made = re.findall(r"^step (\d+)/", texts[0], re.MULTILINE)
    interrupted = {"signal": signal.Signals(number).name, "to": who} if number else {}
    found = {"processes": processes, **interrupted, "first_step": int(made[0]), "last_step": int(made[-1]),
             "statuses": statuses, "seconds": round(ended - began, 1)}  # fmt: skip
    if number == signal.SIGKILL:
        found |= {"ended_after_s": round(ended - sent, 1), "last_words": texts[1 - who].splitlines()[-2:]}
    return found


def losses(output: Path) -> dict[int, float]:
    """Of each step."""
    return {record["step"]: record["loss"] for record in read_metrics(output / "r") if "loss" in record}


def main() -> int:
    """Print the lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, split = folder / "whole", folder / "split"
        print(json.dumps({"run": "whole", **start(whole, folder / "cache", 1)}), flush=True)
        for stage in INTERRUPTED:
            print(json.dumps({"run": "split", **start(split, folder / "cache", *stage)}), flush=True)
        print(json.dumps({"run": "split", **start(split, folder / "cache", 1)}), flush=True)
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
