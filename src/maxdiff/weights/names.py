"""One rule between a checkpoint's keys and our parameter tree: rename the leaf, transpose the kernel.

    down_blocks.0.resnets.1.conv1.weight  [out in k k]  <->  (..., "conv1", "kernel")  [k k in out]

`normalise` first brings a file's keys to the published PyTorch spelling: old names, Flax's names,
names with or without transformers' `text_model.` prefix.
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from maxdiff.models.network import Path as ParameterPath
from maxdiff.weights.tensors import Tensor, Tensors

# A leaf of any other name (bias, running_mean, class_embedding) is called so there too.
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}

# The attention of autoencoders written before diffusers 0.17.
OLD_ATTENTION = re.compile(r"(?<=\.attentions\.0\.)(query|key|value|proj_attn)(?=\.)")
NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# Flax numbers its modules by an underscore.
FLAX_INDEX = re.compile(
    r"\b(down_blocks|up_blocks|resnets|attentions|downsamplers|upsamplers|transformer_blocks|to_out|net)_(\d+)\b"
)
# Buffers that torch saved with the weights, which no output depends on.
BUFFERS = re.compile(r"(^|\.)(position_ids|num_batches_tracked)$")


def torch_key(path: ParameterPath) -> str:
    """The checkpoint's key for a parameter."""
    return ".".join(map(str, (*path[:-1], LEAVES.get(str(path[-1]), path[-1]))))


def normalise(tensors: Mapping[str, Tensor], *, flax: bool, text_encoder: bool) -> Tensors:
    """Give each tensor the key that the published PyTorch checkpoints use, and drop old buffers.

    Args:
        flax: the tensors come from a Flax file: kernels are already transposed, so they are turned
            back (a view, nothing is copied).
        text_encoder: they are CLIP's, which transformers 5.6 and later saves without `text_model.`.
    """
    result: Tensors = {}
    for key, tensor in tensors.items():
        if BUFFERS.search(key):
            continue
        if flax:
            key, tensor = _from_flax(FLAX_INDEX.sub(r"\1.\2", key), tensor)
        key = OLD_ATTENTION.sub(lambda match: NEW_ATTENTION[match.group()], key)
        if text_encoder and key.startswith(("embeddings.", "encoder.", "final_layer_norm.")):
            key = f"text_model.{key}"
        result[key] = tensor
    return result


def _from_flax(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    stem, _, leaf = key.rpartition(".")
    if leaf == "kernel":
        tensor = tensor.map(to_torch, to_torch_shape(tensor.shape))
    return f"{stem}.{LEAVES.get(leaf, leaf)}", tensor


def to_torch(kernel: np.ndarray) -> np.ndarray:
    """[in out] -> [out in], [k k in out] -> [out in k k]; a view."""
    return kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T


def to_torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `to_torch`'s result."""
    return (shape[3], shape[2], shape[0], shape[1]) if len(shape) == 4 else shape[::-1]


def from_torch(weight: np.ndarray) -> np.ndarray:
    """[out in] -> [in out], [out in k k] -> [k k in out]; a view."""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


def reader(path: ParameterPath, shape: tuple[int, ...], tensor: Tensor) -> Callable[[], np.ndarray] | None:
    """How to read `tensor` as the parameter `path` of our `shape`; None if its shape does not fit.

    A 1x1 convolution and a linear layer are one operation, which older files write either way.
    """
    if path[-1] != "kernel":
        return tensor.read if tensor.shape == shape else None
    expected = to_torch_shape(shape)
    if tensor.shape == expected:
        return lambda: from_torch(tensor.read())
    if _squeeze(tensor.shape) == _squeeze(expected):
        return lambda: from_torch(tensor.read().reshape(expected))
    return None


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:2] if shape[2:] == (1, 1) else shape


def count_modules(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """How many modules are numbered (or named) next under `prefix`."""
    return len({key.removeprefix(prefix).split(".")[0] for key in tensors if key.startswith(prefix)})


def replace_module(rest: str, table: Mapping[str, str]) -> str:
    """`module.leaf` with the module renamed by the table, where it is there."""
    module, _, leaf = rest.rpartition(".")
    return f"{table.get(module, module)}.{leaf}"
