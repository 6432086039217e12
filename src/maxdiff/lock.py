"""A run's folder belongs to one run at a time: the one whose record is in its lock.json.

It is a file of its own and no flock, which not every network file system has. Whoever was killed leaves it behind, so
a lock may be stale: on the same host if its process is gone, and for another host if nobody rewrites it any more.

Hosts are told by their names, and processes of a host by their numbers. Containers or hosts that share a folder and
are called the same, but don't see each other's processes, take each other for dead: give them names of their own.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from maxdiff import bucket
from maxdiff.processes import say
from maxdiff.watch import STDERR
from maxdiff.weights.tensors import write_json

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0  # between two signs of life
STALE_SECONDS = 45.0  # without one, another host is taken for dead
POLL_SECONDS = 1.0  # between two looks for one


class RunLock:
    """Holds a run's folder; a context manager, for one use.

    Args:
        folder: of the run, which may be in a bucket. Of a run in several processes only the first holds it.

    A run whose folder another has taken over ends at once, with status 2: two that write into a folder would spoil it.

    Entering it raises:
        ValueError: if another run that lives holds the folder. For a run of another host it takes STALE_SECONDS to know
            that it doesn't live.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self._path = folder / "lock.json"
        self._record: dict[str, Any] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self) -> "RunLock":
        pid, now = os.getpid(), datetime.datetime.now().astimezone()
        self._record = {"host": socket.gethostname(), "pid": pid, "start_ticks": _start_ticks(pid),
                        "started": now.isoformat(timespec="seconds"), "beat": 0, "nonce": secrets.token_hex(4)}  # fmt: skip
        _take(self._path, self._record)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # what is left behind will be stale
            if self._other_holder() is None:
                _remove(self._path)

    def _beat(self) -> None:
        """Give signs of life; the run goes on whatever happens to the file, unless another run holds it."""
        failed = False
        while not self._ends.wait(BEAT_SECONDS):
            self._record["beat"] += 1
            try:
                if other := self._other_holder():
                    self._give_up(other)
                _write(self._path, self._record)
            except OSError as error:
                if not failed:
                    logger.warning("%s cannot be kept up (%s): runs of other hosts may take it for stale", self._path, error)
                failed = True

    def _give_up(self, other: dict[str, Any]) -> None:
        taken = f"{self._path.parent} was taken over by {_who(other)}, which found no sign of life of this run"
        try:
            os.write(STDERR, f"{taken}; it ends here\n".encode())
        finally:
            os._exit(2)

    def _other_holder(self) -> dict[str, Any] | None:
        """The record in the file if it is not this lock's; None also for a file that is missing or damaged."""
        found = _parse(_read(self._path) or b"")
        ours = found is None or all(found.get(key) == self._record[key] for key in ("host", "pid", "start_ticks"))
        return None if ours else found


def _take(path: Path, record: dict[str, Any]) -> None:
    """Write the record to `path`, where there is none or that of a dead run.

    Of several who find the same stale lock one may replace it: the one that holds the claim, a lock whose name comes from
    what the stale one says. Who comes later finds another lock there, and leaves it alone.
    """
    while not _create(path, record):
        stale = _read(path)
        if stale is None:
            continue  # its holder has just ended
        _wait_until_stale(path, stale)
        claim = path.with_name(f".lock-{hashlib.sha256(stale).hexdigest()[:16]}.json")
        _take(claim, record)  # which may be stale too
        try:
            if _read(path) == stale:
                _write(path, record)
                say(f"{path} was left behind by {_who(_parse(stale))}, which is gone: taken over")
                return
        finally:
            _remove(claim)


def _create(path: Path, record: dict[str, Any]) -> bool:
    """Write the record to a new file, with all that is in it at once; False if there is one."""
    if bucket.is_bucket(path):
        return bucket.create(path, json.dumps(record).encode())
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_json(written, record)
    try:
        os.link(written, path)
    except FileExistsError:
        return written.stat().st_nlink > 1  # NFS may have made the link, lost its answer, and tried again
    except OSError:
        return _create_in_place(path, record)  # a file system without hard links
    finally:
        written.unlink()
    return True


def _create_in_place(path: Path, record: dict[str, Any]) -> bool:
    """As `_create`, but others may find the file empty: killed before it is written, a process leaves a damaged lock."""
    try:
        with path.open("x") as file:
            json.dump(record, file)
    except FileExistsError:
        return False
    return True


def _wait_until_stale(path: Path, content: bytes) -> None:
    """Return when whoever wrote this is dead, or the file is gone; raise ValueError if they live."""
    holder = _parse(content)
    if holder and holder["host"] == socket.gethostname():
        if _lives(holder["pid"], holder.get("start_ticks")):
            raise _in_use(path, holder)
        return
    say(f"{path} is that of {_who(holder)}: waiting up to {STALE_SECONDS:g} s for a sign of life")
    end = time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        found = _read(path)
        if found is None:
            return
        if found != content:
            raise _in_use(path, _parse(found))


def _in_use(path: Path, holder: dict[str, Any] | None) -> ValueError:
    return ValueError(
        f"output_dir/run_name: {path.parent} is in use by {_who(holder)}; allowed: another run_name, or to stop that one"
    )


def _who(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "an unknown process (the file is damaged)"
    return f"process {holder['pid']} on {holder['host']} since {holder.get('started', 'an unknown time')}"


def _write(path: Path, record: dict[str, Any]) -> None:
    if bucket.is_bucket(path):
        bucket.write(path, json.dumps(record).encode())
    else:
        write_json(path, record)


def _remove(path: Path) -> None:
    if bucket.is_bucket(path):
        bucket.remove(path)
    else:
        path.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    if bucket.is_bucket(path):
        return bucket.read(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> dict[str, Any] | None:
    """The record in a lock; None if it is damaged."""
    try:
        record = json.loads(content)
        host, pid = record["host"], record["pid"]
    except (ValueError, TypeError, KeyError):
        return None
    # os.kill takes a number below 1 for groups of processes.
    return record if isinstance(host, str) and isinstance(pid, int) and 0 < pid < 2**31 else None


def _lives(pid: int, start_ticks: int | None) -> bool:
    """Whether there is a process of this number on this host, and it is the one that started then."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    found = _start_ticks(pid)
    return found is None or start_ticks is None or found == start_ticks


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot: -1 if it has ended, None where that cannot be known."""
    try:
        # The second field, the program's name in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])  # Z: its parent has not asked for its exit status
