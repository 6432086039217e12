"""The order of examples as a function: no iterator, no state, no memory.

`position` counts examples since the start of training. Every host, whatever their number, asks the
same function which example stands at a position, so a run is resumed at step N by asking for the
positions of step N.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Ethereum shuffles its validators, against adversaries, by this network in 90 rounds. With 64 the tests of
# uniformity pass with room, and 1,024 positions take 4 ms.
ROUNDS = 64
# How many neighbouring runs are shuffled among each other, where examples are to be read near each other.
RUNS_TOGETHER = 64
# Told apart from the numbers of rounds and windows, which are small.
ROTATION, RUNS = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)
# The turns of a period of a mix are kept in a table.
MAX_PERIOD = 2**20
# What a mix adds to the seed for each further source.
SOURCES = 7_368_787


def example_index(seed: int, n: int, position: Any, block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which example of `n` stands at each position.

    Args:
        seed: any integer; taken modulo 2**64.
        n: how many examples the source has.
        position: integers >= 0 of any shape, counting examples since the start of training.
        block: examples that are kept near each other, see `_nearby`; 0 for none.

    Returns:
        (epoch, index), int64 of position's shape: epoch is position // n, and within an epoch each
        index of range(n) occurs once, in an order that depends on seed, epoch and block alone.

    Raises:
        ValueError: for n < 1, a negative position or a negative block.
    """
    position = np.asarray(position, np.int64)
    if n < 1:
        raise ValueError(f"n={n}: an order needs at least one example")
    if block < 0:
        raise ValueError(f"block={block} (allowed: 0 or more)")
    if position.size and position.min() < 0:
        raise ValueError(f"position={position.min()}: positions count from 0")
    epoch, offset = np.divmod(position.reshape(-1), n)
    epochs, which = np.unique(epoch, return_inverse=True)
    # The seed is hashed first, so that seed + 1 is not this seed an epoch later.
    keys = _mix(_mix(np.array([seed % 2**64], np.uint64)) ^ epochs.astype(np.uint64))
    permute = functools.partial(_nearby, block=block) if block else _swap_or_not
    index = permute(offset.astype(np.uint64), n, keys, which).astype(np.int64)
    return epoch.reshape(position.shape), index.reshape(position.shape)


