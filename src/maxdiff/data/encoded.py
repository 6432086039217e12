"""Examples that were encoded once: latents' moments and text states, read at random access as images are.

A folder holds shards of `ROWS` examples in the source's order, shard-000000.safetensors, ...: mean and logvar [n h w c],
unscaled, and with mirrored images flip_mean and flip_logvar; states [n 77 d] and, for SDXL, pooled [n p]; original_size and
crop int32 [n 2]; a crc32 of each row's bytes; keys and captions as JSON. empty.safetensors has the text of no words. Of latents
alone there are no states and no such file; the texts that captions are made of stand where captions do, each row's as a
JSON of its own, whose ends are int64 [n], and part of its crc32.
encoding.json says what all of it was made of and is written first, encoded.json what there is, and is written last.
"""

import hashlib
import json
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maxdiff.data.examples import BadExample
from maxdiff.weights.tensors import Tensor, open_tensors, write_json, write_safetensors

BEGUN, FINISHED, EMPTY = "encoding.json", "encoded.json", "empty.safetensors"
VERSION = 1
ROWS = 1024  # examples of a shard
MAX_OPEN = 256  # shards, well below the usual limit of 1,024 files a process
MOMENTS, TEXTS, SIZES = ("mean", "logvar"), ("states", "pooled"), ("original_size", "crop")
CHECKSUM, NAMES, ENDS = "crc32", "names", "ends"
LATENTS_ALONE = "latents alone"  # among what an encoding is made of

Row = dict[str, np.ndarray]


