"""A network of a few layers, for what is compiled on many meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.models.layers import Compute, Conv, GroupNorm, Linear
from maxdiff.models.network import Network, Params
from maxdiff.sharding import Layout

EXAMPLES = 16


class Tiny(nnx.Module):
    """[b h w 3] -> [b h w 4]: of the first kernel only the outputs divide, and of the last bias nothing, into 8."""

    def __init__(self, config: Any, compute: Compute):
        del config
        self.conv_in = Conv(3, 32, compute)
        self.norm = GroupNorm(32, 4, 1e-5, compute)
        self.conv = Conv(32, 48, compute)
        self.proj = Linear(48, 64, compute, ("embed", "heads"))
        self.out = Linear(64, 4, compute, ("heads", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(self.norm(self.conv_in(x), silu=True))
        return self.out(jax.nn.silu(self.proj(x)))


def tiny(layout: Layout | None = None) -> Network:
    """The network, placing its own collectives where a layout has a tensor axis."""
    own = layout is not None and layout.mesh.shape["tensor"] > 1
    return Network(Tiny, None, Compute(constrain=layout.constrain) if own else Compute())


def tiny_params() -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32) * 0.1, tiny().abstract())


def tiny_batch(layout: Layout | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    batch = {name: rng.standard_normal((EXAMPLES, 4, 4, c), np.float32) for name, c in (("sample", 3), ("target", 4))}
    return batch if layout is None else jax.device_put(batch, NamedSharding(layout.mesh, P(("data", "fsdp"))))


def tiny_losses(network: Network):
    """Each example's mean square error [b]."""

    def losses(params: Params, constants: Any, batch: dict[str, Any]) -> jax.Array:
        del constants
        out = network.apply(params, batch["sample"].astype(network.compute.dtype))
        return jnp.mean(jnp.square(out.astype(jnp.float32) - batch["target"]), axis=(1, 2, 3))

    return losses