def mixed_index(
    seed: int, sizes: Sequence[int], weights: Sequence[int], position: Any, block: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Which example stands at each position of several sources in fixed proportion.

    Among sum(weights) positions in a row, from a multiple of it on, source s has weights[s], spread evenly. Its k-th position
    of all, whatever the others' weights, has the k-th example of its own order: so its epochs lose and repeat nothing.

    Args:
        seed, position, block: see `example_index`.
        sizes: how many examples each source has.
        weights: one for each, 1 or more.

    Returns:
        (epoch, index), int64 of position's shape: the epoch of the example's source, and its index among the examples
        of all sources one after another.

    Raises:
        ValueError: as `example_index`, and for weights that add up to more than MAX_PERIOD.
    """
    position = np.asarray(position, np.int64)
    if position.size and position.min() < 0:
        raise ValueError(f"position={position.min()}: positions count from 0")
    weights = [weight // math.gcd(*weights) for weight in weights]
    turns, counts = _period(tuple(weights))
    period, place = np.divmod(position.reshape(-1), len(turns))
    source, epoch, index = turns[place], np.zeros_like(place), np.zeros_like(place)
    for number, (n, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = source == number
        own = period[mine] * weight + counts[place[mine]]
        # Sources of one size would otherwise be drawn in step.
        epoch[mine], index[mine] = example_index(seed + number * SOURCES, n, own, block)
        index[mine] += sum(sizes[:number])
    return epoch.reshape(position.shape), index.reshape(position.shape)


@functools.lru_cache(maxsize=16)
def _period(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each position of a period: which source it belongs to, and how many it has had in the period before; int64 [period].

    Turn k of a source is due at (k + 1/2) / weight of the period, and comes in the order of being due: within half a
    position, for each source, of its time. Times are compared exactly: equal fractions are equal floats.
    """
    if sum(weights) > MAX_PERIOD:
        raise ValueError(f"weights {list(weights)} add up to {sum(weights)} (allowed: at most {MAX_PERIOD})")
    source = np.repeat(np.arange(len(weights)), weights)
    count = np.concatenate([np.arange(weight) for weight in weights])
    order = np.lexsort((source, (2 * count + 1) / (2 * np.asarray(weights)[source])))
    return source[order], count[order]


def _nearby(x: np.ndarray, n: int, keys: np.ndarray, which: np.ndarray, block: int) -> np.ndarray:
    """Permute range(n) so that what is near in the order is read near each other.

    Examples are cut into runs of `block` in a row, from another example on in each permutation. The runs are permuted
    (but a shorter last one, which is another in each permutation, too), then the examples of RUNS_TOGETHER runs that
    follow each other are permuted among them. So RUNS_TOGETHER * block positions, from a multiple of it on, need only so
    many runs.

    Args: see `_swap_or_not`.
    """
    size, run, span = np.uint64(n), np.uint64(block), np.uint64(RUNS_TOGETHER * block)
    # Of each permutation, the windows of runs that are asked for, with a key each.
    spans = (size - np.uint64(1)) // span + np.uint64(1)
    windows, window_of = np.unique(which.astype(np.uint64) * spans + x // span, return_inverse=True)
    owner, number = windows // spans, windows % spans
    window_keys = _mix(keys[owner.astype(np.int64)] ^ _mix(number))
    start = number * span
    x = start[window_of] + _swap_or_not(x % span, np.minimum(span, size - start), window_keys, window_of)
    place, within = x // run, x % run
    if (runs := n // block) > 1:
        whole = place < runs
        place[whole] = _swap_or_not(place[whole], runs, _mix(keys ^ RUNS), which[whole])
    return (place * run + within + (_mix(keys ^ ROTATION) % size)[which]) % size


def _swap_or_not(x: np.ndarray, n: Any, keys: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Permute range(n) by the swap-or-not network (Hoang, Morris and Rogaway 2012, figure 1).

    Each round pairs x with partner - x (mod n) and a hash of the pair decides whether the two change
    places. It is a permutation for any n: no larger domain to walk back from.

    Args:
        x: numbers below n, uint64.
        n: one for all permutations, or one for each, [k].
        keys: one key for each permutation, uint64 [k].
        which: index into `keys` for each element of x.
    """
    sizes = np.broadcast_to(np.asarray(n, np.uint64), keys.shape)
    size = sizes[which]
    for number in range(ROUNDS):
        round_keys = _mix(keys + np.uint64(number + 1))
        partners = round_keys % sizes
        partner = (partners[which] + size - x) % size
        swap = _mix(np.maximum(x, partner) ^ _mix(round_keys)[which]) >> np.uint64(63)
        x = np.where(swap == 1, partner, x)
    return x


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash 64 bits to 64 bits, one to one: splitmix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def batch_positions(step: int, global_batch: int) -> np.ndarray:
    """The positions of step's global batch, int64 [global_batch]."""
    return np.int64(step) * global_batch + np.arange(global_batch, dtype=np.int64)


def host_slice(process_index: int, process_count: int, global_batch: int) -> slice:
    """The rows of each global batch that process `process_index` of `process_count` reads.

    Raises:
        ValueError: if the batch does not divide, or there is no such process.
    """
    if global_batch < 1 or global_batch % process_count:
        raise ValueError(f"global_batch={global_batch} does not divide among {process_count} processes "
                         f"(allowed: multiples of {process_count})")  # fmt: skip
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} of {process_count} processes (allowed: 0 to {process_count - 1})")
    rows = global_batch // process_count
    return slice(process_index * rows, (process_index + 1) * rows)
