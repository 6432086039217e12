"""What a compiled program sends between devices, read from its HLO text."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
              "u64": 8, "f64": 8}  # fmt: skip
# Times the result's bytes that each of `n` devices sends, when they stand in a ring.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n, "all-reduce": lambda n: 2 * (n - 1) / n, "reduce-scatter": lambda n: n - 1.0,
    "all-to-all": lambda n: (n - 1) / n, "collective-permute": lambda _: 1.0,
}  # fmt: skip
# `  %name = shape opcode(operands), attributes`; a shape may be a tuple.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation between devices.

    Attributes:
        kind: one of KINDS.
        shapes: of its results, such as "f32[3,3,320,320]"; one operation may carry several arrays.
        group: how many devices take part together.
        across: whether slices take part together, over the data centre's network.
        times: how often a step makes it.
        moved: bytes that each device sends in a step, by the ring algorithm.
    """

    kind: str
    shapes: tuple[str, ...]
    group: int
    across: bool
    times: int
    moved: float


def collectives(text: str, slice_of: Callable[[int], int] = lambda _: 0) -> list[Collective]:
    """Every collective operation of a compiled program, those of loops with how often they are made.

    Args:
        text: of a compiled module (`jax.stages.Compiled.as_text`).
        slice_of: the slice of a device, by its place in the program's device assignment.
    """
    computations = _computations(text)
    found: list[Collective] = []
    entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
    for lines, times in _walk(computations, entry, 1):
        for _, shape, opcode, rest in lines:
            if opcode == "send" and "megascale_transfer_type" in rest:
                found.append(_between_slices(shape, rest, times))
            kind = _kind(opcode, rest)
            if kind:
                source = rest if kind[1] is None else _inner(computations, kind[1])
                found.append(_collective(kind[0], shape, source, slice_of, times, opcode))
    return found


def totals(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Network ("ici" or "dcn") and kind -> {"count", "bytes"}: operations, and bytes that a device sends a step."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in found:
        name = f"{'dcn' if one.across else 'ici'} {one.kind}"
        sums[name].update({"count": one.times, "bytes": round(one.moved)})
    return {name: dict(counter) for name, counter in sorted(sums.items())}


Lines = list[tuple[str, str, str, str]]


def _computations(text: str) -> dict[str, tuple[bool, Lines]]:
    """Name -> (whether it is the entry, its instructions as (name, shape, opcode, the rest))."""
    found: dict[str, tuple[bool, Lines]] = {}
    lines: Lines = []
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            lines = []
            found[match[2]] = (bool(match[1]), lines)
        elif match := INSTRUCTION.match(line):
            lines.append((match[1], match[2], match[3], match[4]))
    return found


def _walk(computations: dict[str, tuple[bool, Lines]], name: str, times: int) -> Iterator[tuple[Lines, int]]:
    """The instructions of a computation and of those that it calls, with how often they run."""
    lines = computations[name][1]
    yield lines, times
    for _, _, opcode, rest in lines:
        if opcode == "while":
            trips = re.search(r"known_trip_count\D*(\d+)", rest)
            body = re.search(r"body=%?([\w.-]+)", rest)
            assert body
            yield from _walk(computations, body[1], times * (int(trips[1]) if trips else 1))
        elif opcode in ("call", "conditional", "async-start") or (opcode == "fusion" and _kind(opcode, rest) is None):
            for called in re.findall(
                r"(?:calls|to_apply|branch_computations=\{|true_computation|false_computation)=?%?([\w.-]+)", rest
            ):
                if called in computations:
                    yield from _walk(computations, called, times)


def _kind(opcode: str, rest: str) -> tuple[str, str | None] | None:
    """(kind, the computation of a fusion that is one) of a collective; the end of an asynchronous one counts for nothing."""
    if opcode == "fusion":
        # A TPU's reduce-scatter: an all-reduce of which each device keeps a slice.
        called = re.search(r"calls=%?(all-reduce-scatter[\w.-]*)", rest)
        return ("reduce-scatter", called[1]) if called else None
    kind = opcode.removesuffix("-start")
    return (kind, None) if kind in KINDS else None


def _inner(computations: dict[str, tuple[bool, Lines]], name: str) -> str:
    return next(rest for _, _, opcode, rest in computations[name][1] if opcode.startswith("all-reduce"))


def _collective(kind: str, shape: str, rest: str, slice_of: Callable[[int], int], times: int, opcode: str) -> Collective:
    shapes = _shapes(shape)
    if opcode.endswith("-start") and kind != "all-reduce":
        shapes = shapes[len(shapes) // 2 :] if kind == "all-gather" else shapes[1:2]  # before them stand the operands
    groups = _groups(rest)
    group = len(groups[0]) if groups else 2  # of a permute: sender and receiver
    pairs = groups or _pairs(rest)
    across = any(len({slice_of(device) for device in devices}) > 1 for devices in pairs)
    return Collective(kind, tuple(shapes), group, across, times, times * SENT[kind](group) * sum(map(size, shapes)))


def _between_slices(shape: str, rest: str, times: int) -> Collective:
    """What a TPU hands to its host to be sent to other slices: of the operation's kind there."""
    kind = re.findall(r'megascale_transfer_type="(\w+)"', rest)[0].lower().replace("_", "-")
    # {1,2}x{0:3}: slices 1 and 2, devices 0 to 3 of each.
    slices = re.findall(r'megascale_target="\{([\d,]+)\}', rest)
    group = len(slices[0].split(",")) if slices else 2
    sent = SENT.get(kind, lambda _: 1.0)(group)
    shapes = _shapes(shape)[:1]  # then come a flag and a token
    return Collective(kind, tuple(shapes), group, True, times, times * sent * sum(map(size, shapes)))


def _groups(rest: str) -> list[list[int]]:
    """The devices that take part together."""
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return [[int(n) for n in inner.split(",") if n] for inner in re.findall(r"\{([\d,]*)\}", match[1])]
    match = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if not match:
        return []
    sizes, dims = ([int(n) for n in match[i].split(",")] for i in (1, 2))
    order = [int(n) for n in match[3].split(",")] if match[3] else range(len(dims))
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(sizes).tolist()


def _pairs(rest: str) -> list[list[int]]:
    match = re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)
    return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", match[1])] if match else []


def _shapes(text: str) -> list[str]:
    return re.findall(rf"(?:{'|'.join(ITEM_BYTES)})\[[\d,]*\]", text)


def size(shape: str) -> int:
    """Bytes of an array whose shape is written so: f32[3,3,320,320]."""
    dtype, _, dims = shape.rstrip("]").partition("[")
    return ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
