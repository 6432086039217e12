"""Floating-point operations of a network, counted from its architecture and shapes."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from maxdiff.models.layers import Compute
from maxdiff.models.network import Network


class Flops(NamedTuple):
    """Operations, two for each multiply-add; norms, activations and sums are not counted.

    `attention` is the products of queries with keys and of weights with values; the projections
    around them are `matmul`.
    """

    convolution: int = 0
    matmul: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """All three."""
        return self.convolution + self.matmul + self.attention

    def __add__(self, other: "Flops") -> "Flops":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n: int) -> "Flops":
        """`n` times as many."""
        return Flops(*(n * x for x in self))


def count(function: Callable, *args: Any, **kwargs: Any) -> Flops:
    """Count one call of `function` on arrays or jax.ShapeDtypeStructs; nothing is computed.

    The count is of the arithmetic that the architecture asks for. A network must be given with
    `attention=dot_product` (a fused kernel hides its products) and without rematerialisation, as
    `Network.with_compute(Compute())` makes it.

    >>> count(network.apply, network.abstract(), latents, timesteps, text_states).total
    """
    return _count(jax.make_jaxpr(function)(*args, **kwargs).jaxpr)


def _count(jaxpr: core.Jaxpr) -> Flops:
    total = Flops()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        shapes: list[Any] = [getattr(x.aval, "shape", ()) for x in (*equation.invars[:2], *equation.outvars[:1])]
        if name == "conv_general_dilated":
            _, kernel, output = shapes
            out_channels = kernel[params["dimension_numbers"].rhs_spec[0]]
            per_output = math.prod(kernel) // out_channels
            total += Flops(convolution=2 * math.prod(output) * per_output)
        elif name == "dot_general":
            (contracted, _), (batched, _) = params["dimension_numbers"]
            lhs, _, output = shapes
            operations = 2 * math.prod(output) * math.prod(lhs[d] for d in contracted)
            # Only attention multiplies activations with activations, one product for each image and head.
            total += Flops(attention=operations) if batched else Flops(matmul=operations)
        else:
            repeats = params["length"] if name == "scan" else 1
            for inner in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    total += _count(getattr(inner, "jaxpr", inner)).times(repeats)
    return total


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def training(
    networks: Mapping[str, Network],
    trained: Collection[str],
    resolution: int,
    *,
    has_latents: bool = False,
    has_text: bool = False,
) -> Flops:
    """Training on one image of `resolution` pixels: three forward passes of what is trained, one of the rest.

    Args:
        networks: of a pipeline, or an autoencoder alone.
        has_latents: they are there already, and no autoencoder runs.
        has_text: its states are there already, and no text encoder runs.
    """
    plain = {name: network.with_compute(Compute()) for name, network in networks.items()}
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    vae = plain["vae"]
    side = resolution // vae.config.downscale
    images = shape(1, resolution, resolution, vae.config.in_channels)
    images_encoded = count(lambda p, x: vae.apply(p, x, method="encode").mean, vae.abstract(), images)
    if "vae" in trained:
        latents = shape(1, side, side, vae.config.latent_channels)
        return (images_encoded + count(functools.partial(vae.apply, method="decode"), vae.abstract(), latents)).times(3)
    passes = lambda name: 3 if name in trained else 1
    unet = plain["unet"]
    added = None
    if unet.config.addition_embed_type:
        width = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        added = {"text_embeds": shape(1, width), "time_ids": shape(1, 6)}
    sample, text = shape(1, side, side, unet.config.in_channels), shape(1, 77, unet.config.cross_attention_dim)
    time = jax.ShapeDtypeStruct((1,), jnp.int32)
    total = count(unet.apply, unet.abstract(), sample, time, text, added).times(passes("unet"))
    if not has_latents:
        total += images_encoded
    for name, network in plain.items():
        if name.startswith("text_encoder") and not has_text:
            ids = jax.ShapeDtypeStruct((1, 77), jnp.int32)
            total += count(network.apply, network.abstract(), ids).times(passes(name))
    return total
