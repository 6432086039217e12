"""Where examples come from: WebDataset tars or a folder of images, either at random access.

A source has a length, and `source[i]` is its i-th Example. Nothing is decoded here: an Example holds an
image file's bytes and its caption.
"""

import bisect
import csv
import glob
import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maxdiff.data.files import Files
from maxdiff.data.tar_index import IMAGE_SUFFIXES, JSON, TEXT, TarIndex, open_index

logger = logging.getLogger(__name__)

METADATA = ("metadata.jsonl", "metadata.csv")
# "text" is the usual name of the column, and of what a .txt member or file holds.
TEXT_COLUMNS = ("text", "txt")


class Example(NamedTuple):
    """One captioned image.

    Attributes:
        key: its name within the source, for messages.
        image: the image file, undecoded.
        caption: may be empty.
    """

    key: str
    image: bytes
    caption: str


class BadExample(ValueError):
    """An example that cannot be used, by its key; others are not affected."""

    def __init__(self, key: str, reason: str):
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self):
        return f"{self.key}: {self.reason}"


class Source(Protocol):
    """What a pipeline asks of a source."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Example:
        """Raises BadExample for an example that cannot be used, OSError or ValueError for a source that cannot."""
        ...


def open_source(path: str | Path, caption_column: str = "text", cache_dir: str | Path | None = None) -> Source:
    """Open the examples at `path`, checking all that can be checked without reading images.

    Args:
        path: a tar, a glob or brace notation of tars (`emoji-{000000..000003}.tar`), or a folder of images
            with metadata.jsonl or metadata.csv, or with a .txt beside each image.
        caption_column: a column of the metadata, or a field of the .json beside an image in a tar.
            `text` also means the .txt member or file, which goes before the .json.
        cache_dir: where a tar's index is kept, if not beside the tar.

    Raises:
        FileNotFoundError: if nothing is there, or a file that the metadata name is not.
        ValueError: for no examples, an example without a caption, a column that is not there, a damaged tar.
    """
    if Path(path).is_dir():
        return _open_folder(Path(path), caption_column)
    tars = [open_index(tar, Path(cache_dir) if cache_dir else None) for tar in _tar_paths(str(path))]
    return TarSource(tars, caption_column)


# --- WebDataset tars ---------------------------------------------------------------------------------


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}{,x}.tar` -> its six names, as a shell does; a number keeps its zeros."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    inner = match[1]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        items = [f"{i:0{width}d}" for i in range(int(numbers[1]), int(numbers[2]) + 1)]
    elif "," in inner:
        items = inner.split(",")
    else:
        raise ValueError(f"path={pattern!r}: {{{inner}}} is no brace notation (allowed: {{000..009}} and {{a,b}})")
    if not items:
        raise ValueError(f"path={pattern!r}: {{{inner}}} counts down to nothing")
    return [name for item in items for name in expand_braces(pattern[: match.start()] + item + pattern[match.end() :])]


def _tar_paths(pattern: str) -> list[Path]:
    paths: list[Path] = []
    # A file may have braces or brackets in its name.
    names = [pattern] if Path(pattern).is_file() else expand_braces(pattern)
    for name in names:
        found = [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True))
        if not found:
            other = f" (of path={pattern!r})" if name != pattern else ""
            raise FileNotFoundError(f"nothing matches {name}{other}: a path names a folder of images, or one or more tars")
        paths += map(Path, found)
    if wrong := [str(path) for path in paths if path.suffix != ".tar" or not path.is_file()]:
        raise ValueError(f"path={pattern!r} names {wrong[0]}, which is not a tar (allowed: uncompressed .tar files)")
    if len(set(paths)) < len(paths):
        raise ValueError(f"path={pattern!r} names {max(paths, key=paths.count)} more than once")
    return paths


class TarSource:
    """Examples in tars, in the order of the tars and of their members.

    It may be pickled, and read from many threads.
    """

    def __init__(self, tars: Sequence[TarIndex], caption_column: str):
        self._tars, self._column = tars, caption_column
        self._ends = list(accumulate(len(tar) for tar in tars))
        self._files = Files()
        for tar in tars:
            self._check_captions(tar)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int, /) -> Example:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = bisect.bisect_right(self._ends, i)
        tar = self._tars[number]
        row = i - (self._ends[number - 1] if number else 0)
        key = f"{tar.path}:{tar.key(row)}"
        return Example(key, self._files.read(tar.path, *tar.image(row)), self._caption(tar, row, key))

    def _from_text(self, tar: TarIndex, row: int) -> bool:
        return self._column in TEXT_COLUMNS and tar.text(row) is not None

    def _caption(self, tar: TarIndex, row: int, key: str) -> str:
        from_text = self._from_text(tar, row)
        member = tar.text(row) if from_text else tar.json(row)
        assert member is not None, key  # checked when the source was opened
        try:
            text = self._files.read(tar.path, *member).decode("utf-8")
            if from_text:
                return text.strip()
            fields = json.loads(text)
        except UnicodeDecodeError as error:
            raise BadExample(key, f"its caption is not UTF-8 ({error})") from None
        except json.JSONDecodeError as error:
            raise BadExample(key, f"its .json is no JSON ({error})") from None
        return _field(fields, self._column, key)

    def _check_captions(self, tar: TarIndex) -> None:
        by_text = self._column in TEXT_COLUMNS
        captioned = tar.has(TEXT, JSON) if by_text else tar.has(JSON)
        if not captioned.all():
            row = int(captioned.argmin())
            wanted = "no .txt and no .json" if by_text else "no .json"
            raise ValueError(f"{tar.path}: {tar.key(row)} has no caption: it has {wanted} "
                             f"(caption_column={self._column!r})")  # fmt: skip
        if not self._from_text(tar, 0):
            try:
                self._caption(tar, 0, tar.key(0))
            except BadExample as error:  # the first of a tar speaks for its layout
                raise ValueError(f"{tar.path}: {error}") from None


def _field(fields: Any, column: str, key: str) -> str:
    if not isinstance(fields, dict) or column not in fields:
        columns = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise BadExample(key, f"no caption_column={column!r} (allowed: {columns})")
    if not isinstance(fields[column], str):
        raise BadExample(key, f"caption_column={column!r} holds {fields[column]!r}, not a text")
    return fields[column].strip()


# --- a folder of images ------------------------------------------------------------------------------


def _open_folder(folder: Path, column: str) -> "FolderSource":
    metadata = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(metadata) > 1:
        raise ValueError(f"{folder} has both {' and '.join(METADATA)}: keep one")
    rows = list(_metadata_captions(metadata[0], column) if metadata else _text_files(folder, column))
    if not rows:
        raise ValueError(f"{metadata[0] if metadata else folder} names no images ({', '.join(IMAGE_SUFFIXES)})")
    if missing := [name for name, _ in rows if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder / missing[0]} is not there, which {metadata[0].name} names "
                                f"({len(missing)} of {len(rows)} images are missing)")  # fmt: skip
    return FolderSource(folder, rows)


class FolderSource:
    """Images in a folder, in the order of their metadata or, without metadata, of their names."""

    def __init__(self, folder: Path, rows: Sequence[tuple[str, str | None]]):
        self._folder, self._rows = folder, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int, /) -> Example:
        if not 0 <= i < len(self):
            raise IndexError(i)
        name, caption = self._rows[i]
        path = self._folder / name
        if caption is None:
            try:
                caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
            except UnicodeDecodeError as error:
                raise BadExample(str(path), f"its caption is not UTF-8 ({error})") from None
        return Example(str(path), path.read_bytes(), caption)


def _metadata_captions(path: Path, column: str) -> Iterator[tuple[str, str]]:
    for number, row in _metadata_rows(path):
        try:
            yield _field(row, "file_name", "row"), _field(row, column, "row")
        except BadExample as error:
            message = error.reason.replace("no caption_column='file_name'", "no column 'file_name'")
            raise ValueError(f"{path}, line {number}: {message}") from None


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


def _text_files(folder: Path, column: str) -> Iterator[tuple[str, None]]:
    """Images with a .txt beside each, whose text is read when it is wanted."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("."))
    images = [name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    if not images and any(name.endswith(".tar") for name in names):
        raise ValueError(f"{folder} holds tars, and maybe some to hold out: name those to use, as {folder}/*.tar")
    if images and column not in TEXT_COLUMNS:
        raise ValueError(f"caption_column={column!r}: {folder} has neither {' nor '.join(METADATA)} (allowed: 'text')")
    texts = {name for name in names if name.endswith(".txt")}
    for name in images:
        if Path(name).with_suffix(".txt").as_posix() not in texts:
            raise ValueError(f"{folder / name} has no caption: neither {' nor '.join(METADATA)} is in {folder}, "
                             f"nor {Path(name).with_suffix('.txt').name} beside the image")  # fmt: skip
        yield name, None
