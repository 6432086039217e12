"""Parquet files, at random access.

A row group is the least that can be read of one, so the last groups stay decoded. Files with row groups of a hundred
images or so, and `shuffle_block`, keep what is read near what is used.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxdiff.data.examples import Columns, Example
from maxdiff.data.progress import in_threads
from maxdiff.data.rows import Recent, check_columns, image_bytes, optional

# Of decoded row groups, in each process that reads.
MAX_DECODED = 512 * 2**20
# Footers are read by as many threads at once: files may be far away.
FOOTER_THREADS = 32


class Footer(NamedTuple):
    """What a file says of itself: the rows of each group, its columns that are no files, and a hash of all that it says."""

    rows: list[int]
    fields: tuple[str, ...]
    digest: str


class ParquetSource:
    """The rows of parquet files, in the order of the files; an image is bytes, {bytes, path} or a path beside the file."""

    def __init__(self, paths: Sequence[Path], columns: Columns, image_column: str):
        optional("pyarrow.parquet", "parquet", str(paths[0]))
        self._paths, self._columns, self._image = list(paths), columns, image_column
        self._footers = in_threads(self._footer, self._paths, FOOTER_THREADS)
        groups = [(file, group) for file, footer in enumerate(self._footers) for group in range(len(footer.rows))]
        self._groups = np.array(groups, np.int64)
        self._ends = np.cumsum([rows for footer in self._footers for rows in footer.rows])
        self._decoded: Recent[tuple[int, bool], Any] = self._make_recent()

    def _make_recent(self) -> Recent[tuple[int, bool], Any]:
        return Recent(self._decode, lambda table: table.nbytes, MAX_DECODED)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int, /) -> Example:
        group, row, key = self._find(i)
        fields = self._row(group, row, with_image=True)
        image = image_bytes(fields.pop(self._image), self._path(group).parent, key, self._image)
        return Example(key, image, self._columns.texts(fields, key))

    def fields(self, i: int, /) -> dict[str, Any]:
        """See `Source`; columns of files, such as images, are not among them."""
        group, row, _ = self._find(i)
        return self._row(group, row, with_image=False)

    def fingerprint(self) -> str:
        """See `Source`."""
        return hashlib.sha256(" ".join([self._image, *(footer.digest for footer in self._footers)]).encode()).hexdigest()

    def _path(self, group: int) -> Path:
        return self._paths[self._groups[group, 0]]

    def _find(self, i: int) -> tuple[int, int, str]:
        """(row group of all files', row within it, the example's key)."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        group = int(np.searchsorted(self._ends, i, "right"))
        row = i - int(self._ends[group - 1] if group else 0)
        return group, row, f"{self._path(group)}:{self._groups[group, 1]}:{row}"

    def _row(self, group: int, row: int, with_image: bool) -> dict[str, Any]:
        table = self._decoded.get((group, with_image))
        return {name: column[row].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}

    def _decode(self, wanted: tuple[int, bool]) -> Any:
        """A row group's table: the image and the captions' columns, or all that are no files."""
        import pyarrow.parquet as pq

        group, with_image = wanted
        file, number = self._groups[group].tolist()
        names = self._footers[file].fields
        if with_image:
            names = [self._image, *(name for name in names if name in self._columns.names)]
        try:
            with pq.ParquetFile(self._paths[file], page_checksum_verification=True) as opened:
                return opened.read_row_group(number, columns=list(names))
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ValueError(f"{self._paths[file]}: row group {number} cannot be read: {error}") from None

    def _footer(self, path: Path) -> Footer:
        """Raises ValueError for a file that is damaged, empty or without the columns."""
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                schema, metadata = file.schema_arrow, file.metadata
                rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} of {path.stat().st_size} bytes is truncated or no parquet file: {error}") from None
        check_columns(str(path), schema.names, self._image, self._columns)
        if not _is_file(kind := schema.field(self._image).type) and not _is_text(kind):
            raise ValueError(f"{path}: image_column={self._image!r} is of type {kind} (allowed: bytes, "
                             "a struct of bytes and path, or paths)")  # fmt: skip
        if not sum(rows):
            raise ValueError(f"{path} is empty: it has no rows")
        fields = tuple(field.name for field in schema if field.name != self._image and not _is_file(field.type))
        return Footer(rows, fields, _digest(path))

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_decoded"}

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        self._decoded = self._make_recent()


def _is_file(kind: Any) -> bool:
    """Whether values of this type are bytes or, as Hugging Face's images, {bytes, path}."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _digest(path: Path) -> str:
    """A hash of the file's footer: its rows, and where and how large each group's columns are."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, 2)
        return hashlib.sha256(file.read(size)).hexdigest()
