"""Several sources in fixed proportion, and the order in which a source's examples are drawn."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxdiff.data.encoded import EncodedSource
from maxdiff.data.examples import Example, Source
from maxdiff.data.order import example_index, mixed_index


class Mixed:
    """Sources one after another by index; by position in the order, each as often as its weight says: see `mixed_index`.

    Attributes:
        mix: (how many examples each source has, how often each is drawn).
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[int]):
        self._sources = list(sources)
        self.mix = [len(source) for source in sources], list(weights)
        self._ends = np.cumsum(self.mix[0])
        mixed_index(0, *self.mix, [])  # weights that it refuses are told now

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int, /) -> Example:
        number, own = self.find(i)
        return self._sources[number][own]

    def fields(self, i: int, /) -> Mapping[str, Any]:
        """See `Source`."""
        number, own = self.find(i)
        return self._sources[number].fields(own)

    def fingerprint(self) -> str:
        """See `Source`; the weights are part of it, as they decide what is drawn."""
        said = [f"{weight} {source.fingerprint()}" for weight, source in zip(self.mix[1], self._sources, strict=True)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def find(self, i: int) -> tuple[int, int]:
        """(number of the source, index within it) of an example."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = int(np.searchsorted(self._ends, i, "right"))
        return number, i - int(self._ends[number]) + self.mix[0][number]


def examples_at(source: Source | EncodedSource, seed: int, position: Any, block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which example of a source stands at each position, as training draws them.

    Args:
        source: one, or several in a `Mixed`, or what was encoded of either.
        seed, position: see `example_index`.
        block: see `shuffle_block` in configs/base.yml.

    Returns:
        (epoch, index), int64 of position's shape; of a mix, the epoch is that of the example's own source.
    """
    if isinstance(source, Mixed | EncodedSource) and source.mix:
        sizes, weights = source.mix
        return mixed_index(seed, sizes, weights, position, block)
    return example_index(seed, len(source), position, block)


def siblings(source: Source | EncodedSource, index: int) -> tuple[int, int]:
    """Where the examples of this one's source begin among those of a mix, and how many there are."""
    if not isinstance(source, Mixed | EncodedSource) or not source.mix:
        return 0, len(source)
    ends = np.cumsum(source.mix[0])
    number = int(np.searchsorted(ends, index, "right"))
    return int(ends[number]) - source.mix[0][number], source.mix[0][number]
