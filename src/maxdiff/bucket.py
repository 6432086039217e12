"""Buckets of Google Cloud Storage, as far as a run needs them whose output_dir is gs://BUCKET/PATH.

gcsfs, of the extra `remote`, makes the requests here. Orbax and tensorstore, which write checkpoints, make their own.
"""

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, cast

from maxdiff.data.rows import optional

SCHEME = "gs://"
ALLOWED = "a folder, or gs://BUCKET/PATH"
AT_ONCE = 8  # files fetched or stored
# Files up to here are read whole before they are sent: others may be adding to them.
SMALL = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file in a bucket: its bytes, and when it was written, in seconds since 1970."""

    size: int
    time: float


def is_bucket(path: str | PurePath) -> bool:
    """Whether a path is one in a bucket."""
    return os.fspath(path).startswith(SCHEME)


def check_path(key: str, path: str) -> None:
    """Raise ValueError for a URL of another kind, or of no bucket."""
    if "://" in path and (not path.startswith(SCHEME) or not path.removeprefix(SCHEME).partition("/")[0]):
        raise ValueError(f"{key}={path!r} is no place for a run (allowed: {ALLOWED})")


def place(path: str | PurePath) -> Path:
    """The path, in a bucket or on a disk; one in a bucket is etils' epath.Path, which has Path's methods."""
    if not is_bucket(path):
        return Path(path)
    from etils import epath

    _files()  # how it asks is settled there
    return cast(Path, epath.Path(path))


@functools.cache
def local_copy(path: str) -> Path:  # noqa: ARG001
    """The folder on this process's disk for the files of a place in a bucket; empty at first, gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="maxdiff-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def check(path: Path) -> None:
    """Raise ValueError unless the bucket is there and may be looked at."""
    name = str(path).removeprefix(SCHEME).partition("/")[0]
    try:
        _files().call("GET", "b/{}", name)  # Orbax asks the same
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no bucket {SCHEME}{name} (allowed: one that exists)") from None
    except Exception as error:  # of requests, credentials and connections, a dozen kinds
        raise ValueError(f"{path}: the bucket cannot be looked at, which takes the permission storage.buckets.get: "
                         f"{_cause(error)}") from error  # fmt: skip


def check_writable(path: Path) -> None:
    """Raise ValueError unless files can be written, listed, read and deleted there."""
    check(path)
    mark = path / f".written-{secrets.token_hex(8)}"
    try:
        write(mark, b"")
        found = mark.name in {name for name, _ in listing(path, deep=False)} and read(mark) == b""
        remove(mark)
    except OSError as error:
        raise ValueError(f"{path} cannot be written to, which takes the permissions storage.objects.create, get, list and "
                         f"delete: {error}") from error  # fmt: skip
    if not found:
        raise ValueError(f"{path}: what was written there was not found again")


def read(path: Path) -> bytes | None:
    """A file's bytes, of one moment; None if there is no such file."""
    with contextlib.suppress(FileNotFoundError), _told(path, FileNotFoundError):
        return _files().cat_file(str(path))
    return None


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; raises OSError."""
    with _told(path):
        _files().pipe_file(str(path), data, consistency="md5")


def create(path: Path, data: bytes) -> bool:
    """Write a file if there is none of this name, which of several who try at once one does; False if there is one."""
    try:
        with _told(path, FileExistsError):
            _files().pipe_file(str(path), data, mode="create")
    except FileExistsError:
        return read(path) == data  # it may be ours: the request was made again when its answer was lost
    return True


def remove(path: Path) -> None:
    """Delete a file, if it is there; raises OSError."""
    with contextlib.suppress(FileNotFoundError), _told(path, FileNotFoundError):
        _files().rm_file(str(path))


def listing(path: Path, deep: bool = True) -> list[tuple[str, Stored | None]]:
    """(name below `path`, what is there) of all files, or of `path` itself if it is one; if not deep, of its children.

    A child that is a folder is None. Nothing there is an empty list.
    """
    with _told(path):
        top = str(path).removeprefix(SCHEME)
        if deep:
            found = _files().find(str(path), detail=True)
        else:
            try:
                found = {entry["name"]: entry for entry in _files().ls(str(path), detail=True)}
            except FileNotFoundError:
                found = {}
    # The names of others may begin alike; and what made a folder by hand may have left a file of its name.
    mine = {name: entry for name, entry in found.items() if name == top or name.startswith(f"{top}/")}
    stored = lambda entry: Stored(entry["size"], entry["mtime"].timestamp()) if entry["type"] == "file" else None
    return [(name.removeprefix(top).strip("/"), stored(mine[name])) for name in sorted(mine) if not name.endswith("/")]


def fetch(path: Path, folder: Path, names: Sequence[str]) -> list[str]:
    """Copy these files and folders, as far as they are there, from a place in a bucket; nothing if it is none.

    Returns:
        The names of the files that were copied.

    Raises:
        ValueError: as `check`.
        OSError: if a file does not come whole.
    """
    if not is_bucket(path):
        return []
    check(path)
    return copy_all(
        path, folder, [(f"{name}/{below}".strip("/"), stored) for name in names for below, stored in listing(path / name)]
    )


def copy_all(path: Path, folder: Path, wanted: Sequence[tuple[str, Stored | None]]) -> list[str]:
    """Copy these files of a place in a bucket; returns their names, raises OSError if one does not come whole."""

    def copy(entry: tuple[str, Stored | None]) -> None:
        name, stored = entry
        with _told(path / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _files().get_file(str(path / name), str(folder / name))
        came = (folder / name).stat().st_size
        if stored is None or came != stored.size:
            raise OSError(f"{path / name} did not come whole: {came} bytes came, and it is {stored}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(copy, wanted))
    return [name for name, _ in wanted]


def store(source: Path, path: Path) -> None:
    """Copy a file into a bucket, whole or not at all; raises OSError."""
    if source.stat().st_size <= SMALL:
        write(path, source.read_bytes())
        return
    with _told(path):
        _files().put_file(str(source), str(path), consistency="md5")


def remove_folder(path: Path) -> None:
    """Delete all files below; raises OSError."""
    with _told(path):
        for _ in range(2):  # placeholders of folders hide what is in them from the first
            with contextlib.suppress(FileNotFoundError):
                _files().rm(str(path), recursive=True)


@functools.cache
def _files() -> Any:
    # By JSON alone: gcsfs would ask for each bucket's kind by gRPC first.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    optional("gcsfs", "remote", f"{SCHEME}...")
    from fsspec import config, filesystem

    # Whatever other processes write is to be seen, by Orbax (which asks through epath) as well.
    config.conf.setdefault("gs", {})["use_listings_cache"] = False
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what fails is raised, too
    return filesystem("gs")


@contextlib.contextmanager
def _told(path: Path, *but: type[Exception]) -> Iterator[None]:
    """Raise whatever fails, but these, as an OSError of one line."""
    try:
        yield
    except but:
        raise
    except Exception as error:  # of requests, credentials and connections, a dozen kinds
        raise OSError(f"{path}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__
