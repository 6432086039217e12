"""Parts of files, read from any thread or process."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

# Below the usual limit of 1,024 a process; files beyond these are opened for each read.
MAX_OPEN = 256


class Files:
    """Reads parts of files, keeping up to MAX_OPEN of them open.

    `os.pread` leaves no position behind, so threads and forks may share a handle; a pickled copy opens
    its own.
    """

    def __init__(self):
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it ends before.
        """
        handle = self._handles.get(path)
        if handle is not None:
            return _read(handle, path, offset, size)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            keep = path not in self._handles and len(self._handles) < MAX_OPEN
            if keep:
                self._handles[path] = handle
        try:
            return _read(handle, path, offset, size)
        finally:
            if not keep:
                os.close(handle)

    def __getstate__(self):
        return {}

    def __setstate__(self, state: dict):
        Files.__init__(self)

    def __del__(self, close: Callable[[int], None] = os.close):  # bound: `os` may be gone when Python ends
        for handle in self._handles.values():
            close(handle)


def _read(handle: int, path: Path, offset: int, size: int) -> bytes:
    parts, end = [], offset + size
    while size and (part := os.pread(handle, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    if size:
        raise ValueError(f"{path} ends before byte {end}, where its index has an example end: it changed during the run")
    return b"".join(parts)
