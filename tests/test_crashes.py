"""Real processes that are killed, stopped and interrupted, and started again; benchmarks/crashes.py kills a hundred."""

import functools
import json
import random
import signal
from pathlib import Path

from benchmarks.crashes import BEGINS, STEPS, Start, fingerprint, killed_run, resumed
from maxdiff.checkpoint import newest_step
from maxdiff.metrics import read_metrics
from maxdiff.stop import INTERRUPTED, STOPPED
from tests.test_runs import TINY_UNET

# Parameters and batches are split, and the steps go past the first epoch.
KEYS = (f"unet={TINY_UNET}", "ici_fsdp_parallelism=2", "global_batch_size=8", "checkpoint_every=32", "caption_dropout=0.1")


def losses(output: Path) -> dict[int, float]:
    """step -> loss; of a step that was made twice, the later."""
    return {line["step"]: line["loss"] for line in read_metrics(output / "r") if "loss" in line}


def test_a_run_that_is_stopped_and_killed_ends_as_if_nothing_had_happened(tmp_path: Path):
    output = tmp_path / "killed"
    begin = functools.partial(Start, output, tmp_path / "cache", KEYS, devices=4)
    whole = Start(tmp_path / "whole", tmp_path / "cache", KEYS, devices=4)
    assert whole.end() == 0, whole.lines
    assert any("P(None, None, None, 'fsdp')" in line for line in whole.lines)  # what the rules did is said
    saved = lambda: newest_step(output / "r" / "checkpoints")

    # A signal saves the step that it comes in.
    start = begin()
    assert start.wait_for(BEGINS["step"], 2)
    assert start.end(signal.SIGUSR1) == STOPPED
    assert start.lines[-1] == f"train.py: SIGUSR1: step {saved()} of {STEPS} is saved; the same command goes on from it"

    # The folder is this run's: another start is refused, and says by whom it is held.
    first, start = saved(), begin()
    assert start.wait_for(BEGINS["step"])
    start.process.send_signal(signal.SIGSTOP)  # it makes no steps meanwhile
    other = begin()
    assert other.end() == 2
    start.process.send_signal(signal.SIGCONT)
    assert f"{output / 'r'} is in use by process {start.process.pid} on " in other.lines[-1]
    assert resumed(start.lines) == first
    assert start.end(signal.SIGINT) == INTERRUPTED
    assert start.lines[-1].startswith(f"train.py: SIGINT: step {saved()} of {STEPS} is saved")
    assert not (output / "r" / "lock.json").exists()
    assert json.loads((output / "r" / "heartbeat.json").read_text())["doing"] == "ended"

    # Killed in a save, then wherever chance has it.
    first, start = saved(), begin()
    assert start.wait_for(BEGINS["save"])
    assert start.end(signal.SIGKILL) == -signal.SIGKILL
    assert resumed(start.lines) == first
    found = killed_run(begin, output, kills=1, draw=random.Random(1), start_up=6.0)
    assert found["lost"] == []
    expected = losses(tmp_path / "whole")
    assert len(expected) == STEPS
    assert losses(output) == expected
    assert fingerprint(output) == fingerprint(tmp_path / "whole")
