"""What takes long: in several threads, with lines on stderr about how far it is."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Seconds before the first line, and between two.
FIRST, EVERY = 5.0, 10.0


class Progress:
    """How many of a number of files, or whatever, are done, told by whoever does one, in any thread.

    Quick work is not told of.
    """

    def __init__(self, what: str, total: int, of: str = "files"):
        self._what, self._total, self._of = what, total, of
        self._files, self._bytes, self._lines = 0, 0, 0
        self._start = time.monotonic()
        self._next = self._start + FIRST
        self._lock = threading.Lock()

    def add(self, files: int = 0, size: int = 0) -> None:
        """So many more files, or whatever, and bytes are done."""
        with self._lock:
            self._files, self._bytes = self._files + files, self._bytes + size
            now = time.monotonic()
            if now >= self._next or (self._lines and self._files == self._total):
                self._next, self._lines = now + EVERY, self._lines + 1
                rate = f", {self._bytes / 1e9:.1f} GB" if self._bytes else ""
                said = f"{self._what}: {self._files} of {self._total} {self._of}{rate}, {now - self._start:.0f} s"
                print(said, file=sys.stderr, flush=True)


def in_threads(
    function: Callable[[T], R], items: Sequence[T], threads: int, failed: Callable[[], object] = lambda: None
) -> list[R]:
    """`function` of each item, in their order, by several threads.

    If one raises, no other is begun, `failed` is called, and what was raised is raised here.
    """
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(function, item) for item in items]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            failed()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in running]
