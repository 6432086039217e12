import contextlib
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maxdiff import watch
from maxdiff.watch import HUNG, Watch

HANGS = """
import time
from maxdiff.watch import Watch

def stuck():
    time.sleep(60)

with Watch(None, hang_timeout_seconds=0.5) as watch:
    watch.saved(4)
    watch.step(7)
    stuck()
"""


def read(folder: Path) -> dict:
    return json.loads((folder / "heartbeat.json").read_bytes())


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses that the process would have ended with."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_heartbeats_tell_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.02)
    reports: list[tuple[int, float]] = []
    with Watch(tmp_path) as watching, watching.reporting(lambda step, age: reports.append((step, age))):
        wait_until((tmp_path / "heartbeat.json").exists)
        first = read(tmp_path)
        assert datetime.datetime.fromisoformat(first["time"]).tzinfo is not None
        assert first["seconds_since_step"] < 10
        assert {**first, "time": 0, "seconds_since_step": 0} == {
            "time": 0, "step": None, "seconds_since_step": 0, "doing": "training", "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        watching.step(12)
        wait_until(lambda: read(tmp_path)["step"] == 12)
        wait_until(lambda: len(reports) > 2)
        assert {step for step, _ in reports} == {12}
        assert 0 < reports[1][1] < reports[2][1] < 10
        with watching.busy("evaluation"):
            wait_until(lambda: read(tmp_path)["doing"] == "evaluation")
            with watching.busy("export"):
                wait_until(lambda: read(tmp_path)["doing"] == "export")
            wait_until(lambda: read(tmp_path)["doing"] == "evaluation")
        wait_until(lambda: read(tmp_path)["doing"] == "training")
    assert read(tmp_path)["doing"] == "ended"
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


def test_one_at_the_start_and_one_at_the_end_even_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrote, write_json = [], watch.write_json
    monkeypatch.setattr(watch, "write_json", lambda path, record: (wrote.append(record["doing"]), write_json(path, record)))
    with contextlib.suppress(KeyError), Watch(tmp_path):
        wait_until(lambda: wrote)
        raise KeyError
    assert wrote == ["training", "ended"]


def test_age_counts_from_the_last_step_or_the_end_of_other_work():
    def uncounted() -> float:
        age = watching.age
        return time.monotonic() - started - age

    with Watch(None) as watching:
        started = time.monotonic()
        time.sleep(0.02)
        assert uncounted() < 0.02
        watching.step(1)
        assert uncounted() >= 0.02
        time.sleep(0.1)
        with contextlib.suppress(KeyError), watching.busy("evaluation"):
            raise KeyError
        assert uncounted() >= 0.12


def test_without_folder_and_timeout_there_is_nothing_to_do():
    before = threading.active_count()
    with Watch(None):
        assert threading.active_count() == before


def test_a_full_disk_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    tries, write_json = [], watch.write_json

    def full(path: Path, record: dict):
        tries.append(path)
        if len(tries) < 4:
            raise OSError(28, "No space left on device")
        write_json(path, record)

    monkeypatch.setattr(watch, "write_json", full)
    with Watch(tmp_path):
        wait_until((tmp_path / "heartbeat.json").exists)
    (record,) = caplog.records
    assert "heartbeat.json cannot be written: [Errno 28] No space left on device" in record.getMessage()


def test_a_run_that_hangs_is_ended_and_shows_where():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 30
    assert done.returncode == HUNG
    first, *stacks = done.stderr.splitlines()
    host = re.escape(socket.gethostname())
    message = rf"no step was made for \d+ s: after step 7 on host {host} \(process 0 of 1\); the last checkpoint is of step 4"
    assert re.fullmatch(message, first)
    assert any("in stuck" in line for line in stacks)


def test_what_comes_before_the_first_step_is_not_waited_for(exits: list[int]):
    """Weights that are loaded, and compilation, take as long as they take."""
    with Watch(None, hang_timeout_seconds=0.1) as watching:
        time.sleep(0.4)
        assert not exits
        assert watching.place().startswith("before the first step on host ")
        assert watching.place().endswith("; there is no checkpoint")
        watching.step(1)
        wait_until(lambda: exits)
    assert exits == [HUNG]


def test_steps_and_other_work_are_no_hang(exits: list[int]):
    with Watch(None, hang_timeout_seconds=1) as watching:
        for number in range(6):
            time.sleep(0.2)
            watching.step(number)
        with watching.busy("evaluation"):
            with watching.busy("export"):
                time.sleep(0.1)
            time.sleep(1.2)
        time.sleep(0.3)
    assert not exits


def test_a_negative_timeout_is_an_error():
    with pytest.raises(ValueError, match=r"hang_timeout_seconds=-1 \(allowed: 0 for never, or more\)"):
        Watch(None, hang_timeout_seconds=-1)
