"""How long a compiled TPU program takes, by rooflines (Williams et al. 2009): an estimate, no measurement.

Each operation takes as long as its products at the peak of the matrix units or its operands and results at the speed of
memory, whichever is longer. One follows another, and collectives hide behind nothing.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

from maxdiff import hlo
from maxdiff.topologies import Generation

# Products of queries x keys x head_dim in splash attention's kernels: scores and output; in the backward pass scores, the
# weights' gradient, and the queries' one; or the scores, the weights' gradient, the keys' and the values' one.
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
# Passes through the matrix units that a product of float32 takes, by how exact it is to be (jax.lax.Precision).
PASSES = {"highest": 6, "high": 3}
# What moves nothing.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all",
        "partition-id", "replica-id", "opt-barrier", "send", "recv"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """An operation that is no collective.

    Attributes:
        kind: "matmul" (convolutions too), "attention" or "other".
        flops: 2 a multiply-add, of what is computed; head_dim counts as wide as a matrix unit is, and a product of float32
            that is to be exact as the products of bfloat16 that it is made of.
        moved: bytes of its operands and results.
        times: how often a step makes it.
    """

    kind: str
    flops: int
    moved: int
    times: int


def work(text: str, width: int) -> list[Work]:
    """The operations of a compiled program.

    Args:
        text: of the module.
        width: of a matrix unit.
    """
    program = hlo.parse(text)
    inner = functools.cache(lambda name: sum(_products(program.computations[name], inner)))
    found = []
    for lines, times in program.walk(into_fusions=False):
        shapes = {line.name: line.shape for line in lines}
        for line in lines:
            if line.opcode in FREE or line.opcode.endswith(("-start", "-done")) or hlo.kind_of(line):
                continue
            part = hlo.chained(program.computations[line.called()]) if line.opcode == "fusion" else ""
            if part in ("begin", "end"):
                continue
            moved = sum(hlo.bytes_of(shapes.get(name, "")) for name in line.operands()) + hlo.bytes_of(line.shape)
            if part == "meanwhile":
                moved -= _passed_on(line, shapes)
            kind, flops = "other", sum(_products([line], inner, shapes))
            if line.opcode == "custom-call" and (products := _splash(line.name)):
                kind, flops = "attention", products * _attention(line, shapes, width)
            elif flops:
                kind = "matmul"
            found.append(Work(kind, flops, moved, times))
    return found


def seconds(found: list[Work], sums: Mapping[str, Mapping[str, float]], chip: Generation, linked: float) -> dict[str, float]:
    """What takes how long in a step.

    Args:
        sums: of the collectives, from `hlo.totals`.
        linked: share of a chip's links within its slice that lead to another.

    Returns:
        Seconds of "matmul", "attention", "other", "ici" and "dcn".
    """
    taken: dict[str, float] = dict.fromkeys(("matmul", "attention", "other", "ici", "dcn"), 0.0)
    for one in found:
        taken[one.kind] += one.times * max(one.flops / chip.flops, one.moved / chip.hbm_speed)
    for name, total in sums.items():
        network = name.split()[0]
        taken[network] += total["bytes"] / {"ici": chip.ici_speed * linked, "dcn": chip.dcn_speed}[network]
    return taken


def _passed_on(line: hlo.Line, shapes: Mapping[str, str]) -> int:
    """Bytes of the operands, and of the results that are the same memory, which a fusion has for the collective behind it."""
    given = line.operands()
    same = re.findall(r"\{\d+\}: \((\d+),", line.rest)
    return sum(hlo.bytes_of(shapes.get(given[int(place)], "")) for place in (*same, *{*same}))


def _products(lines: list[hlo.Line], inner: Callable[[str], int], shapes: Mapping[str, str] | None = None) -> Iterator[int]:
    """The FLOPs of each convolution among these operations, which is what matrix products are too on a TPU, and of fusions."""
    shapes = shapes or {line.name: line.shape for line in lines}
    for line in lines:
        if line.opcode == "convolution":
            left, right = (hlo.dims(shapes[name]) for name in line.operands()[:2])
            yield _convolution(line.rest, left, right, hlo.dims(line.shape))
        elif line.opcode == "fusion":
            yield inner(line.called())


def _convolution(rest: str, left: list[int], right: list[int], out: list[int]) -> int:
    """FLOPs of a convolution: where its window lies on what is there, as a batched product is written with padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    assert labels
    size = {side: dict(zip(labels[i], dims, strict=True)) for i, side, dims in ((1, "l", left), (2, "r", right), (3, "o", out))}
    precision = re.search(r"operand_precision=\{(\w+)", rest)
    count = 2 * size["o"]["b"] * size["o"]["f"] * size["r"]["i"] * PASSES.get(precision[1] if precision else "", 1)
    written = re.search(r"window=\{([^}]*)\}", rest)
    window = dict(re.findall(r"(\w+)=([\w-]+)", written[1])) if written else {}
    spatial = sorted(label for label in labels[1] if label.isdigit())
    for number, label in enumerate(spatial):
        of = lambda name, default, number=number: window[name].split("x")[number] if name in window else default
        count *= _inside(size["l"][label], size["r"][label], size["o"][label], int(of("pad", "0_0").split("_")[0]),
                         int(of("stride", 1)), int(of("lhs_dilate", 1)), int(of("rhs_dilate", 1)))  # fmt: skip
    return count


@functools.cache
def _inside(length: int, window: int, out: int, pad: int, stride: int, holes: int, spread: int) -> int:
    """Pairs of output and window positions that meet an element of the input, in one dimension."""
    places = (o * stride + w * spread - pad for o in range(out) for w in range(window))
    return sum(0 <= place <= (length - 1) * holes and place % holes == 0 for place in places)


def _splash(name: str) -> int:
    return next((products for kernel, products in SPLASH.items() if name.startswith(kernel)), 0)


def _attention(line: hlo.Line, shapes: Mapping[str, str], width: int) -> int:
    """FLOPs of one product of a splash kernel; queries and keys, [b h l d], are its first arrays of bfloat16 or float32."""
    written = [shapes.get(name, "") for name in line.operands()]
    arrays = [hlo.dims(shape) for shape in written if shape.startswith(("bf16", "f32"))]
    (*outer, queries, dim), (*_, keys, _) = arrays[:2]
    return 2 * math.prod(outer) * queries * keys * (-(-dim // width) * width)
