"""Which bytes of a tar are which example's, found once and kept in a file beside it.

Index file: one line of JSON (the tar's size and modification time, the number of examples, checksums of their texts and of
the whole), then int64 [n 9] (end of the key; offset and size of image, .txt, .json and .cls; size -1 for none), then the keys.
"""

import functools
import hashlib
import json
import logging
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxdiff.data.progress import Progress, in_threads
from maxdiff.data.tar_headers import members
from maxdiff.weights.tensors import write_atomically

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
VERSION = 4
# Headers of as many tars are read at once: they may be far away.
TARS_AT_ONCE = 16
KEY_END, IMAGE, TEXT, JSON, CLASS, COLUMNS = 0, 1, 3, 5, 7, 9
SUFFIXES = {TEXT: ".txt", JSON: ".json", CLASS: ".cls"}


class TarIndex:
    """The examples of one tar. Members are (offset, size) in bytes, or None."""

    def __init__(self, path: Path, table: np.ndarray, keys: bytes, texts: int):
        self.path, self._table, self._keys, self._texts = path, table, keys, texts

    def __len__(self) -> int:
        return len(self._table)

    def key(self, row: int) -> str:
        start = self._table[row - 1, KEY_END] if row else 0
        return self._keys[start : self._table[row, KEY_END]].decode("utf-8", "surrogateescape")

    def image(self, row: int) -> tuple[int, int]:
        return int(self._table[row, IMAGE]), int(self._table[row, IMAGE + 1])

    def member(self, row: int, kind: int) -> tuple[int, int] | None:
        """Where the example's member of a kind (TEXT, JSON, CLASS) lies."""
        offset, size = self._table[row, kind : kind + 2].tolist()
        return None if size < 0 else (offset, size)

    def has_member(self, row: int, kind: int) -> bool:
        """Whether the example has a member of a kind."""
        return bool(self._table[row, kind + 1] >= 0)

    def has(self, *kinds: int) -> np.ndarray:
        """Which examples have a member of one of these kinds: bool [n]."""
        return np.any(self._table[:, [kind + 1 for kind in kinds]] >= 0, axis=1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the examples' keys and texts, and of where in the tar they lie."""
        return hashlib.sha256(np.ascontiguousarray(self._table).tobytes() + self._keys + str(self._texts).encode()).hexdigest()


def open_indexes(tars: Sequence[Path], cache_dir: Path | None = None) -> list[TarIndex]:
    """The index of each tar, several made at once; raises as `open_index`."""
    progress = Progress("opening tars", len(tars))

    def open_one(tar: Path) -> TarIndex:
        index = open_index(tar, cache_dir)
        progress.add(files=1)
        return index

    return in_threads(open_one, tars, TARS_AT_ONCE)


def open_index(tar: Path, cache_dir: Path | None = None) -> TarIndex:
    """The tar's index: the kept one if it is whole and the tar is still as it was, else a new one, kept.

    Raises:
        ValueError: if the tar is damaged, truncated or without images, or `cache_dir` cannot be written to.
    """
    path = index_path(tar, cache_dir)
    stamp = _stamp(tar)
    if (index := _read_index(path, tar, stamp)) is not None:
        return index
    index = _build(tar)
    try:
        write_atomically(path, _encode(index, stamp))
    except OSError as error:
        if cache_dir is not None:
            raise ValueError(f"dataset_save_location={str(cache_dir)!r} cannot be written to: {error}") from None
        # A dataset may well be on a read-only disk; it works, at the cost of a scan at each start.
        logger.warning("%s cannot be kept (%s): set dataset_save_location, or each start indexes the tar anew", path, error)
    return index


def index_path(tar: Path, cache_dir: Path | None = None) -> Path:
    """Where the tar's index is kept. In a shared folder, tars of one name and different folders don't collide."""
    if cache_dir is None:
        return tar.with_name(f"{tar.name}.index")
    return cache_dir / f"{tar.name}.{hashlib.sha256(str(tar.resolve()).encode()).hexdigest()[:12]}.index"


def _stamp(tar: Path) -> dict[str, int]:
    stat = tar.stat()
    return {"version": VERSION, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _encode(index: TarIndex, stamp: dict[str, int]) -> list[bytes]:
    body = index._table.astype("<i8").tobytes() + index._keys
    header = {**stamp, "examples": len(index), "texts": index._texts}
    return [json.dumps({**header, "crc32": _checksum(header, body)}).encode() + b"\n", body]


def _checksum(header: dict[str, int], body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(json.dumps(header).encode()))


def _read_index(path: Path, tar: Path, stamp: dict[str, int]) -> TarIndex | None:
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    try:
        header = json.loads(head)
        whole = header.pop("crc32") == _checksum(header, body)
        examples, texts = header.pop("examples"), header.pop("texts")
    except (ValueError, KeyError, TypeError, AttributeError):
        whole, header, examples, texts = False, {}, 0, 0
    if not whole:
        logger.warning("%s is damaged: indexing %s again", path, tar)
        return None
    if header != stamp:
        logger.info("%s has changed: indexing it again", tar)
        return None
    size = examples * COLUMNS * 8
    return TarIndex(tar, np.frombuffer(body[:size], "<i8").reshape(examples, COLUMNS), body[size:], texts)


def _build(tar: Path) -> TarIndex:
    groups = _members(tar)
    keys, table, end, without = [], [], 0, []
    for key, found in groups.items():
        if "image" not in found:
            without.append(key)
            continue
        keys.append(key.encode("utf-8", "surrogateescape"))
        end += len(keys[-1])
        none = (0, -1)
        table.append([end, *found["image"], *(x for kind in ("txt", "json", "cls") for x in found.get(kind, none))])
    if not table:
        raise ValueError(f"{tar} is an empty shard: none of its {len(groups)} keys has an image ({', '.join(IMAGE_SUFFIXES)})")
    if without:
        logger.warning("%s: %d of %d keys have no image (%s) and are left out, first %s", tar, len(without), len(groups),
                       ", ".join(IMAGE_SUFFIXES), without[0])  # fmt: skip
    whole = np.array(table, np.int64).reshape(-1, COLUMNS)
    return TarIndex(tar, whole, b"".join(keys), _checksum_of_texts(tar, whole))


def _checksum_of_texts(tar: Path, table: np.ndarray) -> int:
    """CRC-32 of the members that hold captions and metadata, which say what an example is as much as its image does."""
    crc = 0
    with tar.open("rb", buffering=0) as file:
        for row in table[:, TEXT:].tolist():
            for offset, size in zip(row[::2], row[1::2], strict=True):
                if size > 0:
                    crc = zlib.crc32(os.pread(file.fileno(), size, offset), crc)
    return crc


def _members(tar: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """key -> {"image" | "txt" | "json" | "cls": (offset, size)}, read from the members' headers alone."""
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        for name, offset, size in members(tar):
            _add(groups, tar, name, (offset, size))
    except tarfile.TarError as error:
        raise ValueError(f"{tar} of {tar.stat().st_size} bytes is truncated or no uncompressed tar: {error}") from None
    return groups


def _add(groups: dict[str, dict[str, tuple[int, int]]], tar: Path, path: str, where: tuple[int, int]) -> None:
    """As WebDataset does it: the key is the path up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.partition(".")
    if not stem or not dot:
        return
    suffix = suffix.lower()
    kind = "image" if f".{suffix}" in IMAGE_SUFFIXES else suffix
    if kind not in ("image", "txt", "json", "cls"):
        kind = None
    group = groups.setdefault(folder + slash + stem, {})
    if kind in group:
        raise ValueError(f"{tar}: {folder + slash + stem} has two members of kind {kind}, the second {path}")
    if kind is not None:
        group[kind] = where
