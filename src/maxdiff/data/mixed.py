"""Several sources in fixed proportion, and the order in which a source's examples are drawn."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxdiff.data.examples import Example, Source
from maxdiff.data.order import example_index, mixed_index


class Mixed:
    """Sources one after another by index; by position in the order, each as often as its weight says: see `mixed_index`."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[int]):
        self._sources, self.weights = list(sources), tuple(weights)
        self.sizes = tuple(map(len, sources))
        self._ends = np.cumsum(self.sizes)
        mixed_index(0, self.sizes, self.weights, [])  # weights that it refuses are told now

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
        said = [f"{weight} {source.fingerprint()}" for weight, source in zip(self.weights, self._sources, strict=True)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def find(self, i: int) -> tuple[int, int]:
        """(number of the source, index within it) of an example."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = int(np.searchsorted(self._ends, i, "right"))
        return number, i - int(self._ends[number]) + self.sizes[number]


def examples_at(source: Source, seed: int, position: Any, block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which example of a source stands at each position, as training draws them.

    Args:
        source: one, or several in a `Mixed`.
        seed, position: see `example_index`.
        block: see `shuffle_block` in configs/base.yml.

    Returns:
        (epoch, index), int64 of position's shape; of a mix, the epoch is that of the example's own source.
    """
    if isinstance(source, Mixed):
        return mixed_index(seed, source.sizes, source.weights, position, block)
    return example_index(seed, len(source), position, block)


def next_index(source: Source, index: int) -> int:
    """The example after this one, which stands for it if it is bad: of the same source, so that proportions hold."""
    if not isinstance(source, Mixed):
        return (index + 1) % len(source)
    number, own = source.find(index)
    return index - own + (own + 1) % source.sizes[number]
