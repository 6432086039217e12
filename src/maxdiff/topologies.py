"""TPU slices by name, and what a chip of each generation has.

Figures are per chip, from https://docs.cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, and .../v6e; of v5e's and v6e's data
centre network a 256th of a pod's. What the pages do not have (v4's data centre network, the width of matrix units) is from
https://jax-ml.github.io/scaling-book/tpus. The memory that programs have is what libtpu 0.0.42.1 says when one needs more.
"""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of TPUs.

    Attributes:
        counted: what the number in a slice's name counts: "chips", or "cores" of which a chip has two.
        dims: of its topologies, 2 or 3.
        hbm: bytes of a chip's memory that programs have: XLA keeps some for itself.
        most: chips of the greatest slice.
        flops: FLOP/s in bfloat16, at the peak.
        hbm_speed: bytes/s of memory.
        ici_speed, dcn_speed: bytes/s that a chip sends over all its links to other chips, and to other slices.
        matrix: rows and columns of a matrix unit.
        chip_config: how libtpu is to see a chip, where that is not its default: both cores as one device.
    """

    counted: str
    dims: int
    hbm: int
    most: int
    flops: float
    hbm_speed: float
    ici_speed: float
    dcn_speed: float
    matrix: int = 128
    chip_config: str = "default"


GENERATIONS = {
    "v4": Generation("cores", 3, round(30.75 * GIB), 4096, 275e12, 1.2288e12, 300e9, 6.25e9, chip_config="megacore"),
    "v5e": Generation("chips", 2, round(15.75 * GIB), 256, 197e12, 0.819e12, 200e9, 3.125e9),
    "v5p": Generation("cores", 3, round(95.74 * GIB), 6144, 459e12, 2.765e12, 600e9, 6.25e9),
    "v6e": Generation("chips", 2, round(31.25 * GIB), 256, 918e12, 1.64e12, 400e9, 12.5e9, 256),
}
# How else they are called.
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p"}
# Chips -> their shape, for the sizes that are offered.
PLANE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 192: "4x4x12", 256: "4x8x8", 384: "4x8x12",
        512: "8x8x8", 768: "8x8x12", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24"}  # fmt: skip


MOST_SLICES = 256  # for each of whose chips libtpu and XLA make objects


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or several slices.

    Attributes:
        generation: its name in GENERATIONS.
        shape: chips along each axis, as "4x4x4".
        slices: how many of them, joined by the data centre's network.
    """

    generation: str
    shape: str
    slices: int = 1

    @property
    def chips(self) -> int:
        """Of all slices."""
        return self.slices * math.prod(map(int, self.shape.split("x")))

    @property
    def linked(self) -> float:
        """Share of a chip's links within its slice that lead to another chip: along an axis of two chips one of two does.

        1 of a chip alone, which sends nothing.
        """
        sizes = [int(size) for size in self.shape.split("x")]
        return sum(min(size - 1, 2) for size in sizes) / (2 * self.of.dims) or 1.0

    @property
    def of(self) -> Generation:
        """Its generation."""
        return GENERATIONS[self.generation]

    def __str__(self) -> str:
        return f"{self.generation}:{self.shape}" + (f" x {self.slices} slices" if self.slices > 1 else "")

    def devices(self) -> list[Any]:
        """jax devices of it, which programs can be compiled for and nothing else; needs libtpu, and no TPU.

        Raises:
            ValueError: without libtpu, or if it knows no such slice.
        """
        try:
            import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("compiling for a TPU needs libtpu, which pip install -e '.[tpu]' brings") from None
        from jax.experimental import topologies

        # libtpu takes a host for one of several chips.
        alone = {"chips_per_host_bounds": (1, 1, 1)} if self.chips == self.slices else {}
        try:
            found = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{self.generation}:{self.shape}", num_slices=self.slices,
                chip_config_name=self.of.chip_config, **alone,
            )  # fmt: skip
        except Exception as error:  # of XLA's and libtpu's kinds
            raise ValueError(f"topology={self}: libtpu knows no such slice: {str(error).splitlines()[0]}") from None
        return list(found.devices)


def parse(name: str, slices: int = 1) -> Topology:
    """`v5p:4x4x4`, or a slice by the name that clouds give it: `v5p-128`, `v5litepod-256`, `v6e-256`, `v4-8`.

    Raises:
        ValueError: for any other name, or too many slices, naming what is allowed.
    """
    if not name:
        raise ValueError(f"topology is required (allowed: {', '.join([*GENERATIONS, *ALIASES])}, as v5p:4x4x4 or v5p-128)")
    if slices > MOST_SLICES:
        raise ValueError(f"num_slices={slices} (allowed: 1 to {MOST_SLICES})")
    kind, joint, rest = re.fullmatch(r"([^:-]*)([:-]?)(.*)", name.strip().lower()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    generation = ALIASES.get(kind, kind)
    if generation not in GENERATIONS:
        raise ValueError(f"topology={name!r}: {kind!r} is no TPU (allowed: {', '.join([*GENERATIONS, *ALIASES])}, as v5p:4x4x4 "
                         "or v5p-128)")  # fmt: skip
    found = GENERATIONS[generation]
    shapes = {chips: shape for chips, shape in (PLANE if found.dims == 2 else CUBE).items() if chips <= found.most}
    if joint == ":" and re.fullmatch(rf"\d+(x\d+){{{found.dims - 1}}}", rest) and _exists(rest, found, shapes.values()):
        return Topology(generation, rest, slices)
    times = 2 if found.counted == "cores" else 1
    if joint == "-" and rest.isdigit() and int(rest) / times in shapes:
        return Topology(generation, shapes[int(rest) // times], slices)
    sizes = ", ".join(f"{kind}-{times * chips}" for chips in shapes)
    cubes = f"; {kind}:AxBxC of multiples of 4, A <= B <= C and at most {found.most} chips" if found.dims == 3 else ""
    raise ValueError(f"topology={name!r} is no slice of {generation} (allowed: {', '.join(shapes.values())}, as {kind}:"
                     f"{next(iter(shapes.values()))}, which are {sizes}{cubes})")  # fmt: skip


def _exists(shape: str, of: Generation, named: Collection[str]) -> bool:
    """Whether a slice of this shape is offered: one with a name, or, of three axes, whole cubes of 4 x 4 x 4 chips."""
    sizes = [int(size) for size in shape.split("x")]
    cubes = of.dims == 3 and all(size and size % 4 == 0 for size in sizes) and sizes == sorted(sizes)
    return shape in named or (cubes and math.prod(sizes) <= of.most)
