"""Aspect-ratio buckets: images keep most of their shape, and every batch has one shape (as in NovelAI's and kohya's training).

Which bucket a step trains on, and which of its examples, is a function of the step number, as everything about the order is.
"""

import dataclasses
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from maxdiff.data.examples import BadExample, LostExample, Source
from maxdiff.data.order import example_index
from maxdiff.data.progress import Progress, in_threads
from maxdiff.data.transforms import Size, upright_size
from maxdiff.weights.tensors import write_atomically

THREADS, CHUNK = 32, 1024


def bucket_shapes(resolution: int, step: int, max_ratio: float) -> list[Size]:
    """(height, width) of all buckets, from the widest to the tallest: multiples of `step` pixels that hold at most
    resolution x resolution pixels, for each height the widest such, and for each width the tallest.

    Args:
        max_ratio: of the longer side over the shorter.

    Raises:
        ValueError: if resolution is no multiple of step, so that not even the square is a bucket.
    """
    if resolution % step:
        raise ValueError(f"bucket_step={step} does not divide resolution={resolution}")
    sides = range(step, resolution + 1, step)
    wide = {(side, resolution**2 // side // step * step) for side in sides}
    shapes = {shape for h, w in wide for shape in ((h, w), (w, h)) if max(h, w) <= max_ratio * min(h, w)}
    return sorted(shapes, key=lambda shape: shape[0] / shape[1])


def assign(sizes: np.ndarray, shapes: Sequence[Size]) -> np.ndarray:
    """The bucket of each size (height, width) [n 2], int64 [n]: that of the nearest aspect ratio, by its logarithm.

    A size of 0, of an image that cannot be read, is in the bucket most nearly square.
    """
    logs = np.log([h / w for h, w in shapes])
    known = np.where(sizes > 0, sizes, 1)
    ratios = np.log(known[:, 0] / known[:, 1])
    # Neighbours in the sorted list are the only candidates: no array of n x buckets.
    right = np.clip(np.searchsorted(logs, ratios), 1, max(1, len(logs) - 1))
    if len(logs) == 1:
        return np.zeros(len(sizes), np.int64)
    return np.where(ratios - logs[right - 1] <= logs[right] - ratios, right - 1, right)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Which examples are in which bucket.

    Attributes:
        shapes: (height, width) of each, pixels.
        bucket: of each example, integers [n].
    """

    shapes: tuple[Size, ...]
    bucket: np.ndarray

    def at(self, seed: int, step: int, global_batch: int) -> tuple[Size, np.ndarray, np.ndarray]:
        """The shape of a step's batch, and its examples: (epoch of its bucket, index), int64 [global_batch] each.

        An epoch has round(n / global_batch) batches of a bucket of n examples, and at least one, in an order drawn from
        the seed. Within each bucket examples follow each other in an order of their own, of which none is lost or
        repeated before all have had their turn, wherever a batch or an epoch ends.
        """
        counts = np.maximum(1, np.round(self._sizes / global_batch)).astype(np.int64)
        ends = np.cumsum(counts)
        # The order of batches is another than any of examples.
        epoch, slot = (int(x) for x in example_index(seed + 1_000_003, int(ends[-1]), step))
        number = int(np.searchsorted(ends, slot, side="right"))
        batch = epoch * int(counts[number]) + slot - int(ends[number] - counts[number])
        positions = batch * global_batch + np.arange(global_batch, dtype=np.int64)
        rows = self._rows[number]
        epochs, own = example_index(seed, len(rows), positions)
        return self.shapes[number], epochs, rows[own].astype(np.int64)

    def describe(self, global_batch: int) -> list[str]:
        """A line for each bucket."""
        lines = []
        for (h, w), n in zip(self.shapes, self._sizes.tolist(), strict=True):
            often = f", each {global_batch / n:.1f} times" if n < global_batch else ""
            batches = max(1, round(n / global_batch))
            lines.append(f"bucket {h}x{w} (height x width): {n} examples, {batches} batches an epoch{often}")
        return lines

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        order = np.argsort(self.bucket, kind="stable").astype(np.int32 if len(self.bucket) < 2**31 else np.int64)
        return np.split(order, np.cumsum(self._sizes)[:-1])

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.bincount(self.bucket, minlength=len(self.shapes))


def make_buckets(sizes: np.ndarray, shapes: Sequence[Size]) -> Buckets:
    """The buckets that have examples; sizes (height, width) [n 2]."""
    bucket = assign(sizes, shapes)
    used, bucket = np.unique(bucket, return_inverse=True)
    return Buckets(tuple(shapes[i] for i in used), bucket.astype(np.uint8 if len(used) < 256 else np.int64))


def image_sizes(source: Source, cache_dir: Path | None = None) -> np.ndarray:
    """(height, width) of each image, upright, int32 [n 2]; 0 of one that cannot be read. What was found is kept in `cache_dir`.

    Each image's file is read once, and only its header decoded.

    Raises:
        LostExample: if a file cannot be read: what was found would be wrong another time.
    """
    kept = cache_dir / f"{source.fingerprint()[:16]}.sizes" if cache_dir else None
    if kept and kept.is_file() and kept.stat().st_size == 8 * len(source):
        return np.fromfile(kept, "<i4").reshape(-1, 2)
    progress = Progress("reading sizes", len(source), "images")

    def read(chunk: range) -> np.ndarray:
        found = np.array([_size(source, i) for i in chunk], np.int32)
        progress.add(len(chunk))
        return found

    chunks = [range(i, min(i + CHUNK, len(source))) for i in range(0, len(source), CHUNK)]
    sizes = np.concatenate(in_threads(read, chunks, THREADS))
    if kept:
        write_atomically(kept, [sizes.astype("<i4").tobytes()])
    return sizes


def _size(source: Source, i: int) -> Size:
    try:
        example = source[i]
        with Image.open(io.BytesIO(example.image)) as image:
            width, height = upright_size(image)
        return height, width
    except LostExample:
        raise
    except (BadExample, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0, 0


def large_enough(sizes: np.ndarray, least: int) -> np.ndarray:
    """The rows of the images whose shorter side has at least so many pixels, int64 [m]."""
    return np.flatnonzero(sizes.min(1) >= least)
