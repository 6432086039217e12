"""Whether a run makes progress: heartbeat.json for who looks from outside, and an end for a run that hangs."""

import contextlib
import datetime
import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from maxdiff.weights.tensors import write_json

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0  # between two heartbeats
CHECK_SECONDS = 1.0  # between two looks whether the run hangs
HUNG = 74  # the exit status of a run that hung
STDERR = 2


class Watch:
    """Tells others how far the run is, and ends it if it hangs; a context manager, for one use.

    heartbeat.json holds "time", "step", "seconds_since_step" (`age`), "doing" ("training", what `busy` was told, or
    "ended"), "host" and "pid".

    Attributes:
        made: the number of the last step; None before the first.

    Args:
        folder: where heartbeat.json goes; None on other processes than the first, which write none.
        hang_timeout_seconds: after so long without a step after the first, and without work that `busy` knows of, every
            thread's stack goes to stderr and the process ends with HUNG; 0 never.

    Raises:
        ValueError: if hang_timeout_seconds is negative.
    """

    def __init__(self, folder: Path | None, *, hang_timeout_seconds: float = 0.0):
        if hang_timeout_seconds < 0:
            raise ValueError(f"hang_timeout_seconds={hang_timeout_seconds:g} (allowed: 0 for never, or more)")
        self._folder, self._timeout = folder, hang_timeout_seconds
        self.made: int | None = None
        self._report: Callable[[int, float], None] = lambda *_: None
        self._saved: int | None = None
        self._since = time.monotonic()
        self._busy: list[str] = []
        # Asked now: JAX may not answer when the run hangs.
        self._host, self._process = socket.gethostname(), f"process {jax.process_index()} of {jax.process_count()}"
        self._warned = False
        self._ends = threading.Event()
        # Two threads: a disk that hangs the one must not keep the other from seeing it.
        wanted = [(self._beat, folder is not None), (self._guard, hang_timeout_seconds > 0)]
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work, needed in wanted if needed]

    def __enter__(self) -> "Watch":
        self._since = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def step(self, number: int) -> None:
        """The step of this number was made."""
        self.made, self._since = number, time.monotonic()

    @contextlib.contextmanager
    def reporting(self, report: Callable[[int, float], None]) -> Iterator[None]:
        """Meanwhile `report` is called with the last step and `age` at each heartbeat of training."""
        self._report = report
        try:
            yield
        finally:
            self._report = lambda *_: None

    def saved(self, number: int | None) -> None:
        """The last checkpoint is of this step; remembered, as a disk that hangs cannot be asked."""
        self._saved = number

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Work during which no step is due, such as evaluation, compilation or export; it may lie within other such work."""
        self._busy.append(what)
        try:
            yield
        finally:
            self._since = time.monotonic()  # first, so that the guard never sees idle and the old time
            self._busy.pop()

    @property
    def age(self) -> float:
        """Seconds since the last step was made, or other work or the run's start ended if that was later."""
        return time.monotonic() - self._since

    def place(self) -> str:
        """Where the run is, for the message of whatever ends it."""
        after = "before the first step" if self.made is None else f"after step {self.made}"
        saved = "there is no checkpoint" if self._saved is None else f"the last checkpoint is of step {self._saved}"
        return f"{after} on host {self._host} ({self._process}); {saved}"

    def _beat(self) -> None:
        self._write()
        while not self._ends.wait(BEAT_SECONDS):
            self._write()
        self._write("ended")

    def _write(self, doing: str = "") -> None:
        assert self._folder is not None
        path, now = self._folder / "heartbeat.json", datetime.datetime.now().astimezone()
        record = {"time": now.isoformat(timespec="seconds"), "step": self.made, "seconds_since_step": round(self.age, 1),
                  "doing": doing or ["training", *self._busy][-1], "host": self._host, "pid": os.getpid()}  # fmt: skip
        try:
            write_json(path, record)
            if record["doing"] == "training" and self.made is not None:
                self._report(self.made, self.age)
        except Exception as error:  # without heartbeats the run would be taken for dead
            if not self._warned:
                logger.warning("%s cannot be written: %s", path, error)
            self._warned = True

    def _guard(self) -> None:
        while not self._ends.wait(min(CHECK_SECONDS, self._timeout / 4)):
            if self.made is not None and not self._busy and self.age > self._timeout:
                self._give_up()
                return

    def _give_up(self) -> None:
        try:
            # Straight to the file: whatever hangs may hold the lock of sys.stderr.
            os.write(STDERR, f"no step was made for {self.age:.0f} s: {self.place()}\n".encode())
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        finally:
            os._exit(HUNG)
