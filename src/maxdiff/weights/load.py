"""From an open file to a parameter tree on its devices, tensor by tensor."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.models.network import Network, ParameterSpec, Params, Placement, unflatten
from maxdiff.models.network import Path as ParameterPath
from maxdiff.weights.names import reader, to_torch_shape, torch_key
from maxdiff.weights.tensors import Tensor

# Tensors in flight at once. Each may need a transposed copy of its slice in host memory.
THREADS = min(8, os.cpu_count() or 1)
MAX_LISTED = 8


def load_params(
    network: Network,
    tensors: Mapping[str, Tensor],
    where: str,
    *,
    dtype: Any = jnp.float32,
    placement: Placement | None = None,
) -> Params:
    """Place a network's parameters, each read from the file as it is placed.

    Args:
        tensors: by their PyTorch keys (see `names.normalise`).
        where: what to call the file in messages.
        dtype: of the parameters; what the file holds is converted.
        placement: the sharding of each parameter; by default everything goes to the first device.
            Each process reads only the slices of its own devices.

    Raises:
        ValueError: as `check_params`.
    """
    reads = check_params(network, tensors, where)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def place(path: ParameterPath) -> jax.Array:
        spec = network.specs[path]
        return _place(reads[path], spec.shape, dtype, placement(path, spec) if placement else default)

    with ThreadPoolExecutor(THREADS) as pool:
        placed = list(pool.map(place, network.specs))
    return unflatten(zip(network.specs, placed, strict=True))


def check_params(network: Network, tensors: Mapping[str, Tensor], where: str) -> dict[ParameterPath, Callable[[], np.ndarray]]:
    """See that the tensors are those of the network, without reading them: how to read each parameter.

    Raises:
        ValueError: listing the keys that are missing, surplus, of the wrong shape, or no floating-point numbers.
    """
    wanted = {path: torch_key(path) for path in network.specs}
    _compare(set(wanted.values()), set(tensors), where)
    reads, misfits = {}, []
    for path, key in wanted.items():
        spec, tensor = network.specs[path], tensors[key]
        read = reader(path, spec.shape, tensor)
        if read is None:
            misfits.append(f"{key} has shape {tensor.shape}, the configuration makes it {_torch_shape(path, spec)}")
        elif not jnp.issubdtype(tensor.dtype, jnp.floating):
            misfits.append(f"{key} has dtype {tensor.dtype}, no floating-point numbers")
        else:
            reads[path] = read
    if misfits:
        raise ValueError(f"{where}: {_listed(misfits, 'tensors do not fit')}")
    return reads


def _place(read: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    whole = read()

    def piece(index: Any) -> np.ndarray:
        # JAX copies an array whose layout is not its own, such as a turned kernel; but where the memory is
        # the CPU's it takes one that lies right as it is, and the file's pages must never be taken: they
        # change with the file.
        part = whole[index]
        return part.astype(dtype, copy=bool(part.flags.c_contiguous))

    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return jax.device_put(piece(...), device)
    return jax.make_array_from_callback(shape, sharding, piece)


def _compare(wanted: set[str], present: set[str], where: str) -> None:
    problems = []
    if missing := sorted(wanted - present):
        problems.append(_listed(missing, "keys are missing"))
    if surplus := sorted(present - wanted):
        problems.append(_listed(surplus, "keys have no place in this network"))
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")


def _listed(items: list[str], what: str) -> str:
    rest = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return f"{len(items)} {what}: {', '.join(items[:MAX_LISTED])}{rest}"


def _torch_shape(path: ParameterPath, spec: ParameterSpec) -> tuple[int, ...]:
    return to_torch_shape(spec.shape) if path[-1] == "kernel" else spec.shape
