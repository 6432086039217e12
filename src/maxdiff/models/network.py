"""A network as a pure function of its parameters."""

import dataclasses
import functools
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxdiff.models.layers import Axes, Compute, Initializer

Path = tuple[str | int, ...]
Params = dict[str | int, Any]


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One parameter before it exists. `shape` is ours: kernels are [in out] or [k k in out]."""

    shape: tuple[int, ...]
    axes: Axes
    init: Initializer


# (path, spec) -> where the parameter lives.
Placement = Callable[[Path, ParameterSpec], jax.sharding.Sharding]


class Network:
    """A network's function and the description of its parameters; it holds no weights.

    >>> network = Network(UNet2DConditionModel, UNetConfig(), Compute(dtype=jnp.bfloat16))
    >>> params = network.init(seed=0)
    >>> network.apply(params, latents, timesteps, text_states)

    Attributes:
        config: the configuration, as given.
        compute: how it computes.
        specs: path -> ParameterSpec for every parameter. A path is the checkpoint's key, split:
            ("down_blocks", 0, "resnets", 1, "conv1", "kernel").
    """

    def __init__(self, module: Callable[[Any, Compute], nnx.Module], config: Any, compute: Compute | None = None):
        self.module = module
        self.config = config
        self.compute = compute or Compute()
        graphdef, state = nnx.split(module(config, self.compute))
        self._graphdef = graphdef
        self.specs: dict[Path, ParameterSpec] = {
            path: ParameterSpec(leaf.get_value().shape, leaf.axes, leaf.init)
            for path, leaf in flatten(nnx.to_pure_dict(state, extract_fn=lambda leaf: leaf))
        }

    def apply(self, params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """Call the network's `method` with these parameters: a pure function, to be jitted.

        Raises:
            ValueError: for inputs of the wrong shape, or no such method.
        """
        module = nnx.merge(self._graphdef, params)
        if not hasattr(module, method):
            raise ValueError(f"this network has no method={method!r} (an autoencoder has encode and decode)")
        return getattr(module, method)(*args, **kwargs)

    @functools.cached_property
    def jitted(self) -> Callable[..., Any]:
        """`apply`, compiled once for each shape of its inputs."""
        return jax.jit(self.apply, static_argnames="method")

    def with_compute(self, compute: Compute) -> "Network":
        """The same network computing in another way; parameters serve both."""
        return Network(self.module, self.config, compute)

    def abstract(self, dtype: Any = jnp.float32) -> Params:
        """The parameter tree as jax.ShapeDtypeStructs: no memory, no time."""
        return unflatten((path, jax.ShapeDtypeStruct(s.shape, dtype)) for path, s in self.specs.items())

    def init(self, seed: int, dtype: Any = jnp.float32, placement: Placement | None = None) -> Params:
        """Fresh parameters.

        A parameter's values depend on the seed and its path alone, not on the network around it nor on where
        it is placed.

        Args:
            placement: the sharding of each parameter; by default the first device.
        """
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def draw(path: Path) -> jax.Array:
            spec = self.specs[path]
            # Philox's stream is fixed by its definition, so it is the same on every host.
            key = zlib.crc32(".".join(map(str, path)).encode()) << 64 | seed % 2**64
            values = spec.init(np.random.Generator(np.random.Philox(key=key)), spec.shape).astype(dtype)
            where = placement(path, spec) if placement else default
            return jax.make_array_from_callback(spec.shape, where, lambda index: values[index])

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return unflatten(zip(self.specs, pool.map(draw, self.specs), strict=True))

    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(math.prod(spec.shape) for spec in self.specs.values())


def flatten(tree: Mapping, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) for every leaf of a nested dict, in the dict's order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def unflatten(leaves: Any) -> Params:
    """The nested dict with these (path, leaf) pairs."""
    tree: Params = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
