"""Batches of a source, in the order that the step number alone determines.

`load_batch` says what a step's batch is; `batches` makes one after another, in threads or in worker
processes, always the same ones; `prefetch` has them on the devices before they are wanted.
"""

import collections
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from maxdiff.data.buckets import Buckets
from maxdiff.data.captions import CaptionPlan
from maxdiff.data.encoded import MOMENTS, EncodedSource
from maxdiff.data.examples import BadExample, Source
from maxdiff.data.mixed import examples_at, siblings
from maxdiff.data.order import batch_positions, host_slice
from maxdiff.data.transforms import CAPTION, CROP_AND_FLIP, Picture, Size, make_picture, random_words
from maxdiff.data.workers import worker_batches

logger = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
Tokenizer = Callable[[Sequence[str]], np.ndarray]
T = TypeVar("T")
# What the tokens of each tokenizer are called in a batch.
TOKEN_NAMES = ("input_ids", "input_ids_2")
# Examples to have seen before the fraction of bad ones means anything.
MIN_SEEN = 100
# Bad examples in a row past which a source is taken to be no source of images, and those tried one after another.
MAX_RUN, NEAR = 100, 16


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """What decides the contents of each batch, besides the source and the step.

    Attributes:
        seed: of the order, the crops and the flips.
        global_batch: examples of a step, over all processes.
        resolution: side of the images, in pixels.
        center_crop: crop the middle; if false, anywhere.
        random_flip: mirror half of the images.
        captions: how captions are made of an example's texts.
        process_index: this process, which makes its slice of each global batch.
        process_count: how many processes share a batch.
        flip: all images mirrored, or none; None leaves it to random_flip.
        buckets: of aspect ratios, one of which each batch is made of; None: all images are squares.
        resizer: which of `transforms.RESIZERS` resizes.
        shuffle_block: examples that are drawn near each other, see `order.example_index`; 0 for none.
    """

    seed: int
    global_batch: int
    resolution: int
    center_crop: bool = True
    random_flip: bool = False
    captions: CaptionPlan = dataclasses.field(default_factory=CaptionPlan)
    process_index: int = 0
    process_count: int = 1
    flip: bool | None = None
    shuffle_block: int = 0
    resizer: str = "simd"
    buckets: Buckets | None = None

    @property
    def rows(self) -> slice:
        """This process's rows of the global batch; raises ValueError if it does not divide."""
        return host_slice(self.process_index, self.process_count, self.global_batch)


def load_batch(
    source: Source | EncodedSource, tokenizers: Sequence[Tokenizer], plan: BatchPlan, step: int, pool: Executor | None = None
) -> tuple[Batch, list[BadExample]]:
    """This process's part of the batch of `step`, and the bad examples that others stand for.

    Returns:
        (batch, bad), where batch holds for the b examples of this process
            image: uint8 [b resolution resolution 3], or of the step's bucket [b height width 3].
            input_ids, input_ids_2: int32 [b 77], as many as there are tokenizers.
            position: int32 [b], the row of the global batch.
            index: int64 [b], the example within the source.
            original_size, crop: int32 [b 2], see `Picture`.
        Of what is encoded already, mean and logvar [b h w c] stand for image, and states [b 77 d] (and pooled [b p]) for
        input_ids, unless latents alone are encoded.

    Raises:
        ValueError, OSError: if the source cannot be read, or holds MAX_RUN bad examples in a row.
    """
    rows = np.arange(plan.global_batch)[plan.rows]
    positions = batch_positions(step, plan.global_batch)[plan.rows]
    size, _, indexes = step_examples(source, plan, step)
    wanted = indexes[plan.rows]
    if isinstance(source, EncodedSource):
        return _load_encoded(source, tokenizers, plan, rows, positions, wanted)
    load = lambda position, index: load_example(source, plan, int(position), int(index), size)
    loaded = list((pool.map if pool else map)(load, positions, wanted))
    pictures = [example.picture for example in loaded]
    batch = {
        "image": np.stack([picture.image for picture in pictures]),
        "position": rows.astype(np.int32),
        "index": np.array([example.index for example in loaded], np.int64),
        "original_size": np.array([picture.original_size for picture in pictures], np.int32),
        "crop": np.array([picture.crop for picture in pictures], np.int32),
    }
    for name, tokenizer in zip(TOKEN_NAMES, tokenizers, strict=False):
        batch[name] = tokenizer([example.caption for example in loaded])
    return batch, [example.bad[0] for example in loaded if example.bad]


def step_examples(source: Source | EncodedSource, plan: BatchPlan, step: int) -> tuple[Size, np.ndarray, np.ndarray]:
    """What a step's global batch is made of: its images' (height, width), and (epoch, index) int64 [global_batch] each."""
    if plan.buckets is not None:
        return plan.buckets.at(plan.seed, step, plan.global_batch)
    positions = batch_positions(step, plan.global_batch)
    return (plan.resolution, plan.resolution), *examples_at(source, plan.seed, positions, plan.shuffle_block)


