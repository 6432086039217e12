"""What a compiled program sends between devices, read from its HLO text."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
              "u64": 8, "f64": 8}  # fmt: skip
# Times the result's bytes that each of `n` devices sends, when they stand in a ring.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n, "all-reduce": lambda n: 2 * (n - 1) / n, "reduce-scatter": lambda n: n - 1.0,
    "all-to-all": lambda n: (n - 1) / n, "collective-permute": lambda _: 1.0,
}  # fmt: skip
# Likewise of each byte that is handed over to be sent, as between slices.
SENT_OF_OPERAND = {**SENT, "all-gather": SENT["reduce-scatter"], "reduce-scatter": SENT["all-gather"]}
# `  %name = shape opcode(operands), attributes`; a shape may be a tuple.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
ARRAY = re.compile(rf"(?:{'|'.join(ITEM_BYTES)})\[[\d,]*\]")
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)(?:\], device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|\]) \{((?:'\w+',?)+)\}"
)
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


def collectives(text: str, slices: Sequence[int] = ()) -> list[Collective]:
    """Every collective operation of a compiled program, those of loops with how often they are made.

    Args:
        text: of a compiled module (`jax.stages.Compiled.as_text`).
        slices: the slice of each device of the mesh. Of several slices a TPU's program is that of one, which numbers its own
            devices alone; what goes to others is sent by its host.
    """
    program = parse(text)
    slice_of = slices.__getitem__ if len(slices) == program.devices else lambda _: 0
    found: list[Collective] = []
    for lines, times in program.walk():
        if chained(lines) in ("meanwhile", "end"):
            continue
        for line in lines:
            if line.opcode == "send" and "megascale_transfer_type" in line.rest:
                found.append(_between_slices(line.shape, line.rest, times))
            kind = kind_of(line)
            if kind:
                source = line.rest if kind[1] is None else _inner(program, kind[1])
                found.append(_collective(kind[0], line, source, program.devices, slice_of, times))
    return found


def totals(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Network ("ici" or "dcn") and kind -> {"count", "bytes"}: operations, and bytes that a device sends a step."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in found:
        if one.group == 1:  # a sum that each device has for itself
            continue
        name = f"{'dcn' if one.across else 'ici'} {one.kind}"
        sums[name].update({"count": one.times, "bytes": round(one.moved)})
    return {name: dict(counter) for name, counter in sorted(sums.items())}


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction: `%name = shape opcode(operands), attributes`, the last two as `rest`."""

    name: str
    shape: str
    opcode: str
    rest: str

    def operands(self) -> list[str]:
        """Their names."""
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])

    def called(self) -> str:
        """The computation of a fusion."""
        return re.findall(r"calls=%?([\w.-]+)", self.rest)[0]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled module: its computations by name, the one that it begins with, and for how many devices it is."""

    computations: dict[str, list[Line]]
    entry: str
    devices: int

    def walk(self, *, into_fusions: bool = True) -> Iterator[tuple[list[Line], int]]:
        """The instructions of each computation that runs, and how often a step runs it."""
        return self._walk(self.entry, 1, into_fusions)

    def _walk(self, name: str, times: int, into_fusions: bool) -> Iterator[tuple[list[Line], int]]:
        lines = self.computations[name]
        yield lines, times
        for line in lines:
            if line.opcode == "while":
                body = re.search(r"body=%?([\w.-]+)", line.rest)
                assert body
                yield from self._walk(body[1], times * self._trips(line), into_fusions)
            elif line.opcode in ("call", "conditional", "async-start") or (
                into_fusions and line.opcode == "fusion" and kind_of(line) is None
            ):
                for called in re.findall(
                    r"(?:calls|to_apply|branch_computations=\{|true_computation|false_computation)=?%?([\w.-]+)", line.rest
                ):
                    if called in self.computations:
                        yield from self._walk(called, times, into_fusions)

    def _trips(self, line: Line) -> int:
        """How often a loop runs: what is written there, or what its counter, which goes from 0 by 1 as lax.scan's, stays below.

        Raises:
            ValueError: where it is written otherwise.
        """
        if known := re.search(r"known_trip_count\D*(\d+)", line.rest):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.-]+)", line.rest)
        assert condition
        lines = [inner for lines, _ in self._walk(condition[1], 1, into_fusions=True) for inner in lines]
        constants = [one for one in lines if one.opcode == "constant" and one.shape.startswith("s32[]")]
        limits = [int(one.rest.partition(")")[0]) for one in constants]
        if len(limits) != 1 or not any(one.opcode == "compare" and "direction=LT" in one.rest for one in lines):
            raise ValueError(f"how often the loop {line.name} of the compiled step runs cannot be read from its condition")
        return limits[0]


def parse(text: str) -> Program:
    """Read a module's text."""
    computations: dict[str, list[Line]] = {}
    lines: list[Line] = []
    entry = ""
    for written in text.splitlines():
        if match := COMPUTATION.match(written):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif match := INSTRUCTION.match(written):
            lines.append(Line(*match.groups()))
    counts = re.search(r"num_partitions=(\d+)", text.partition("\n\n")[0])
    return Program(computations, entry, int(counts[1]) if counts else 1)


