"""A folder of images with their captions beside them."""

import csv
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxdiff.data.examples import TEXT_COLUMNS, BadExample, Columns, Example, LostExample
from maxdiff.data.tar_index import IMAGE_SUFFIXES

METADATA = ("metadata.jsonl", "metadata.csv")
METADATA_SUFFIXES = (".jsonl", ".csv")


def open_folder(folder: Path, columns: Columns) -> "FolderSource":
    """The images of a folder with metadata.jsonl or metadata.csv, or with a .txt beside each image; raises as `open_source`."""
    metadata = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(metadata) > 1:
        raise ValueError(f"{folder} has both {' and '.join(METADATA)}: keep one")
    rows = list(_metadata_rows_of(metadata[0], columns) if metadata else _text_files(folder, columns))
    if not rows:
        raise ValueError(f"{metadata[0] if metadata else folder} names no images ({', '.join(IMAGE_SUFFIXES)})")
    if metadata:
        _check_images(metadata[0], [folder / name for name, _ in rows])
    return FolderSource(folder, rows, columns)


def open_tables(paths: Sequence[Path], columns: Columns, image_column: str) -> "FolderSource":
    """The images that .csv or .jsonl files name, by paths from where each file lies; raises as `open_source`."""
    folders = [path.parent.absolute() if len(paths) > 1 else path.parent for path in paths]
    folder = Path(os.path.commonpath(folders))
    rows: list[tuple[str, dict[str, Any]]] = []
    for path, there in zip(paths, folders, strict=True):
        named = list(_metadata_rows_of(path, columns, (image_column, "file_name")))
        if not named:
            raise ValueError(f"{path} is empty: it names no images")
        _check_images(path, [there / name for name, _ in named])
        rows += [(str(there.relative_to(folder) / name), row) for name, row in named]
    return FolderSource(folder, rows, columns)


def _check_images(table: Path, images: Sequence[Path]) -> None:
    if missing := [image for image in images if not image.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is not there, which {table.name} names "
                                f"({len(missing)} of {len(images)} images are missing)")  # fmt: skip


class FolderSource:
    """Images in a folder, in the order of their metadata or, without metadata, of their names."""

    def __init__(self, folder: Path, rows: Sequence[tuple[str, dict[str, Any] | None]], columns: Columns):
        self._folder, self._rows, self._columns = folder, rows, columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int, /) -> Example:
        fields = self.fields(i)
        path = self._folder / self._rows[i][0]
        try:
            return Example(str(path), path.read_bytes(), self._columns.texts(fields, str(path)))
        except OSError as error:
            raise LostExample(str(path), f"cannot be read: {error}") from None

    def fields(self, i: int, /) -> dict[str, Any]:
        """See `Source`."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        name, row = self._rows[i]
        if row is not None:
            return row
        path = self._folder / name
        try:
            text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise BadExample(str(path), f"its caption is not UTF-8 ({error})") from None
        except OSError as error:
            raise LostExample(str(path), f"its caption cannot be read: {error}") from None
        return dict.fromkeys(TEXT_COLUMNS, text)

    def fingerprint(self) -> str:
        """See `Source`: also of the metadata and captions."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, row in self._rows:
            path = self._folder / name
            text = path.with_suffix(".txt").read_bytes() if row is None else json.dumps(row, sort_keys=True).encode()
            digest.update(f"{name} {path.stat().st_size} {len(text)} ".encode(errors="surrogateescape") + text)
        return digest.hexdigest()


def _metadata_rows_of(
    path: Path, columns: Columns, names: Sequence[str] = ("file_name",)
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(image, row) for each row: the image is that of the first of the columns `names` that it has."""
    for number, row in _metadata_rows(path):
        name = next((name for name in names if isinstance(row, dict) and isinstance(row.get(name), str)), None)
        if name is None:
            there = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path}, line {number}: no column {' nor '.join(map(repr, names))} (allowed: {there})")
        try:
            columns.texts(row, "row")
        except BadExample as error:
            raise ValueError(f"{path}, line {number}: {error.reason}") from None
        yield row[name].strip(), row


def _metadata_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, row) for each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                reader = csv.DictReader(file)
                for row in reader:
                    if None in row:
                        raise ValueError(f"{path}, line {reader.line_num} has more fields than the header: "
                                         "a caption with a comma stands in double quotes")  # fmt: skip
                    yield reader.line_num, row
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _json_row(path, number, line)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _json_row(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}") from None


def _text_files(folder: Path, columns: Columns) -> Iterator[tuple[str, None]]:
    """Images with a .txt beside each, whose text is read when it is wanted."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("."))
    images = [name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    if not images and any(name.endswith(".tar") for name in names):
        raise ValueError(f"{folder} holds tars, and maybe some to hold out: name those to use, as {folder}/*.tar")
    if not images and (others := [name for name in names if name.endswith((".parquet", *METADATA_SUFFIXES))]):
        raise ValueError(f"{folder} holds no images: name the files to use, as {folder / others[0]}")
    if images and (column := columns.names[0]) not in TEXT_COLUMNS:
        raise ValueError(f"caption_column={column!r}: {folder} has neither {' nor '.join(METADATA)} (allowed: 'text')")
    texts = {name for name in names if name.endswith(".txt")}
    for name in images:
        if Path(name).with_suffix(".txt").as_posix() not in texts:
            raise ValueError(f"{folder / name} has no caption: neither {' nor '.join(METADATA)} is in {folder}, "
                             f"nor {Path(name).with_suffix('.txt').name} beside the image")  # fmt: skip
        yield name, None
