"""What the tables of different formats have in common: an image column, and packages that only some need."""

import collections
import importlib
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from maxdiff.data.examples import BadExample, Columns

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def optional(module: str, extra: str, wanted_by: str) -> Any:
    """A module that only some sources need.

    Raises:
        ValueError: naming the extra to install, if the module is not there.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{wanted_by} needs {module.partition('.')[0]} ({error}): pip install 'maxdiff[{extra}]'") from None


def image_bytes(value: Any, folder: Path, key: str, column: str) -> bytes:
    """The image file that an image column's value is or names: bytes, a path within `folder`, or {bytes, path}.

    Raises:
        BadExample: if it is none of these, or names a file that cannot be read.
    """
    if isinstance(value, dict) and value.keys() & {"bytes", "path"}:
        value = value["bytes"] if value.get("bytes") else value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadExample(key, f"image_column={column!r} holds {value!r}, neither an image file nor its path")
    try:
        return (folder / value).read_bytes()
    except OSError as error:
        raise BadExample(key, f"image_column={column!r}: {error}") from None


def check_columns(where: str, there: Iterable[str], image_column: str, columns: Columns) -> None:
    """Raise ValueError if `where` lacks the image column, or all of those that captions are made of."""
    there = sorted(there)
    if image_column not in there:
        raise ValueError(f"{where} has no image_column={image_column!r} (allowed: {there})")
    if not any(name in there for name in columns.names):
        raise ValueError(f"{where} has no caption_column={', '.join(columns.names)!r} (allowed: {there})")


class Recent(Generic[K, V]):
    """What `make` made last, up to `limit` bytes of it, for many threads.

    One thread makes at a time: memory is the limit and one more, however many threads ask.
    """

    def __init__(self, make: Callable[[K], V], size: Callable[[V], int], limit: int):
        self._make, self._size, self._limit = make, size, limit
        self._kept: collections.OrderedDict[K, V] = collections.OrderedDict()
        self._bytes = 0
        self._lock, self._making = threading.Lock(), threading.Lock()

    def get(self, key: K) -> V:
        """`make(key)`, which may have been made before."""
        if (value := self._find(key)) is not None:
            return value
        with self._making:
            if (value := self._find(key)) is not None:
                return value
            value = self._make(key)
            with self._lock:
                self._kept[key] = value
                self._bytes += self._size(value)
                while self._bytes > self._limit and len(self._kept) > 1:
                    _, old = self._kept.popitem(last=False)
                    self._bytes -= self._size(old)
            return value

    def _find(self, key: K) -> V | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)
