"""Real processes that are killed, fail or hang: the others name them, and end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.together import free_port
from maxdiff.command import LOST
from maxdiff.peers import Peers

ROOT = Path(__file__).parent.parent
SECONDS = 3
RUN = f"""
import sys, time
from maxdiff import processes
from maxdiff.config import Run
from maxdiff.peers import Peers
address, me, doing = sys.argv[1:]
processes.start(Run(coordinator_address=address, num_processes=2, process_id=int(me)))
with Peers(lambda: f"after step 7 ({{me}})", {SECONDS}):
    processes.wait_for_all("started")
    print("started", flush=True)
    exec(doing)
    if doing == "pass":
        sys.exit(75)
"""


class Process(subprocess.Popen):
    def __init__(self, address: str, number: int, doing: str):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
        super().__init__([sys.executable, "-c", RUN, address, str(number), doing], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip

    def last_lines(self) -> list[str]:
        said = self.communicate(timeout=60)[1].splitlines()
        return [line for line in said if "[Gloo]" not in line]


def pair(*doing: str) -> list[Process]:
    address = f"localhost:{free_port()}"
    started = [Process(address, number, what) for number, what in enumerate(doing)]
    for process in started:
        assert process.stdout is not None
        for line in process.stdout:  # Gloo may speak before
            if line == "started\n":
                break
    return started


WAITS = "time.sleep(100)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_and_the_other_ends(number: signal.Signals):
    first, second = pair(WAITS, WAITS)
    began = time.monotonic()
    second.send_signal(number)
    *_, lost, place = first.last_lines()
    assert first.returncode == LOST
    assert SECONDS < time.monotonic() - began < 30
    assert re.fullmatch(r"process 1 of 2 on host \S+ was lost: it gave no sign of life for \d+ s", lost)
    assert place == "this one ends too: after step 7 (0)"
    second.kill()
    second.communicate()


def test_without_the_first_process_jax_aborts_the_other_and_its_last_words_are_clear():
    first, second = pair(WAITS, WAITS)
    first.kill()
    first.communicate()
    *_, lost, place = second.last_lines()
    assert second.returncode == -signal.SIGABRT
    assert re.fullmatch(r"process 0, which JAX finds the others by, was lost: nothing answers at localhost:\d+ any more", lost)
    assert place == "this process was killed, or aborted by JAX: after step 7 (1)"


@pytest.mark.parametrize(("failing", "error", "status", "said", "told"), [
    (1, "raise ValueError('key=3 (allowed: 2)')", 2, "train.py: key=3 (allowed: 2)", "ValueError: key=3 (allowed: 2)"),
    (0, "raise KeyError('x')", 1, "KeyError: 'x'", "KeyError: 'x'"),
])  # fmt: skip
def test_an_error_of_one_process_ends_all_at_once(failing: int, error: str, status: int, said: str, told: str):
    began = time.monotonic()
    processes = pair(*([WAITS, error] if failing else [error, WAITS]))
    failed, other = processes[failing], processes[1 - failing]
    *_, last = failed.last_lines()
    assert last == said
    *_, why, place = other.last_lines()
    assert re.fullmatch(rf"process {failing} of 2 on host \S+ failed: {re.escape(told)}", why)
    assert place == f"this one ends too: after step 7 ({1 - failing})"
    assert [failed.returncode, other.returncode] == [status, status]
    assert time.monotonic() - began < 30


def test_processes_that_end_at_different_times_are_not_lost():
    first, second = pair(f"time.sleep({SECONDS + 6})", "pass")
    assert second.last_lines() == []
    assert first.last_lines() == []
    assert [first.returncode, second.returncode] == [0, 75]


def test_a_process_that_is_alone_has_no_peers(capfd: pytest.CaptureFixture):
    with pytest.raises(KeyError), Peers(lambda: "nowhere", 60):
        raise KeyError
    assert capfd.readouterr() == ("", "")