def _load_encoded(
    source: EncodedSource,
    tokenizers: Sequence[Tokenizer],
    plan: BatchPlan,
    rows: np.ndarray,
    positions: np.ndarray,
    wanted: np.ndarray,
) -> tuple[Batch, list[BadExample]]:
    """As `load_batch`; a mirrored image's latents are drawn for the same positions as its pixels would be."""
    bad: list[BadExample] = []
    found: list[Batch] = []
    indexes: list[int] = []
    for position, index in zip(positions.tolist(), wanted.tolist(), strict=True):
        met: list[BadExample] = []
        row, first = None, index
        while row is None:
            try:
                row = source[index]
            except BadExample as error:
                met.append(error)
                index = _instead(source, first, met)
        mirrored = plan.random_flip and random_words(plan.seed, position, CROP_AND_FLIP)[2] >> 63
        moments = {name: row[f"flip_{name}" if mirrored else name] for name in MOMENTS}
        found.append({**{name: x for name, x in row.items() if not name.startswith("flip_")}, **moments})
        indexes.append(index)
        bad += met[:1]
    batch = {name: np.stack([row[name] for row in found]) for name in found[0]}
    if not source.has_text:
        captions = [encoded_caption(source, plan, *place) for place in zip(positions.tolist(), indexes, strict=True)]
        batch |= {name: tokenizer(captions) for name, tokenizer in zip(TOKEN_NAMES, tokenizers, strict=False)}
    return {**batch, "position": rows.astype(np.int32), "index": np.array(indexes, np.int64)}, bad


def encoded_caption(source: EncodedSource, plan: BatchPlan, position: int, index: int) -> str:
    """What an encoded example is trained with: the caption that is encoded, or one made of its texts as for an image."""
    _, texts = source.names(index)
    return texts[0] if source.has_text else plan.captions.caption(texts, random_words(plan.seed, position, CAPTION))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An example as it is trained on: its number and name in the source, and the bad ones that it stands for.

    Attributes:
        texts: what its caption was made of.
    """

    index: int
    key: str
    picture: Picture
    caption: str
    texts: tuple[str, ...]
    bad: list[BadExample]


def load_example(source: Source, plan: BatchPlan, position: int, index: int, size: Size | None = None) -> Loaded:
    """The example at `index`, or another in the place of a bad one, see `_instead`; of this size, else plan.resolution."""
    words = random_words(plan.seed, position, CROP_AND_FLIP)
    random_flip = plan.random_flip if plan.flip is None else True
    if plan.flip is not None:
        words[2] = int(plan.flip) << 63
    bad: list[BadExample] = []
    first = index
    while True:
        try:
            example = source[index]
            picture = make_picture(
                example.image, example.key, words, size or plan.resolution, plan.center_crop, random_flip, plan.resizer
            )
            caption = plan.captions.caption(example.texts, random_words(plan.seed, position, CAPTION))
            return Loaded(index, example.key, picture, caption, example.texts, bad)
        except BadExample as error:
            bad.append(error)
        index = _instead(source, first, bad)


def _instead(source: Source | EncodedSource, first: int, bad: Sequence[BadExample]) -> int:
    """Which example is tried in the place of `first`, after these bad ones: whoever meets it replaces it alike.

    The next ones, NEAR of them; then ever farther away, for a lost shard may have held thousands. Of a mix, examples of
    the same source, so that proportions hold.

    Raises:
        ValueError: if all are bad, or MAX_RUN of those tried.
    """
    tried, (start, n) = len(bad), siblings(source, first)
    if tried >= min(MAX_RUN, n):
        raise ValueError(f"{tried} examples in a row are bad, the last {bad[-1]}")
    return start + (first - start + (tried if tried <= NEAR or n <= MAX_RUN else NEAR + 2 ** (tried - NEAR))) % n


def one_behind(items: Iterable[T]) -> Iterator[T]:
    """Each item when the next has been made, so that devices work on that one while what this one holds is fetched."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def batches(
    source: Source | EncodedSource,
    tokenizers: Sequence[Tokenizer],
    plan: BatchPlan,
    *,
    start_step: int = 0,
    workers: int = 0,
    max_bad_fraction: float = 0.01,
) -> Iterator[Batch]:
    """Endless batches from `start_step` on: see `load_batch`. Their number of workers changes nothing but speed.

    Closing the iterator, as `prefetch` does, ends its threads or workers.

    Args:
        source: the examples; with workers, of a class that they can import.
        tokenizers: one, two for SDXL, none where captions are not wanted.
        plan: what a batch is.
        start_step: the step of the first batch.
        workers: processes that load batches, each every workers-th. 0 loads in threads of this process.
        max_bad_fraction: how many of the examples seen may be bad, once MIN_SEEN are seen.

    Raises:
        ValueError: at once, for arguments that cannot be met; while iterating, past `max_bad_fraction`.
    """
    for name, value in {"workers": workers, "start_step": start_step}.items():
        if value < 0:
            raise ValueError(f"{name}={value} (allowed: 0 or more)")
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction={max_bad_fraction} (allowed: 0 to 1)")
    if plan.resolution < 1:
        raise ValueError(f"resolution={plan.resolution} (allowed: 1 or more)")
    if len(tokenizers) > len(TOKEN_NAMES):
        raise ValueError(f"{len(tokenizers)} tokenizers (allowed: at most {len(TOKEN_NAMES)})")
    rows = plan.rows  # now, rather than at the first batch, is when a wrong batch size is told
    made = worker_batches if workers else _thread_batches
    return _checked(made(source, tokenizers, plan, start_step, workers), rows.stop - rows.start, max_bad_fraction)


