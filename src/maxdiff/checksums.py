"""A checksum of each array of a tree, which does not depend on how the array is split over devices."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxdiff.models.network import Params, flatten


def named(tree: Any) -> dict[str, Any]:
    """The tree's leaves by their paths, joined with dots: names that don't depend on container types."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(params: Params) -> str:
    """16 hexadecimal digits that stand for weights on the devices, wherever they lie; every process calls it."""
    leaves = {"/".join(map(str, path)): leaf for path, leaf in flatten(params)}
    return digest({name: int(value) for name, value in jax.device_get(checksums(leaves)).items()})


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For each leaf, the sum of bits * (2 * index + 1) modulo 2^32: catches flipped and exchanged values."""
    return {name: _checksum(leaf) for name, leaf in leaves.items()}


@jax.jit  # traced once for all leaves of a shape: a state has thousands
def _checksum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(x.ndim)):
        # Built from iotas, so that each device numbers its own shard and nothing is gathered.
        index = index + lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
