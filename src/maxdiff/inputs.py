"""From a configuration to its training data: sources, captions, the plan of batches."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from maxdiff.config import Config
from maxdiff.data.buckets import bucket_shapes, image_sizes, large_enough, make_buckets
from maxdiff.data.captions import CaptionPlan
from maxdiff.data.encoded import EncodedSource, is_encoded
from maxdiff.data.examples import BadExample, Columns, Filter, Source
from maxdiff.data.mixed import Mixed
from maxdiff.data.pipeline import TOKEN_NAMES, BatchPlan, Tokenizer, batches, load_example
from maxdiff.data.sources import Format, Subset, open_source
from maxdiff.data.transforms import Size, check_resizer
from maxdiff.processes import say, wait_for_all
from maxdiff.weights.tensors import write_json

# Examples whose columns are looked at.
FIRST = 100


def open_training(config: Config) -> Source | EncodedSource:
    """What train_data_dir names: images, as `open_examples`, or encoded ones."""
    path = config.data.train_data_dir
    return EncodedSource(Path(path)) if path and is_encoded(path) else open_examples(config, "train_data_dir")


def check_data(folder: Path, source: Source | EncodedSource, may_change: bool) -> None:
    """Remember a run's data, and say it if they are others than at its last start.

    Raises:
        ValueError: if processes see different data: each would make batches of its own. And if the data have changed,
            unless they may.
    """
    # What is encoded stands for the images it was made of: going over to it changes no example.
    seen = source.fingerprint()
    now = {"examples": len(source), "fingerprint": source.made_of["source"] if isinstance(source, EncodedSource) else seen}
    mine = np.frombuffer(bytes.fromhex(seen[:16]), np.uint32)
    if jax.process_count() > 1 and (multihost_utils.process_allgather(mine) != mine).any():
        raise ValueError("train_data_dir: processes see different data (allowed: the same on every host)")
    kept = folder / "data.json"
    before = json.loads(kept.read_text()) if kept.is_file() else now
    wait_for_all("data.json is read")
    if before != now:
        counts = f"{before['examples']} examples then, {now['examples']} now"
        changed = (f"the training data have changed since the last start ({counts}): each step from here on has other examples "
                   "than it would have had")  # fmt: skip
        if not may_change:
            raise ValueError(f"train_data_dir: {changed} (allowed: the same data, or allow_config_change=true)")
        say(changed)
    if not jax.process_index():
        write_json(kept, now)


def open_examples(config: Config, key: str) -> Source:
    """The images that `key` names, train_data_dir (or data_mix) or eval_data_dir; one of each source has been decoded.

    Raises:
        ValueError: naming the key, for whatever `open_source` refuses, and for a source whose first examples are all bad.
    """
    data = config.data
    mix = data.data_mix if key == "train_data_dir" else ()
    check_resizer(data.image_resizer)
    try:
        paths = [path for path, _ in mix] or [getattr(data, key)]
        if encoded := [path for path in paths if is_encoded(path)]:
            raise ValueError(f"{encoded[0]} is encoded already; allowed here: images")
        sources = [open_path(config, path) for path in paths]
        for source in sources:
            load_example(source, make_plan(config), position=0, index=0)
        if absent := _absent_columns(config, sources):
            say(f"caption_column: none of the first examples has {', '.join(map(repr, absent))}")
        return Mixed(sources, [weight for _, weight in mix]) if mix else sources[0]
    except (ValueError, OSError) as error:
        raise ValueError(f"{'data_mix' if mix else key}: {error}") from error


def open_path(config: Config, path: str) -> Source:
    """The images at a path, with the configuration's columns and filters; raises as `open_source`."""
    data = config.data
    filters = [Filter(name, str(condition)) for name, condition in data.filters.items()]
    form = Format(data.dataset_type, data.image_column, data.train_split)
    source = open_source(path, caption_columns(config), data.dataset_save_location or None, filters, form)
    if isinstance(source, Subset):
        say(f"filters keep {len(source)} of {source.whole} examples of {path}")
    if not data.minimum_size:
        return source
    sizes = _sizes(config, source)
    rows = large_enough(sizes, data.minimum_size)
    if not len(rows):
        raise ValueError(f"minimum_size={data.minimum_size} keeps no image of {path}")
    unreadable = int((sizes == 0).all(1).sum())
    bad = f"; {unreadable} of the others cannot be read" if unreadable else ""
    say(f"minimum_size={data.minimum_size} keeps {len(rows)} of {len(source)} images of {path}{bad}")
    return Subset(source, rows)


