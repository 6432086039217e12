"""Real processes that are killed, stopped and interrupted, and started again; benchmarks/crashes.py kills a hundred."""

import json
import random
import signal
from pathlib import Path

from benchmarks.crashes import BEGINS, STEPS, Start, fingerprint, killed_run, resumed
from maxdiff.checkpoint import newest_step
from maxdiff.stop import INTERRUPTED, STOPPED


def test_a_run_that_is_stopped_and_killed_ends_as_if_nothing_had_happened(tmp_path: Path):
    cache, output = tmp_path / "cache", tmp_path / "killed"
    assert Start(tmp_path / "whole", cache).end() == 0
    saved = lambda: newest_step(output / "r" / "checkpoints")

    # A signal saves the step that it comes in.
    start = Start(output, cache)
    assert start.wait_for(BEGINS["step"], 2)
    assert start.end(signal.SIGUSR1) == STOPPED
    assert start.lines[-1] == f"train.py: SIGUSR1: step {saved()} of {STEPS} is saved; the same command goes on from it"

    # The folder is this run's: another start is refused, and says by whom it is held.
    first, start = saved(), Start(output, cache)
    assert start.wait_for(BEGINS["step"])
    start.process.send_signal(signal.SIGSTOP)  # it makes no steps meanwhile
    other = Start(output, cache)
    assert other.end() == 2
    start.process.send_signal(signal.SIGCONT)
    assert f"{output / 'r'} is in use by process {start.process.pid} on " in other.lines[-1]
    assert resumed(start.lines) == first
    assert start.end(signal.SIGINT) == INTERRUPTED
    assert start.lines[-1].startswith(f"train.py: SIGINT: step {saved()} of {STEPS} is saved")
    assert not (output / "r" / "lock.json").exists()
    assert json.loads((output / "r" / "heartbeat.json").read_text())["doing"] == "ended"

    # Killed in a save, then wherever chance has it.
    first, start = saved(), Start(output, cache)
    assert start.wait_for(BEGINS["save"])
    assert start.end(signal.SIGKILL) == -signal.SIGKILL
    assert resumed(start.lines) == first
    found = killed_run(output, cache, kills=1, draw=random.Random(1), start_up=6.0)
    assert found["lost"] == []
    assert fingerprint(output) == fingerprint(tmp_path / "whole")
