"""Hugging Face datasets, at random access: a folder that `save_to_disk` wrote, or a name on the hub."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxdiff.data.examples import Columns, Example
from maxdiff.data.rows import check_columns, image_bytes, optional

# What save_to_disk writes, of splits and of one of them.
MARKS = ("dataset_dict.json", "state.json")


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((folder / mark).is_file() for mark in MARKS)


def open_hf(path: str, columns: Columns, image_column: str, split: str, cache_dir: Path | None = None) -> "HFSource":
    """The dataset at `path`; the hub's is kept in `cache_dir`, if there is one. Raises as `open_source`."""
    datasets = optional("datasets", "hf", path)
    try:
        if is_saved(Path(path)):
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, split=split, cache_dir=cache_dir and str(cache_dir))
    except Exception as error:  # of a dozen kinds: of the hub, the network, the reader of some format
        raise ValueError(f"{path} with train_split={split!r} cannot be loaded: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{path} has no train_split={split!r} (allowed: {sorted(map(str, found))})")
        found = found[split]
    elif is_saved(Path(path)) and split not in ("train", str(found.split)):
        raise ValueError(f"{path} has no train_split={split!r}: it is one split (allowed: train)")
    check_columns(path, found.column_names, image_column, columns)
    if not len(found):
        raise ValueError(f"{path} is empty: it has no rows")
    return HFSource(path, found.with_format(None), columns, image_column)


class HFSource:
    """The rows of a dataset; an image is an Image feature, bytes, or a path, beside the dataset if it is relative."""

    def __init__(self, path: str, dataset: Any, columns: Columns, image_column: str):
        import datasets

        # A feature that decodes would give an array, and decode it for each field that is read.
        files = [name for name, feature in dataset.features.items() if hasattr(feature, "decode_example")]
        for name in files:
            if isinstance(feature := dataset.features[name], datasets.Image) and feature.decode:
                dataset = dataset.cast_column(name, datasets.Image(decode=False))
        self._path, self._columns, self._image = path, columns, image_column
        there = [name for name in dataset.column_names if name not in files and name != image_column]
        self._fields = dataset.select_columns(there)
        self._rows = dataset.select_columns([image_column, *(name for name in there if name in columns.names)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int, /) -> Example:
        row, key = self._row(self._rows, i), f"{self._path}:{i}"
        image = image_bytes(row.pop(self._image), Path(self._path), key, self._image)
        return Example(key, image, self._columns.texts(row, key))

    def fields(self, i: int, /) -> Mapping[str, Any]:
        """See `Source`; columns of files, such as images, are not among them."""
        return self._row(self._fields, i)

    def fingerprint(self) -> str:
        """See `Source`."""
        return hashlib.sha256(f"{self._image} {len(self)} {self._rows._fingerprint}".encode()).hexdigest()

    def _row(self, dataset: Any, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return dict(dataset[i])