def _thread_batches(
    source: Source | EncodedSource, tokenizers: Sequence[Tokenizer], plan: BatchPlan, step: int, _: int
) -> Iterator[tuple[Batch, list[BadExample]]]:
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1), "maxdiff-data") as pool:
        while True:
            yield load_batch(source, tokenizers, plan, step, pool)
            step += 1


class BadTally:
    """How many of the examples seen are bad; each is logged once, with its key."""

    def __init__(self, max_bad_fraction: float):
        self._limit = max_bad_fraction
        self._seen, self._bad = 0, 0
        self._logged: set[str] = set()
        self._last: collections.deque[BadExample] = collections.deque(maxlen=5)

    def add(self, examples: int, bad: Sequence[BadExample], at_least: int = MIN_SEEN) -> None:
        """So many more were seen, of which these are bad; raises ValueError past the limit, once `at_least` are seen."""
        self._seen, self._bad = self._seen + examples, self._bad + len(bad)
        self._last.extend(bad)
        for error in bad:
            if error.key not in self._logged:
                self._logged.add(error.key)
                logger.warning("bad example, replaced by the next: %s", error)
        if self._seen >= at_least and self._bad > self._limit * self._seen:
            raise ValueError(f"{self._bad} of {self._seen} examples are bad, more than max_bad_fraction={self._limit}; "
                             f"the last: {'; '.join(map(str, self._last))}")  # fmt: skip


def _checked(made: Iterator[tuple[Batch, list[BadExample]]], rows: int, max_bad_fraction: float) -> Iterator[Batch]:
    """The batches, while few enough examples are bad."""
    tally = BadTally(max_bad_fraction)
    try:
        for batch, bad in made:
            tally.add(rows, bad)
            yield batch
    finally:
        made.close()  # pyright: ignore[reportAttributeAccessIssue]


class Prefetch(Generic[T]):
    """Iterates over `place(item)` for each item, made beforehand by a thread; see `prefetch`.

    Attributes:
        seconds_waited: how long the consumer has waited so far: above 0 in the long run, the input is too slow.
    """

    def __init__(self, iterator: Iterator[Any], place: Callable[[Any], T], depth: int):
        self.seconds_waited = 0.0
        self._free = threading.Semaphore(depth)
        self._ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(iterator, place), name="maxdiff-prefetch", daemon=True)
        self._thread.start()

    def _run(self, iterator: Iterator[Any], place: Callable[[Any], T]) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stop.is_set():
                    return
                self._ready.put((place(next(iterator)), None))
        except BaseException as error:  # StopIteration too: the consumer's __next__ raises what this one met
            self._ready.put((None, error))
        finally:
            # A generator can only be closed by the thread that runs it; its workers end with it.
            if hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> T:
        if self._end is not None:
            raise self._end
        start = time.perf_counter()
        item, error = self._ready.get()
        self.seconds_waited += time.perf_counter() - start
        self._free.release()
        if error is not None:
            self._end = error
            raise error
        return item  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Stop the thread, and the iterator if it is a generator. Waits for the item in the making."""
        self._stop.set()
        self._free.release()
        self._thread.join()
        self._end = self._end or StopIteration()

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(iterator: Iterator[Any], place: Callable[[Any], T], depth: int = 2) -> Prefetch[T]:
    """Have `depth` items ready, already placed, while the consumer uses the one before; begins at once.

    Args:
        iterator: batches; closed in the end if it is a generator.
        place: puts a batch on the devices; called in another thread.
        depth: how many placed batches may wait, so how much device memory they take.

    Raises:
        ValueError: for depth < 1. While iterating, whatever `iterator` and `place` raise.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} (allowed: 1 or more)")
    return Prefetch(iterator, place, depth)
