"""ArrayRecord files, at random access: each record a tf.train.Example, as TensorFlow Datasets writes them."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxdiff.data.examples import BadExample, Columns, Example
from maxdiff.data.rows import check_columns, image_bytes, optional

# Bytes at the end of a file that hold where all its records lie, of a file of up to some thousands.
FOOTER = 2**16


class ArrayRecordSource:
    """Records in the order of the files. A record is read as a whole, also for its fields alone."""

    def __init__(self, paths: Sequence[Path], columns: Columns, image_column: str):
        module = optional("array_record.python.array_record_data_source", "arrayrecord", str(paths[0]))
        self._paths, self._columns, self._image = list(map(str, paths)), columns, image_column
        try:
            self._records = module.ArrayRecordDataSource(self._paths)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{self._paths[0]}: truncated, or no ArrayRecord file: {error}") from None
        if not len(self):
            raise ValueError(f"{self._paths[0]} is empty: it has no records")
        try:
            there = self._features(0)
        except BadExample as error:
            raise ValueError(str(error)) from None
        check_columns(self._paths[0], there, image_column, columns)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, i: int, /) -> Example:
        fields, key = self._features(i), self._key(i)
        if self._image not in fields:
            raise BadExample(key, f"no image_column={self._image!r} (allowed: {sorted(fields)})")
        image = image_bytes(fields.pop(self._image), Path(), key, self._image)
        return Example(key, image, self._columns.texts(fields, key))

    def fields(self, i: int, /) -> dict[str, Any]:
        """See `Source`."""
        return {name: value for name, value in self._features(i).items() if name != self._image}

    def fingerprint(self) -> str:
        """See `Source`: of each file's size and of its end, which says where its records lie."""
        digest = hashlib.sha256(f"{self._image} {len(self)} ".encode())
        for path in self._paths:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - FOOTER))
                digest.update(f"{size} ".encode() + file.read())
        return digest.hexdigest()

    def _key(self, i: int) -> str:
        file, row = self._records._reader_idx_and_position(i)
        return f"{self._paths[file]}:{row}"

    def _features(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        try:
            features = parse_example(self._records[i])
        except (RuntimeError, ValueError, IndexError) as error:
            raise BadExample(self._key(i), f"cannot be read as a tf.train.Example: {error}") from None
        image = features.get(self._image)
        return {name: value if value is image else _text(value) for name, value in features.items()}


def _text(value: Any) -> Any:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def parse_example(record: bytes) -> dict[str, Any]:
    """The features of a serialised tf.train.Example: bytes, floats or integers, or a list of any number but one.

    Raises:
        ValueError: if it is none.
    """
    features: dict[str, Any] = {}
    for entry in _parts(memoryview(record), 1, 1):  # Example.features, Features.feature
        named = dict(_fields(entry))
        if not isinstance(name := named.get(1, memoryview(b"")), memoryview):
            raise ValueError("a feature has no name")
        for kind, values in _fields(named.get(2, memoryview(b""))):
            found = _values(kind, values)
            features[str(name, "utf-8")] = found[0] if len(found) == 1 else found
    return features


def _values(kind: int, data: Any) -> list[Any]:
    """Of a BytesList (1), FloatList (2) or Int64List (3), whose numbers may be packed."""
    found: list[Any] = []
    for _, value in _fields(data):
        if kind != 3 and isinstance(value, int):
            raise ValueError(f"the number {value} among bytes or floats")
        if kind == 1:
            found.append(bytes(value))
        elif kind == 2:
            found += np.frombuffer(value, "<f4").tolist()
        elif isinstance(value, int):
            found.append(value - 2**64 if value >= 2**63 else value)
        else:
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                found.append(number - 2**64 if number >= 2**63 else number)
    return found


def _parts(data: memoryview, *path: int) -> Iterator[memoryview]:
    """The messages at a path of field numbers."""
    if not path:
        yield data
        return
    for number, value in _fields(data):
        if number == path[0]:
            yield from _parts(value, *path[1:])


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """(field number, integer or bytes) of each field of a message in protobuf's wire format."""
    if not isinstance(data, memoryview):
        raise ValueError("a number where a message should be")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, len(data) + 1), at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError(f"the field at byte {at - size} ends after byte {len(data)}")
        yield tag >> 3, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(the number at a byte, the byte after it)."""
    number, shift = 0, 0
    while at < len(data) and shift < 70:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at
    raise ValueError(f"no number ends at byte {at}")
