"""Files that are elsewhere: copied once into dataset_save_location, and used from there at random access.

A path may be a URL that fsspec knows (gs://, s3://, https://, ...), or `pipe:COMMAND`, a shell command that writes the file
to its standard output.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from maxdiff.data.paths import check_names, each_once, expand_braces, kind_of
from maxdiff.data.progress import Progress, in_threads
from maxdiff.data.rows import optional
from maxdiff.weights.tensors import write_atomically

PIPE = "pipe:"
COPIED_AT_ONCE = 8
CHUNK = 8 * 2**20
# What copies are called whose names say nothing, and how a whole file ends.
SUFFIXES = {"webdataset": ".tar", "parquet": ".parquet", "arrayrecord": ".array_record"}
ENDS = {"webdataset": bytes(512), "parquet": b"PAR1", "arrayrecord": b""}


def is_remote(path: str) -> bool:
    """Whether a path names files that are to be copied first."""
    return path.startswith(PIPE) or re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


def local_copies(pattern: str, kind: str, folder: Path | None) -> tuple[list[str], str]:
    """(copies of the files that a URL or a command names, made now if they are not in `folder` yet; their kind).

    Args:
        pattern: a URL, which may be a glob, or `pipe:` and a command; braces in it are expanded.
        kind: of source; "" for what the names say.
        folder: where copies are kept.

    Raises:
        ValueError: without a folder, for a name of no such kind, or if a file cannot be copied whole: no part of it is left.
        FileNotFoundError: if a glob matches nothing.
    """
    if folder is None:
        raise ValueError(f"path={pattern!r} is copied before it is used: dataset_save_location is required, a folder with room")
    names = each_once(pattern, expand_braces(pattern), lambda name: [name] if name.startswith(PIPE) else _matches(name))
    found = kind or kind_of(names[0])
    if found not in SUFFIXES:
        raise ValueError(f"path={pattern!r}: dataset_type={found!r} is of local files (elsewhere: {', '.join(SUFFIXES)})")
    if not kind:
        check_names(pattern, [name for name in names if not name.startswith(PIPE)], found)
    copies = [folder / _copy_name(name, found) for name in names]
    if missing := [(name, copy) for name, copy in zip(names, copies, strict=True) if not copy.is_file()]:
        _copy_all(missing, ENDS[found], Progress(f"copying to {folder}", len(missing)))
    return list(map(str, copies)), found


def _copy_all(missing: list[tuple[str, Path]], end: bytes, progress: Progress) -> None:
    """Copy each (name, path), several at a time; if one cannot be, none is begun any more."""
    stop = threading.Event()

    def count(size: int) -> None:
        if stop.is_set():
            raise ValueError("another file could not be copied")
        progress.add(size=size)

    def copy(wanted: tuple[str, Path]) -> None:
        name, path = wanted
        with contextlib.closing(_pipe(name.removeprefix(PIPE)) if name.startswith(PIPE) else _read(name)) as read:
            try:
                write_atomically(path, _whole(read, name, end, count))
            except OSError as error:
                raise ValueError(f"dataset_save_location={str(path.parent)!r} cannot be written to: {error}") from None
        progress.add(files=1)

    in_threads(copy, missing, COPIED_AT_ONCE, failed=stop.set)


def _copy_name(name: str, kind: str) -> str:
    """Of its whole name's hash, so that files of one name and different folders don't collide."""
    last = SUFFIXES[kind] if name.startswith(PIPE) else "-" + re.sub(r"[^\w.-]", "_", name.rpartition("/")[2])
    return hashlib.sha256(name.encode()).hexdigest()[:12] + last


def _whole(read: Iterator[bytes], name: str, end: bytes, count: Callable[[int], None]) -> Iterator[bytes]:
    """The chunks; raises ValueError if there are none, or if they don't end as a whole file does."""
    tail, total = b"", 0
    for chunk in read:
        count(len(chunk))
        tail, total = (tail + chunk)[-len(end) :] if end else b"", total + len(chunk)
        yield chunk
    if not total or tail != end:
        raise ValueError(f"{name} was cut off, or is no such file: {total} bytes came, which don't end as one does")


def _matches(url: str) -> list[str]:
    fsspec = optional("fsspec", "remote", url)
    if not re.search(r"[*?[]", url) or url.startswith("http"):  # there it begins a query
        return [url]
    try:
        files, path = fsspec.core.url_to_fs(url)
        return sorted(files.unstrip_protocol(found) for found in files.glob(path))
    except Exception as error:  # of each file system's own kinds
        raise _refusal(url, error) from error


def _read(url: str) -> Generator[bytes, None, None]:
    """The file's bytes, as many as there should be."""
    fsspec, total = optional("fsspec", "remote", url), 0
    try:
        files, path = fsspec.core.url_to_fs(url)
        size = files.info(path).get("size")
        with files.open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                total += len(chunk)
                yield chunk
    except GeneratorExit:
        raise
    except Exception as error:  # of each file system's own kinds
        raise _refusal(url, error) from error
    if size is not None and total != size:
        raise ValueError(f"{url} was cut off: {total} of {size} bytes came")


def _refusal(url: str, error: Exception) -> ValueError:
    hint = ": pip install 'maxdiff[remote]'" if isinstance(error, ImportError) else ""
    return ValueError(f"{url} cannot be copied: {type(error).__name__}: {error}{hint}")


def _pipe(command: str) -> Generator[bytes, None, None]:
    """What a shell command writes; raises ValueError if it, or a part of its pipeline, fails."""
    # A plain sh would not tell that curl failed in `curl ... | tar ...`.
    bash = shutil.which("bash")
    shell = [bash, "-o", "pipefail", "-c"] if bash else ["sh", "-c"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*shell, command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
                                   start_new_session=True)  # fmt: skip
        assert isinstance(process.stdout, io.BufferedReader)
        try:
            while chunk := process.stdout.read1(CHUNK):
                yield chunk
            code = process.wait()
        finally:
            if process.poll() is None:  # nobody wants the rest
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()
        if code:
            said.seek(0)
            words = " ".join(said.read().decode(errors="replace").split())[-500:]
            raise ValueError(f"{PIPE}{command} failed with exit code {code}: {words}")