def chained(lines: Sequence[Line]) -> str:
    """Which part of a collective that is written in several fusions one of them is: "begin", "meanwhile" or "end"; else "".

    At full optimization a TPU's all-gather stands in the fusion that begins it, in each that computes meanwhile, and in the one
    that waits for its end.
    """
    if not any("chain_id=" in line.rest for line in lines):
        return ""
    has = lambda target: any(f'"{target}"' in line.rest for line in lines)
    return "begin" if has("AsyncCollectiveStart") else "end" if has("AsyncCollectiveDone") else "meanwhile"


def kind_of(line: Line) -> tuple[str, str | None] | None:
    """(kind, the computation of a fusion that is one) of a collective; the end of an asynchronous one counts for nothing."""
    if line.opcode == "fusion":
        # A TPU's reduce-scatter: an all-reduce of which each device keeps a slice.
        called = line.called()
        return ("reduce-scatter", called) if called.startswith("all-reduce-scatter") else None
    kind = line.opcode.removesuffix("-start")
    return (kind, None) if kind in KINDS else None


def _inner(program: Program, name: str) -> str:
    return next(line.rest for line in program.computations[name] if line.opcode.startswith("all-reduce"))


def _collective(kind: str, line: Line, rest: str, devices: int, slice_of: Callable[[int], int], times: int) -> Collective:
    shapes = _shapes(line.shape)
    if line.opcode.endswith("-start") and kind != "all-reduce":
        shapes = shapes[len(shapes) // 2 :] if kind == "all-gather" else shapes[1:2]  # before them stand the operands
    groups = _groups(rest, devices)
    group = len(groups[0]) if groups else 2  # of a permute: sender and receiver
    across = any(len({*map(slice_of, together)}) > 1 for together in groups or _pairs(rest))
    return Collective(kind, tuple(shapes), group, across, times, times * SENT[kind](group) * sum(map(size, shapes)))


def _between_slices(shape: str, rest: str, times: int) -> Collective:
    """What a TPU hands to its host to be sent to other slices: of the operation's kind there."""
    kind = re.findall(r'megascale_transfer_type="(\w+)"', rest)[0].lower().replace("_", "-")
    # {1,2}x{0:3}: slices 1 and 2, devices 0 to 3 of each.
    slices = re.findall(r'megascale_target="\{([\d,]+)\}', rest)
    group = len(slices[0].split(",")) if slices else 2
    sent = SENT_OF_OPERAND.get(kind, lambda _: 1.0)(group)
    shapes = _shapes(shape)[:1]  # then come a flag and a token
    return Collective(kind, tuple(shapes), group, True, times, times * sent * sum(map(size, shapes)))


def _groups(rest: str, devices: int) -> list[list[int]]:
    """The devices that take part together; none of what has pairs instead."""
    if "replica_groups={}" in rest:
        return [[*range(devices)]]
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return [[int(n) for n in inner.split(",") if n] for inner in re.findall(r"\{([\d,]*)\}", match[1])]
    if match := MESH_GROUPS.search(rest):
        # Along some axes of a mesh: mesh['data'=2,'fsdp'=4] {'fsdp'}.
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        axes = [[*mesh].index(name) for name in re.findall(r"'(\w+)'", match[4])]
        count = math.prod([*mesh.values()][axis] for axis in axes)
        ids = _iota(match[2], match[3]) if match[2] else np.arange(math.prod(mesh.values()))
        return np.moveaxis(ids.reshape([*mesh.values()]), axes, range(-len(axes), 0)).reshape(-1, count).tolist()
    match = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if not match:
        if "replica_groups=" in rest:
            said = rest[rest.index("replica_groups=") :][:200]
            raise ValueError(f"the devices of a collective are written in an unknown form: {said}")
        return []
    return _iota(match[2], match[3]).reshape([int(n) for n in match[1].split(",")]).tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    """[2,3]T(1,0): the numbers 0 to 5 in two rows of three, transposed."""
    sizes = [int(n) for n in dims.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)


def _pairs(rest: str) -> list[list[int]]:
    match = re.search(r"source_target_pairs=\{(\{.*?\})\}", rest)
    return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", match[1])] if match else []


def _shapes(text: str) -> list[str]:
    return ARRAY.findall(text)


def size(shape: str) -> int:
    """Bytes of an array whose shape is written so: f32[3,3,320,320]."""
    return ITEM_BYTES[shape.partition("[")[0]] * math.prod(dims(shape))


def bytes_of(shape: str) -> int:
    """Bytes of an array, or of all those in a tuple."""
    return sum(map(size, _shapes(shape)))


def dims(shape: str) -> list[int]:
    """The dimensions of an array; none of what is no array."""
    match = re.match(r"\w+\[([\d,]*)\]", shape)
    return [int(n) for n in match[1].split(",") if n] if match else []
