import json
import os
import pickle
import stat
import struct
from pathlib import Path

import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from maxdiff.weights.tensors import Tensor, open_tensors, read_metadata, write_atomically, write_safetensors

ARRAYS = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "a.bias": np.array([1.5, -2.0], np.float16),
    "scalar": np.array(7, np.int64),
}


def test_safetensors_of_the_reference_library(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "pt"})
    tensors = open_tensors(path)
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (tensors[name].shape, tensors[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(tensors[name].read(), array)
        assert not tensors[name].read().flags.writeable  # it is the file itself
    assert read_metadata(path) == {"format": "pt"}


def test_bfloat16_survives_bit_for_bit(tmp_path: Path):
    values = torch.tensor([1.0, -3.14, 1e30, float("nan")], dtype=torch.bfloat16)
    safetensors.torch.save_file({"w": values}, tmp_path / "x.safetensors")
    torch.save({"w": values}, tmp_path / "x.bin")
    bits = values.view(torch.int16).numpy()
    for file in ("x.safetensors", "x.bin"):
        tensor = open_tensors(tmp_path / file)["w"]
        assert tensor.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(tensor.read().view(np.int16), bits)


def test_our_files_are_read_by_the_reference_library(tmp_path: Path):
    path = tmp_path / "deep" / "x.safetensors"
    arrays = {**ARRAYS, "b": np.ones(3, ml_dtypes.bfloat16), "strided": np.arange(12.0).reshape(3, 4).T}
    write_safetensors(path, [(k, Tensor(v.shape, v.dtype, lambda v=v: v)) for k, v in arrays.items()], {"format": "pt"})
    found = safetensors.torch.load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].float().numpy(), array.astype(np.float32))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_an_interrupted_write_leaves_the_good_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    good = path.read_bytes()

    def breaks() -> np.ndarray:
        raise OSError("disk full")

    broken = [
        ("a", Tensor((1000,), np.dtype(np.float32), lambda: np.zeros(1000, np.float32))),
        ("b", Tensor((1,), np.dtype(np.float32), breaks)),
    ]
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, broken, {})
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path: Path):
    target = tmp_path / "x.json"
    write_atomically(target, [b"good"])

    def chunks():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, chunks())
    assert target.read_bytes() == b"good"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], "is truncated: its tensors take 108 bytes, the file has 105"),
        (lambda data: data[:40], "is truncated: its header ends at byte"),
        (lambda data: data[:4], "is not a safetensors file"),
        (lambda _: b"", "is empty"),
        (lambda data: data + b"more", "has 4 bytes after its last tensor"),
        (lambda _: b"<html>404: not found, and so on</html>", "is not a safetensors file"),
        (lambda data: data[:8] + b"}" + data[9:], "is not a safetensors file: its header is no JSON"),
        (lambda data: data[:8] + b"[1,2]".ljust(len(data) - 8 - 108) + data[-108:], "its header is no JSON object"),
        (lambda data: data.replace(b'"dtype"', b'"dtypo"', 1), "its header says of "),
        (lambda data: data.replace(b'"F16"', b'"F8X"'), "has dtype F8X"),
        (lambda data: data.replace(b"[2,3,2,2]", b"[2,3,2,3]"), "of shape (2, 3, 2, 3) and dtype float32 has 96 bytes"),
    ],
)  # fmt: skip
def test_damaged_safetensors_are_named(tmp_path: Path, damage, message: str):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is checked below, as it holds brackets)
        open_tensors(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("offsets", [[(400, 404), (404, 408)], [(-4, 0), (0, 4)], [(0, 4), (0, 4)], [(0, 4), (8, 12)]])
def test_tensors_that_do_not_tile_the_file_are_refused(tmp_path: Path, offsets):
    entries = {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": o} for i, o in enumerate(offsets)}
    header = json.dumps(entries).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    with pytest.raises(ValueError, match="a tensor begins at byte .* where .* is expected"):
        open_tensors(tmp_path / "x.safetensors")


FLAX = {"conv_in": {"kernel": np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4), "bias": jnp.ones(4, jnp.bfloat16)},
        "big": np.random.default_rng(0).standard_normal((300, 300))}  # fmt: skip


def test_flax_msgpack_equals_flax_serialization(tmp_path: Path):
    path = tmp_path / "x.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(FLAX))
    tensors = open_tensors(path)
    assert tensors.keys() == {"conv_in.kernel", "conv_in.bias", "big"}
    np.testing.assert_array_equal(tensors["conv_in.kernel"].read(), FLAX["conv_in"]["kernel"])
    np.testing.assert_array_equal(tensors["big"].read(), FLAX["big"])
    assert tensors["conv_in.bias"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensors["conv_in.bias"].read(), np.ones(4, ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-10], "is truncated: it ends at byte"),
        (lambda _: b"hello", "is not a Flax checkpoint"),
        (lambda _: b"\x81\xa1a\x05", "a is not an array"),
        (lambda _: b"", "is empty"),
    ],
)
def test_damaged_msgpack_is_named(tmp_path: Path, damage, message: str):
    path = tmp_path / "x.msgpack"
    path.write_bytes(damage(flax.serialization.msgpack_serialize(FLAX)))
    with pytest.raises(ValueError, match=message):
        open_tensors(path)


@pytest.mark.parametrize("old_format", [False, True])
def test_pytorch_pickles(tmp_path: Path, old_format: bool):
    path = tmp_path / "x.ckpt"
    weights = {k: torch.from_numpy(v) for k, v in ARRAYS.items()}
    torch.save({"state_dict": weights, "global_step": 5, "epoch": 3}, path, _use_new_zipfile_serialization=not old_format)
    tensors = open_tensors(path)
    assert tensors.keys() == {*ARRAYS, "global_step"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name].read(), array)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/maxdiff-was-here",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps({"w": Evil()}, protocol=2)), "does not hold weights alone .* convert it to safetensors"),
        (lambda path: torch.save({"w": Evil()}, path), "does not hold weights alone"),
        (lambda path: path.write_bytes(b"\x80\x02garbage"), "does not hold weights alone"),
        (lambda path: torch.save([torch.ones(1)], path), "holds a list, not a dict of tensors"),
        (lambda path: torch.save({"w": torch.ones(1), "name": "x"}, path), "name is a str, not a tensor"),
        (lambda path: torch.save({}, path), "holds no tensors"),
    ],
)  # fmt: skip
def test_a_pickle_that_is_not_weights_is_refused_and_never_run(tmp_path: Path, content, message: str):
    path = tmp_path / "pytorch_model.bin"
    content(path)
    with pytest.raises(ValueError, match=message):
        open_tensors(path)
    assert not Path("/tmp/maxdiff-was-here").exists()


def test_a_pickle_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (tmp_path / "x.bin").write_bytes(b"anything")
    with pytest.raises(ImportError, match=r"pip install 'maxdiff\[torch\]'"):
        open_tensors(tmp_path / "x.bin")


def test_missing_and_unknown_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="there is no file .*x.safetensors"):
        open_tensors(tmp_path / "x.safetensors")
    (tmp_path / "x.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="a file of weights ends in one of .safetensors"):
        open_tensors(tmp_path / "x.onnx")