class EncodedSource:
    """The examples of a folder. It may be pickled, and read from many threads.

    Attributes:
        folder: where it lies.
        made_of: what decides its contents, name -> value.
        path: where the images were; "" for several places.
        has_text: whether captions are encoded; else latents alone are.
        form: dataset_type and train_split that they were opened with.
        mix: of several sources, how many examples each has and how often each is drawn; else None.

    Raises:
        ValueError: if the folder's encoding was not finished, or a shard is not as it was written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = _manifest(folder)
        self.made_of: dict[str, Any] = manifest["made_of"]
        self.has_text = not self.made_of.get(LATENTS_ALONE)
        self.path: str = manifest["path"]
        self.form: dict[str, str] = manifest["form"]
        self.mix: tuple[list[int], list[int]] | None = manifest["mix"]
        self._examples: int = manifest["examples"]
        self._shards: list[int] = manifest["bytes"]
        for number, size in enumerate(self._shards):
            path = folder / shard_name(number)
            if not path.is_file() or path.stat().st_size != size:
                raise ValueError(f"{path} is missing or not as it was written: run python -m maxdiff.data.encode again")

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, i: int, /) -> Row:
        """Every array of an example; raises BadExample if its bytes have changed."""
        shard, row = self._shard(i)
        found = {name: np.array(tensor.read()[row]) for name, tensor in _arrays(shard).items()}
        if checksum(found, _texts(shard, row)) != int(shard[CHECKSUM].read()[row]):
            raise BadExample(f"{self.folder / shard_name(i // ROWS)}:{row}", "its bytes are not those that were written")
        return found

    def names(self, i: int) -> tuple[str, list[str]]:
        """The key that the example had in its source, and its caption; of latents alone the texts that captions are made of."""
        shard, row = self._shard(i)
        if ENDS in shard:
            try:
                key, *texts = json.loads(_texts(shard, row))
            except ValueError:
                raise BadExample(
                    f"{self.folder / shard_name(i // ROWS)}:{row}", "its texts are not those that were written"
                ) from None
            return key, texts
        key, caption = json.loads(shard[NAMES].read().tobytes())[row]
        return key, [caption]

    @cached_property
    def empty(self) -> Row:
        """The text of no words: states [1 77 d] and, for SDXL, pooled [1 p]; nothing of latents alone."""
        if not self.has_text:
            return {}
        return {name: np.array(tensor.read()) for name, tensor in open_tensors(self.folder / EMPTY).items()}

    def fingerprint(self) -> str:
        """A hash of what it is made of."""
        return hashlib.sha256(json.dumps([self.made_of, self.mix], sort_keys=True).encode()).hexdigest()

    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each array of an example."""
        shard, _ = self._shard(0)
        return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in _arrays(shard).items()}

    def _shard(self, i: int) -> tuple[dict[str, Tensor], int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number, row = divmod(i, ROWS)
        shard = self._open.get(number)
        if shard is None:
            shard = open_tensors(self.folder / shard_name(number))
            with self._lock:
                self._open[number] = shard
                while len(self._open) > MAX_OPEN:
                    del self._open[next(iter(self._open))]
        return shard, row

    @cached_property
    def _open(self) -> dict[int, dict[str, Tensor]]:
        """The shards opened last, mapped into memory; each takes one of the files that a process may have open."""
        return {}

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_lock")}


def is_encoded(path: str | Path) -> bool:
    """Whether a path is a folder that `encode` writes, finished or not."""
    return any((Path(path) / name).is_file() for name in (BEGUN, FINISHED))


def missing_shards(folder: Path, shards: range) -> list[int]:
    """Those that are not there, or not of their size if the encoding was finished once."""
    paths = {number: folder / shard_name(number) for number in shards}
    sizes = _manifest(folder)["bytes"] if (folder / FINISHED).is_file() else None
    whole = lambda number, path: path.is_file() and (sizes is None or path.stat().st_size == sizes[number])
    return [number for number, path in paths.items() if not whole(number, path)]


def shard_name(number: int) -> str:
    """A shard's file name."""
    return f"shard-{number:06d}.safetensors"


def _arrays(shard: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that training takes."""
    return {name: tensor for name, tensor in shard.items() if name not in (CHECKSUM, NAMES, ENDS)}


def _texts(shard: Mapping[str, Tensor], row: int) -> bytes:
    """A row's key and texts as JSON, of latents alone; else nothing."""
    if ENDS not in shard:
        return b""
    ends = shard[ENDS].read()
    return shard[NAMES].read()[int(ends[row - 1]) if row else 0 : int(ends[row])].tobytes()


def checksum(row: Mapping[str, np.ndarray], texts: bytes = b"") -> int:
    """CRC-32 of a row's arrays, in the order of their names, and of its texts."""
    crc = 0
    for name in sorted(row):
        crc = zlib.crc32(np.ascontiguousarray(row[name]).reshape(-1).view(np.uint8).data, crc)
    return zlib.crc32(texts, crc)


def write_shard(
    folder: Path, number: int, arrays: Mapping[str, np.ndarray], names: Sequence[Sequence[str]], *, text: bool
) -> None:
    """Write a shard of arrays [n ...]; it appears whole or not at all.

    Args:
        names: of each example its key, and its caption or the texts that captions are made of.
        text: whether captions are encoded; else latents alone.
    """
    written = lambda value: json.dumps(value).encode("utf-8", "surrogatepass")
    rows = [b"" if text else written(list(name)) for name in names]
    crcs = [checksum({name: array[i] for name, array in arrays.items()}, rows[i]) for i in range(len(names))]
    whole = {**arrays, CHECKSUM: np.array(crcs, np.int64)}
    whole[NAMES] = np.frombuffer(written([list(name) for name in names]) if text else b"".join(rows), np.uint8)
    if not text:
        whole[ENDS] = np.cumsum([len(row) for row in rows], dtype=np.int64)
    write_arrays(folder / shard_name(number), whole)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as safetensors."""
    tensors = [(name, Tensor(array.shape, array.dtype, lambda array=array: array)) for name, array in arrays.items()]
    write_safetensors(path, tensors, {"format": "maxdiff-encoded"})


def made_of_there(folder: Path) -> dict[str, Any] | None:
    """What a folder's encoding is made of, finished or not; None if it holds none."""
    names = [name for name in (FINISHED, BEGUN) if (folder / name).is_file()]
    return read_json(folder / names[0]).get("made_of", {}) if names else None


def begin(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Say what a folder's encoding is made of.

    Raises:
        ValueError: if the folder holds another encoding, or other things.
    """
    there = made_of_there(folder)
    if there is not None:
        if reasons := differences(there, made_of):
            raise ValueError(f"{folder} holds another encoding ({'; '.join(reasons)}); allowed: another encoded_dir, or to "
                             "remove this one")  # fmt: skip
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds other files; allowed: a new folder")
    write_json(folder / BEGUN, {"made_of": made_of})


def finish(folder: Path, made_of: Mapping[str, Any], examples: int, **origin: Any) -> None:
    """Say that every shard is there; `origin` is the path, form and mix of EncodedSource."""
    sizes = [(folder / shard_name(number)).stat().st_size for number in range(-(-examples // ROWS))]
    write_json(folder / FINISHED, {"version": VERSION, "made_of": made_of, "examples": examples, "bytes": sizes, **origin})


def differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Why an encoding made of `there` is not one of `wanted`; names that only one of them has count too."""
    said = []
    for name in sorted({*there, *wanted}):
        old, new = there.get(name), wanted.get(name)
        if old != new:
            hashes = all(isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value) for value in (old, new))
            said.append(f"{name}: another is encoded" if hashes else f"{name}: {old!r} is encoded, {new!r} is asked for")
    return said


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / FINISHED).is_file():
        raise ValueError(f"{folder} holds an encoding that is not finished: run python -m maxdiff.data.encode again")
    found = read_json(folder / FINISHED)
    if found.get("version") != VERSION:
        raise ValueError(f"{folder} was encoded by another version of MaxDiff: encode it again, into another folder")
    if lacking := {"made_of", "path", "form", "mix", "examples", "bytes"} - found.keys():
        raise ValueError(f"{folder / FINISHED} is damaged: it has no {min(lacking)}; encode again, into another folder")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ValueError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise ValueError(f"{path} is damaged: encode again, into another folder")
