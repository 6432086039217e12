"""The order of examples as a function: no iterator, no state, no memory.

`position` counts examples since the start of training. Every host, whatever their number, asks the
same function which example stands at a position, so a run is resumed at step N by asking for the
positions of step N.
"""

from typing import Any

import numpy as np

# Ethereum shuffles its validators, against adversaries, by this network in 90 rounds. With 64 the tests of
# uniformity pass with room, and 1,024 positions take 4 ms.
ROUNDS = 64


def example_index(seed: int, n: int, position: Any) -> tuple[np.ndarray, np.ndarray]:
    """Which example of `n` stands at each position.

    Args:
        seed: any integer; taken modulo 2**64.
        n: how many examples the source has.
        position: integers >= 0 of any shape, counting examples since the start of training.

    Returns:
        (epoch, index), int64 of position's shape: epoch is position // n, and within an epoch each
        index of range(n) occurs once, in an order that depends on seed and epoch alone.

    Raises:
        ValueError: for n < 1 or a negative position.
    """
    position = np.asarray(position, np.int64)
    if n < 1:
        raise ValueError(f"n={n}: an order needs at least one example")
    if position.size and position.min() < 0:
        raise ValueError(f"position={position.min()}: positions count from 0")
    epoch, offset = np.divmod(position.reshape(-1), n)
    epochs, which = np.unique(epoch, return_inverse=True)
    # The seed is hashed first, so that seed + 1 is not this seed an epoch later.
    keys = _mix(_mix(np.array([seed % 2**64], np.uint64)) ^ epochs.astype(np.uint64))
    index = _swap_or_not(offset.astype(np.uint64), n, keys, which).astype(np.int64)
    return epoch.reshape(position.shape), index.reshape(position.shape)


def _swap_or_not(x: np.ndarray, n: int, keys: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Permute range(n) by the swap-or-not network (Hoang, Morris and Rogaway 2012, figure 1).

    Each round pairs x with partner - x (mod n) and a hash of the pair decides whether the two change
    places. It is a permutation for any n: no larger domain to walk back from.

    Args:
        x: numbers below n, uint64.
        keys: one key for each permutation, uint64 [k].
        which: index into `keys` for each element of x.
    """
    size = np.uint64(n)
    for number in range(ROUNDS):
        round_keys = _mix(keys + np.uint64(number + 1))
        partners = round_keys % size
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
