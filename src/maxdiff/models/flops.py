"""Floating-point operations of a network, counted from its architecture and shapes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core


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