def _absent_columns(config: Config, sources: Sequence[Source]) -> list[str]:
    """Of several columns of captions, those that none of the first examples has: mistyped, perhaps."""
    wanted = caption_columns(config).names
    absent = set(wanted)
    for source in sources if len(wanted) > 1 else ():
        for i in range(min(FIRST, len(source))):
            with contextlib.suppress(BadExample):
                absent -= source.fields(i).keys()
    return [name for name in wanted if name in absent] if len(absent) < len(wanted) else []


def caption_columns(config: Config) -> Columns:
    """Which texts captions are made of; raises ValueError for an idx_to_prompt that cannot be read."""
    names = tuple(name.strip() for name in config.data.caption_column.split(",") if name.strip())
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"caption_column={config.data.caption_column!r} is not supported; allowed: one or several columns: a, b"
        )
    if not config.data.idx_to_prompt:
        return Columns(names)
    path = Path(config.data.idx_to_prompt)
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"idx_to_prompt={str(path)!r} cannot be read: {error}") from None
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise ValueError(f'idx_to_prompt={str(path)!r} is no JSON object of texts, such as {{"0": "a cat"}}')
    return Columns(names, labels)


def make_plan(config: Config, part: tuple[int, int] = (0, 1)) -> BatchPlan:
    """What decides the contents of each batch, or of a part of each (see `batch_part`)."""
    data = config.data
    captions = CaptionPlan(data.caption_mode, data.caption_separator, data.shuffle_tags, data.keep_tags, data.tag_dropout,
                           data.caption_prefix)  # fmt: skip
    return BatchPlan(config.run.seed, config.batch.global_batch_size, data.resolution, data.center_crop, data.random_flip,
                     captions, *part, shuffle_block=data.shuffle_block, resizer=data.image_resizer)  # fmt: skip


def with_buckets(config: Config, plan: BatchPlan, source: Source | EncodedSource) -> BatchPlan:
    """The plan with the buckets of aspect ratios that the configuration asks for, if it does.

    The first process reads the images' sizes, and the others find them in dataset_save_location.
    """
    data = config.data
    if not data.aspect_ratio_buckets:
        return plan
    assert not isinstance(source, EncodedSource)  # see encode.check_trains
    shapes = bucket_shapes(data.resolution, data.bucket_step, data.bucket_max_ratio)
    return dataclasses.replace(plan, buckets=make_buckets(_sizes(config, source), shapes))


def _sizes(config: Config, source: Source) -> np.ndarray:
    cache = Path(config.data.dataset_save_location) if config.data.dataset_save_location else None
    if jax.process_index():
        wait_for_all("sizes are read")
    sizes = image_sizes(source, cache)
    if not jax.process_index():
        wait_for_all("sizes are read")
    return sizes


def make_batches(
    config: Config, source: Source | EncodedSource, tokenizers: Sequence[Tokenizer], plan: BatchPlan, first: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches, of a start that goes on from step `first`; raises as `batches`."""
    return batches(source, tokenizers, plan, start_step=first, workers=config.data.data_workers,
                   max_bad_fraction=config.data.max_bad_fraction)  # fmt: skip


def abstract_batch(
    plan: BatchPlan,
    tokenizers: Sequence[Tokenizer],
    sharding: NamedSharding,
    source: Source | EncodedSource | None = None,
    size: Size | None = None,
) -> dict[str, Any]:
    """What `place` makes of a batch, as jax.ShapeDtypeStructs.

    Args:
        source: matters where it is encoded.
        size: (height, width) of the images; by default plan.resolution.
    """
    if isinstance(source, EncodedSource):
        found = {name: given for name, given in source.shapes().items() if not name.startswith("flip_")}
        found["position"] = ((), np.dtype(np.int32))
        if not source.has_text:
            found |= {name: (shape, np.dtype(np.int32)) for name, shape in _token_shapes(tokenizers).items()}
        return {name: jax.ShapeDtypeStruct((plan.global_batch, *shape), dtype, sharding=sharding)
                for name, (shape, dtype) in found.items()}  # fmt: skip
    height, width = size or (plan.resolution, plan.resolution)
    shapes = {"image": (height, width, 3), "position": (), "original_size": (2,), "crop": (2,)}
    shapes |= _token_shapes(tokenizers)
    return {
        name: jax.ShapeDtypeStruct((plan.global_batch, *shape), np.uint8 if name == "image" else np.int32, sharding=sharding)
        for name, shape in shapes.items()
    }


def _token_shapes(tokenizers: Sequence[Tokenizer]) -> dict[str, tuple[int, ...]]:
    return {name: tokenizer([""]).shape[1:] for name, tokenizer in zip(TOKEN_NAMES, tokenizers, strict=False)}
