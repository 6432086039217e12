"""Files of tensors, opened without being read: safetensors, PyTorch pickles, Flax msgpack.

`open_tensors(path)` maps each tensor's name to a `Tensor`, whose `read()` returns a view into the
memory-mapped file where the format allows. So a checkpoint larger than memory can be placed on its
devices tensor by tensor, and a process that needs a slice reads no more than that.
"""

import dataclasses
import json
import math
import mmap
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# The format's names of dtypes. Float8 and sub-byte types are no weights of these models.
SAFETENSORS_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
# What the format itself allows a header to take.
MAX_HEADER_BYTES = 100_000_000
# Asked once, as it can be asked only by setting it, for all threads.
UMASK = os.umask(0)
os.umask(UMASK)
TORCH_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
SUFFIXES = (".safetensors", ".msgpack", *TORCH_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file. `read()` gives a numpy array, which may be a read-only view of the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def map(self, function: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> "Tensor":
        """The tensor with `function` applied when it is read."""
        return Tensor(shape, self.dtype, lambda: function(self.read()))


Tensors = dict[str, Tensor]


def open_tensors(path: Path) -> Tensors:
    """Open one file of tensors; its suffix names the format.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged or holds something else, saying which.
        ImportError: for a PyTorch pickle where torch is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".msgpack":
        return _open_msgpack(path)
    if path.suffix in TORCH_SUFFIXES:
        return _open_torch(path)
    raise ValueError(f"{path}: a file of weights ends in one of {', '.join(SUFFIXES)}")


def read_metadata(path: Path) -> dict[str, str]:
    """The notes in a safetensors header; empty for other formats."""
    if path.suffix != ".safetensors":
        return {}
    header, _ = _safetensors_header(path, _map_file(path))
    return header.get("__metadata__", {})


def _map_file(path: Path) -> mmap.mmap:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# --- safetensors: 8 bytes of header length, a JSON header, the tensors' bytes -----------------------


def _safetensors_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else MAX_HEADER_BYTES + 1
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{path} is not a safetensors file")
    if 8 + length > len(data):
        raise ValueError(f"{path} is truncated: its header ends at byte {8 + length}, the file at {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is no JSON object")
    return header, 8 + length


def _open_safetensors(path: Path) -> Tensors:
    data = _map_file(path)
    header, start = _safetensors_header(path, data)
    tensors: Tensors = {}
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{path} is not a safetensors file: its header says of {name}: {entry!r}") from None
        if kind not in SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {kind} (allowed: {', '.join(SAFETENSORS_DTYPES)})")
        dtype = np.dtype(SAFETENSORS_DTYPES[kind])
        if high - low != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} has {high - low} bytes")
        spans.append((low, high))
        tensors[name] = Tensor(shape, dtype, _view(data, start + low, dtype, shape))
    _check_spans(path, spans, len(data) - start)
    return tensors


def _check_spans(path: Path, spans: list[tuple[int, int]], size: int) -> None:
    """The tensors' bytes must follow each other from the header to the end of the file."""
    position = 0
    for low, high in sorted(spans):
        if low != position:
            raise ValueError(f"{path} is not a safetensors file: a tensor begins at byte {low} where {position} is expected")
        position = high
    if position > size:
        raise ValueError(f"{path} is truncated: its tensors take {position} bytes, the file has {size}")
    if position < size:
        raise ValueError(f"{path} has {size - position} bytes after its last tensor")


def _view(data: mmap.mmap, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    return lambda: np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, reading one tensor at a time; a good file is replaced only by a whole one.

    Raises:
        OSError: if the disk is full or the folder not writable; `path` is then as before.
    """
    tensors = sorted(tensors)
    names = {np.dtype(dtype): name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers may map the tensors, so align them

    def chunks() -> Iterator[Any]:
        yield struct.pack("<Q", len(encoded)) + encoded
        for name, tensor in tensors:
            array = np.asarray(tensor.read(), order="C")
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), name
            yield array.reshape(-1).view(np.uint8).data

    write_atomically(path, chunks())


def write_atomically(path: Path, chunks: Iterable[Any]) -> None:
    """Write bytes to a file beside `path`, force them to disk, then rename: all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~UMASK)  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- Flax msgpack: nested maps whose leaves are extension type 1, (shape, dtype name, bytes) ---------


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all; raises as `write_atomically`."""
    write_atomically(path, [json.dumps(value, indent=2).encode() + b"\n"])


def _open_msgpack(path: Path) -> Tensors:
    import msgpack

    data = _map_file(path)
    unpacker = msgpack.Unpacker(_Reader(data), max_buffer_size=0, strict_map_key=False, ext_hook=msgpack.ExtType)
    tensors: Tensors = {}

    def is_map() -> bool:
        first = data[unpacker.tell()]
        return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)

    def walk(prefix: tuple[str, ...]) -> None:
        for _ in range(unpacker.read_map_header()):
            key = (*prefix, str(unpacker.unpack()))
            if is_map():
                walk(key)
                continue
            start = unpacker.tell()
            unpacker.skip()
            tensors[".".join(key)] = _msgpack_leaf(path, key, data, start, unpacker.tell())

    try:
        if not is_map():
            raise ValueError(f"{path} is not a Flax checkpoint: it holds no map")
        walk(())
    except (msgpack.exceptions.OutOfData, IndexError):
        raise ValueError(f"{path} is truncated: it ends at byte {len(data)} inside a tensor") from None
    except (msgpack.exceptions.UnpackException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a Flax checkpoint: {type(error).__name__} {error}") from None
    return tensors


class _Reader:
    """What msgpack's Unpacker wants of a file."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def read(self, size: int) -> bytes:
        chunk = self.data[self.position : self.position + size]
        self.position += len(chunk)
        return chunk


def _msgpack_leaf(path: Path, key: tuple[str, ...], data: mmap.mmap, start: int, end: int) -> Tensor:
    import msgpack

    # An ext header is 2 bytes (fixed sizes) or 2 plus the length's width; shape and dtype come next,
    # in far less than 256 bytes.
    widths = {0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2, 0xD8: 2}
    first = data[start]
    if first not in widths:
        raise ValueError(f"{path}: {'.'.join(key)} is not an array")
    header = msgpack.Unpacker(strict_map_key=False)
    body = start + widths[first]
    header.feed(data[body : min(end, body + 256)])
    header.read_array_header()
    shape, name = tuple(header.unpack()), header.unpack()
    name = name.decode() if isinstance(name, bytes) else name
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    # The bytes are the last thing in the leaf.
    return Tensor(shape, dtype, _view(data, end - math.prod(shape) * dtype.itemsize, dtype, shape))


# --- PyTorch pickles ---------------------------------------------------------------------------------


def _open_torch(path: Path) -> Tensors:
    try:
        import torch
    except ImportError:
        raise ImportError(f"{path} is a PyTorch pickle, which needs torch: pip install 'maxdiff[torch]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols, which say nothing about the weights
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as error:  # torch raises a dozen types for a file that is not its own
        # Its message recommends to load unsafely, so it is not repeated.
        raise ValueError(
            f"{path} does not hold weights alone ({type(error).__name__}): it is damaged, or a pickle of other objects, "
            "which could run code when loaded; convert it to safetensors where you trust it"
        ) from None
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = {**{k: v for k, v in loaded.items() if k == "global_step"}, **loaded["state_dict"]}
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a dict of tensors")
    tensors = {}
    for name, value in loaded.items():
        if isinstance(value, int):
            value = torch.tensor(value)
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
        tensors[name] = _torch_tensor(value)
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    return tensors


def _torch_tensor(value: Any) -> Tensor:
    import torch

    if value.dtype == torch.bfloat16:
        return Tensor(tuple(value.shape), np.dtype(ml_dtypes.bfloat16),
                      lambda: value.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16))  # fmt: skip
    empty = torch.empty(0, dtype=value.dtype).numpy()
    return Tensor(tuple(value.shape), empty.dtype, lambda: value.detach().numpy())
