"""Where examples come from: whatever a path names, at random access, filtered and mixed."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxdiff.data.arrayrecord import ArrayRecordSource
from maxdiff.data.examples import BadExample, Columns, Example, Filter, LostExample, Source
from maxdiff.data.folders import open_folder, open_tables
from maxdiff.data.hf import is_saved, open_hf
from maxdiff.data.parquet import ParquetSource
from maxdiff.data.paths import check_names, kind_of, local_names
from maxdiff.data.progress import Progress, in_threads
from maxdiff.data.remote import is_remote, local_copies
from maxdiff.data.tar_index import open_indexes
from maxdiff.data.tars import TarSource
from maxdiff.weights.tensors import write_atomically

# Fields of as many examples are read at once; they are a few hundred bytes each, in files that may be far away.
FILTER_THREADS = 32
FILTER_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Format:
    """How a path is to be read.

    Attributes:
        kind: webdataset, folder, table, parquet, hf or arrayrecord; "" for what the path's name says.
        image_column: of all but tars and folders, which column holds the image or its path.
        split: of Hugging Face datasets.
    """

    kind: str = ""
    image_column: str = "image"
    split: str = "train"


def open_source(
    path: str | Path,
    columns: Columns | None = None,
    cache_dir: str | Path | None = None,
    filters: Sequence[Filter] = (),
    form: Format = Format(),
) -> Source:
    """Open the examples at `path`, checking all that can be checked without reading images.

    Args:
        path: a glob or brace notation of files of one kind (`emoji-{000000..000003}.tar`): tars, parquet, .csv or .jsonl
            with paths of images, ArrayRecord; or a folder of images with metadata.jsonl or metadata.csv, or with a .txt
            beside each image; or a Hugging Face dataset's folder or, if `form` says so, its name. Files may be a URL that
            fsspec knows, or `pipe:COMMAND`: they are copied to `cache_dir` first.
        columns: what captions are made of; by default `text`, the .txt beside an image or the metadata's column.
        cache_dir: where tars' indexes, copies of files that are elsewhere, and which examples filters keep are written; by
            default indexes lie beside their tars.
        filters: conditions that examples must meet.
        form: how the path is to be read.

    Raises:
        FileNotFoundError: if nothing is there, or a file that the metadata name is not.
        ValueError: for no examples, an example without a caption, a column that is not there, a damaged file, one that
            cannot be copied, a format whose package is not installed, or filters that no example meets.
    """
    columns, cache = columns or Columns(), Path(cache_dir) if cache_dir else None
    source = _open(str(path), columns, cache, form)
    return filtered(source, filters, cache) if filters else source


def _open(path: str, columns: Columns, cache: Path | None, form: Format) -> Source:
    kind, is_folder = form.kind, Path(path).is_dir()
    if kind == "hf" or (not kind and is_folder and is_saved(Path(path))):
        return open_hf(path, columns, form.image_column, form.split, cache)
    if kind == "folder" and not is_folder:
        raise ValueError(f"dataset_type='folder': {path} is no folder")
    if is_folder:
        if kind not in ("", "folder"):
            raise ValueError(f"dataset_type={kind!r}: {path} is a folder; name the files in it, as {path}/*")
        return open_folder(Path(path), columns)
    if is_remote(path):
        names, kind = local_copies(path, kind, cache)
    else:
        names = local_names(path)
        if not kind:
            kind = kind_of(names[0])
            check_names(path, names, kind)
    paths = [Path(name) for name in names]
    match kind:
        case "parquet":
            return ParquetSource(paths, columns, form.image_column)
        case "table":
            return open_tables(paths, columns, form.image_column)
        case "arrayrecord":
            return ArrayRecordSource(paths, columns, form.image_column)
    return TarSource(open_indexes(paths, cache), columns)


class Subset:
    """Some examples of a source, in its order.

    Attributes:
        whole: how many the source has.
    """

    def __init__(self, source: Source, rows: np.ndarray):
        self._source, self._rows, self.whole = source, rows, len(source)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int, /) -> Example:
        return self._source[int(self._rows[i])]

    def fields(self, i: int, /) -> Mapping[str, Any]:
        """See `Source`."""
        return self._source.fields(int(self._rows[i]))

    def fingerprint(self) -> str:
        """See `Source`."""
        return hashlib.sha256(self._source.fingerprint().encode() + self._rows.tobytes()).hexdigest()


def filtered(source: Source, filters: Sequence[Filter], cache_dir: Path | None = None) -> Subset:
    """The examples that meet all conditions. What was found is kept in `cache_dir`, if there is one.

    An example whose fields are damaged meets none.

    Raises:
        ValueError: if there are no such examples, or a file cannot be read: what was found would be wrong another time.
    """
    said = [f"{rule.field} {rule.condition}" for rule in filters]
    name = hashlib.sha256(json.dumps([source.fingerprint(), said]).encode()).hexdigest()[:16]
    kept = cache_dir / f"{name}.rows" if cache_dir else None
    if kept and kept.is_file() and kept.stat().st_size % 8 == 0:
        rows = np.fromfile(kept, "<i8")
    else:
        progress = Progress("filtering", len(source), "examples")

        def meeting(chunk: range) -> list[int]:
            found = [i for i in chunk if _meets(source, i, filters)]
            progress.add(len(chunk))
            return found

        chunks = [range(i, min(i + FILTER_CHUNK, len(source))) for i in range(0, len(source), FILTER_CHUNK)]
        found = in_threads(meeting, chunks, FILTER_THREADS)
        rows = np.array([i for chunk in found for i in chunk], np.int64)
        if kept:
            write_atomically(kept, [rows.astype("<i8").tobytes()])
    if not len(rows):
        raise ValueError(f"filters: none of {len(source)} examples meets {', '.join(said)}")
    return Subset(source, rows)


def _meets(source: Source, i: int, filters: Sequence[Filter]) -> bool:
    try:
        fields = source.fields(i)
    except LostExample:
        raise
    except BadExample:
        return False
    return all(rule.keeps(fields) for rule in filters)
