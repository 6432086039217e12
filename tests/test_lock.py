import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from maxdiff import lock
from maxdiff.lock import RunLock

# For each line, a folder and a time: tries to hold the folder then, says how that went, and lets go at the next line.
STARTER = """
import sys, time
from pathlib import Path
from maxdiff.lock import RunLock
print("ready", flush=True)
for line in sys.stdin:
    folder, at = line.split()
    while time.time() < float(at):
        pass
    try:
        with RunLock(Path(folder)):
            print("held", flush=True)
            sys.stdin.readline()
    except ValueError as error:
        print(error, flush=True)
        sys.stdin.readline()
    print("done", flush=True)
"""


class Starter:
    """Another process that starts runs."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def said(self) -> str:
        """Its next answer, without what a lock says of stale ones."""
        lines = (line.strip() for line in self.process.stdout)
        return next(line for line in lines if "taken over" not in line)

    def hold(self, folder: Path):
        self.tell(f"{folder} 0")
        assert self.said() == "held"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def starters():
    """Two of them, for the tests that don't kill them."""
    both = [Starter(), Starter()]
    assert [starter.said() for starter in both] == ["ready", "ready"]
    yield both
    for starter in both:
        starter.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.15)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def write(folder: Path, name: str = "lock.json", **changes) -> dict:
    record = {"host": socket.gethostname(), "pid": os.getppid(), "start_ticks": lock._start_ticks(os.getppid()),
              "started": "2026-01-02T03:04:05+00:00", "beat": 3, **changes}  # fmt: skip
    (folder / name).write_text(json.dumps(record))
    return record


def read(folder: Path) -> dict:
    return json.loads((folder / "lock.json").read_bytes())


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_taken_over(folder: Path):
    with RunLock(folder):
        assert read(folder)["pid"] == os.getpid()
        assert [path.name for path in folder.iterdir()] == ["lock.json"]
    assert not list(folder.iterdir())


def test_a_folder_is_held_and_let_go(tmp_path: Path, capsys: pytest.CaptureFixture):
    with RunLock(tmp_path):
        found = read(tmp_path)
        assert found["host"] == socket.gethostname()
        assert found["pid"] == os.getpid()
        assert found["started"][-6] in "+-"
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
            pass
        assert read(tmp_path) == found
    assert_taken_over(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_living_process_keeps_its_folder_and_a_killed_one_loses_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    starter = Starter()
    assert starter.said() == "ready"
    starter.hold(tmp_path)
    pid = starter.process.pid
    with pytest.raises(
        ValueError, match=f"^output_dir/run_name: {tmp_path} is in use by process {pid} on .* since 20.*; allowed: "
    ):
        RunLock(tmp_path).__enter__()
    starter.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not lock._lives(pid, read(tmp_path)["start_ticks"]))  # before its parent knows
    assert_taken_over(tmp_path)
    starter.close()
    (said,) = capsys.readouterr().out.splitlines()
    assert f"lock.json was left behind by process {pid} on " in said


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="when a process started is read from /proc")
def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path):
    write(tmp_path, start_ticks=1)
    assert_taken_over(tmp_path)


def test_without_proc_a_living_number_is_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "_start_ticks", lambda pid: None)
    write(tmp_path, start_ticks=None)
    with pytest.raises(ValueError, match="is in use by"):
        RunLock(tmp_path).__enter__()
    write(tmp_path, pid=ended_process())
    assert_taken_over(tmp_path)


def test_another_users_process_lives(monkeypatch: pytest.MonkeyPatch):
    def denied(pid: int, number: int):
        raise PermissionError

    monkeypatch.setattr(os, "kill", denied)
    assert lock._lives(os.getpid(), lock._start_ticks(os.getpid()))
    assert not lock._lives(os.getpid(), 1)


@contextmanager
def beating(folder: Path):
    """A holder on another host that gives signs of life."""
    record = write(folder, host="elsewhere", pid=7)
    ends = threading.Event()

    def beat():
        while not ends.wait(0.05):
            record["beat"] += 1
            lock.write_json(folder / "lock.json", record)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ends.set()
    thread.join()


def test_another_host_that_gives_signs_of_life_keeps_its_folder(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(lock, "STALE_SECONDS", 10)
    with beating(tmp_path), pytest.raises(ValueError, match="in use by process 7 on elsewhere since 2026"):
        RunLock(tmp_path).__enter__()
    (said,) = capsys.readouterr().out.splitlines()
    assert "on elsewhere since 2026-01-02T03:04:05+00:00: waiting up to 10 s" in said


def test_another_host_without_a_sign_of_life_loses_its_folder(tmp_path: Path):
    write(tmp_path, host="elsewhere")
    started = time.monotonic()
    assert_taken_over(tmp_path)
    assert time.monotonic() - started >= 0.15


def test_another_host_that_ends_meanwhile_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 60)
    write(tmp_path, host="elsewhere")
    timer = threading.Timer(0.05, (tmp_path / "lock.json").unlink)
    timer.start()
    assert_taken_over(tmp_path)
    timer.join()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"{}", b'{"host": "a", "pid": -1}', b'{"host": "a", "pid": "1"}']
)
def test_a_damaged_lock_is_watched_and_taken_over(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture):
    (tmp_path / "lock.json").write_bytes(content)
    assert_taken_over(tmp_path)
    waits, taken = capsys.readouterr().out.splitlines()
    assert "an unknown process (the file is damaged): waiting" in waits
    assert "taken over" in taken


def test_of_two_starters_one_holds_a_stale_lock(tmp_path: Path, starters: list[Starter]):
    dead = ended_process()
    for n in range(30):
        folder = tmp_path / str(n)
        folder.mkdir()
        if n % 3:  # every third finds none
            write(folder, pid=dead)
        at = time.time() + 0.02
        for starter in starters:
            starter.tell(f"{folder} {at}")
        said = sorted(starter.said() for starter in starters)
        assert said[0] == "held"
        assert "is in use by process" in said[1]
        for starter in starters:
            starter.tell("")
            assert starter.said() == "done"
        assert not list(folder.iterdir())


def test_who_finds_a_stale_lock_late_leaves_the_new_one_alone(tmp_path: Path, starters: list[Starter], monkeypatch):
    dead = ended_process()
    write(tmp_path, pid=dead)
    lives = lock._lives

    def slowly(pid: int, ticks: int | None) -> bool:
        found = lives(pid, ticks)
        if pid == dead:
            starters[0].hold(tmp_path)  # has found it stale, too, and taken it over
        return found

    monkeypatch.setattr(lock, "_lives", slowly)
    with pytest.raises(ValueError, match=f"is in use by process {starters[0].process.pid} "):
        RunLock(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
    starters[0].tell("")
    assert starters[0].said() == "done"


def test_killed_while_it_took_a_stale_lock_over(tmp_path: Path):
    write(tmp_path, pid=ended_process())
    claim = f".lock-{hashlib.sha256((tmp_path / 'lock.json').read_bytes()).hexdigest()[:16]}.json"
    write(tmp_path, claim, pid=ended_process())
    assert_taken_over(tmp_path)


def test_a_stale_lock_that_another_takes_over_now(tmp_path: Path):
    write(tmp_path, pid=ended_process())
    claim = f".lock-{hashlib.sha256((tmp_path / 'lock.json').read_bytes()).hexdigest()[:16]}.json"
    write(tmp_path, claim)
    with pytest.raises(ValueError, match=f"is in use by process {os.getppid()} "):
        RunLock(tmp_path).__enter__()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_beats_restore_the_lock_and_end_the_run_when_another_holds_it(tmp_path: Path, monkeypatch, caplog, capfd):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    path = tmp_path / "lock.json"
    with RunLock(tmp_path):
        wait_until(lambda: read(tmp_path)["beat"] >= 2)
        path.unlink()
        wait_until(path.exists)
        assert not caplog.records
        statuses: list[int] = []

        def ends(status: int) -> NoReturn:
            statuses.append(status)
            raise SystemExit  # of the thread alone

        monkeypatch.setattr(os, "_exit", ends)
        wait_until(lambda: write(tmp_path, host="elsewhere") and statuses)  # a beat may replace one
    assert statuses == [2]
    assert f"{tmp_path} was taken over by process {os.getppid()} on elsewhere" in capfd.readouterr().err
    assert read(tmp_path)["host"] == "elsewhere"


def test_a_full_disk_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    tries, write_json = [], lock.write_json

    def full(path: Path, record: dict):
        tries.append(path)
        if 1 < len(tries) < 5:
            raise OSError(28, "No space left on device")
        write_json(path, record)

    monkeypatch.setattr(lock, "write_json", full)
    with RunLock(tmp_path):
        wait_until(lambda: len(tries) > 8)
        assert read(tmp_path)["beat"] > 3
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stale", [False, True])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool):
    def denied(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", denied)
    if stale:
        write(tmp_path, pid=ended_process())
    with RunLock(tmp_path), pytest.raises(ValueError, match="is in use by"):
        RunLock(tmp_path).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_link_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    link = os.link

    def lost(*paths):
        link(*paths)
        raise FileExistsError

    monkeypatch.setattr(os, "link", lost)
    assert_taken_over(tmp_path)


def test_a_folder_that_was_deleted_ends_quietly(tmp_path: Path):
    folder = tmp_path / "run"
    with RunLock(folder):
        shutil.rmtree(folder)
    assert not folder.exists()
