"""Encode images and captions once, for training that runs neither autoencoder nor text encoder.

Where captions differ from time to time, or the text encoder is trained, images alone are encoded, and texts are kept.

    python -m maxdiff.data.encode configs/base15.yml train_data_dir='shards/*.tar' center_crop=true encoded_dir=encoded
    python train.py configs/base15.yml train_data_dir=encoded center_crop=true ...

Stopped and started again, it goes on with the shards that are missing, on any number of devices and processes.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiff import bucket, build, command, inputs
from maxdiff.checksums import digest, fingerprint
from maxdiff.conditioning import encode_text
from maxdiff.config import Config
from maxdiff.data.encoded import (
    EMPTY,
    FINISHED,
    LATENTS_ALONE,
    ROWS,
    SIZES,
    EncodedSource,
    begin,
    differences,
    finish,
    made_of_there,
    missing_shards,
    write_arrays,
    write_shard,
)
from maxdiff.data.examples import Source
from maxdiff.data.mixed import Mixed
from maxdiff.data.pipeline import MIN_SEEN, TOKEN_NAMES, BadTally, BatchPlan, Loaded, load_example, one_behind, prefetch
from maxdiff.data.remote import is_remote
from maxdiff.losses import from_uint8
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params
from maxdiff.pace import Pace
from maxdiff.processes import check_shared, say, start, wait_for_all
from maxdiff.task import Task, make_task

# What of the configuration decides what an example's pixels and texts are, and what caption is made of these.
DECIDES = ("resolution", "minimum_size", "center_crop", "caption_column", "filters", "image_column", "image_resizer")
CAPTIONS = ("caption_mode", "caption_separator", "caption_prefix")
THREADS = 32


def main(argv: Sequence[str]) -> int:
    """The command line: as train.py's."""

    def action(config: Config) -> None:
        start(config.run)
        build.require(config, "train_data_dir", "encoded_dir")
        build.use_cache(config)
        source = inputs.open_examples(config, "train_data_dir")
        task = make_task(config, build.layout_of(config), None)
        encode(config, task, source, Path(config.data.encoded_dir))

    return command.run("maxdiff.data.encode", argv, action)


def settle(config: Config, task: Task, source: Source | EncodedSource) -> tuple[Source | EncodedSource, Task]:
    """(what to train from, the task that trains from it): with `cache_latents_text_encoder_outputs`, encoded first.

    Raises:
        ValueError: if what is encoded is not what the configuration asks for, with the reasons.
    """
    if config.data.cache_latents_text_encoder_outputs and not isinstance(source, EncodedSource):
        if not config.data.encoded_dir and bucket.is_bucket(config.run.output_dir):
            raise ValueError(f"encoded_dir is required: output_dir={config.run.output_dir!r} is in a bucket, and what is "
                             "encoded is read from a disk (allowed: a folder that all processes share)")  # fmt: skip
        folder = Path(config.data.encoded_dir) if config.data.encoded_dir else config.run.folder / "encoded"
        encode(config, task, source, folder)
        source = EncodedSource(folder)
    if not isinstance(source, EncodedSource):
        return source, task
    check_trains(config)
    check_text(config, source)
    wanted = made_of(config, task, _origin(config, source), text=source.has_text)
    if not config.data.random_flip:
        wanted["mirrored images"] = source.made_of["mirrored images"]  # which may be there, and are not used
    wanted["encoded_dtype"] = source.made_of["encoded_dtype"]
    if reasons := differences(source.made_of, wanted):
        raise ValueError(f"{source.folder} is not what the configuration asks for: {'; '.join(reasons)}; allowed: what is "
                         "encoded, or to encode again")  # fmt: skip
    return source, task.from_encoded(source.empty, config.data.resolution, text=source.has_text)


def _origin(config: Config, source: EncodedSource) -> str:
    """The fingerprint of the images that were encoded, as they are now; if they are gone, or elsewhere, as they were."""
    if not source.path or is_remote(source.path):
        return source.made_of["source"]
    form = {**source.form, "image_column": source.made_of["image_column"]}
    try:
        return inputs.open_path(
            dataclasses.replace(config, data=dataclasses.replace(config.data, **form)), source.path
        ).fingerprint()
    except FileNotFoundError:
        return source.made_of["source"]


def encode(config: Config, task: Task, source: Source, folder: Path) -> Pace:
    """Write all examples of a source into a folder: those shards that are not there yet; returns how fast it went.

    Raises:
        ValueError: for what cannot be encoded once, a folder of another encoding, or too many bad examples.
        OSError: if the folder cannot be written to.
    """
    started = time.perf_counter()
    check_encodes(config)
    text = _encodes_text_into(config, folder)
    contents = made_of(config, task, source.fingerprint(), text=text)
    shards = range(-(-len(source) // ROWS))
    if (folder / FINISHED).is_file():
        begin(folder, contents)
    missing = missing_shards(folder, shards)
    if (folder / FINISHED).is_file() and ((folder / EMPTY).is_file() or not text) and not missing:
        say(f"{folder} is encoded already")
        return Pace(0, "examples", started)
    if jax.process_index() == 0:
        begin(folder, contents)
    wait_for_all("encoding has begun")
    folder.mkdir(parents=True, exist_ok=True)
    check_shared(folder)
    # Each process encodes for itself, on its own devices: what places activations on the run's mesh is left out.
    alone = lambda network: network.with_compute(dataclasses.replace(network.compute, constrain=Compute().constrain))
    task = dataclasses.replace(task, networks={name: alone(network) for name, network in task.networks.items()})
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    sharding, weights = NamedSharding(mesh, PartitionSpec("data")), _here(task, mesh, text)
    if jax.process_index() == 0 and text:
        write_arrays(folder / EMPTY, _empty(config, task, weights))
    is_mine = lambda number: number % jax.process_count() == jax.process_index()
    mine, missing = list(filter(is_mine, shards)), list(filter(is_mine, missing))
    rows = lambda numbers: sum(min(len(source), (n + 1) * ROWS) - n * ROWS for n in numbers)
    pace = Pace(rows(missing), "examples", started)
    at_once = config.batch.per_device_batch_size * len(jax.local_devices())
    program = jax.jit(encoder(task, jnp.dtype(config.data.encoded_dtype), text=text), out_shardings=sharding)
    tokenizers = list(task.tokenizers.values()) if text else []
    batches = _batches(config, tokenizers, source, missing, at_once)
    with prefetch(batches, lambda batch: (batch[0], batch[1], jax.device_put(batch[2], sharding))) as ready:
        encoded = one_behind((examples, sizes, program(weights, images)) for examples, sizes, images in ready)
        for number in missing:
            parts: list[dict[str, np.ndarray]] = []
            loaded: list[Loaded] = []
            while len(loaded) < rows([number]):
                examples, sizes, arrays = next(encoded)
                parts.append({**_fetch(arrays, len(examples)), **sizes})
                loaded += examples
                pace.step(len(examples))
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            names = [(one.key, one.caption) if text else (one.key, *one.texts) for one in loaded]
            write_shard(folder, number, whole, names, text=text)
    pace.end("encoded", rows(mine) - rows(missing))
    wait_for_all("every shard is there")
    if jax.process_index() == 0:
        _finish(config, folder, contents, source)
    wait_for_all("encoded")
    return pace


def _finish(config: Config, folder: Path, contents: dict[str, Any], source: Source) -> None:
    """Say in the folder that it is whole, and of what it was made."""
    mix = source.mix if isinstance(source, Mixed) else None
    form = {key: getattr(config.data, key) for key in ("dataset_type", "train_split")}
    path = config.data.train_data_dir
    on_hub = config.data.dataset_type == "hf" and not Path(path).exists()
    if path and not is_remote(path) and not on_hub:
        path = os.path.abspath(path)  # to be found again from another working directory
    finish(folder, contents, len(source), path=path, form=form, mix=mix)
    say(f"wrote {folder}")


def encoder(
    task: Task, dtype: Any, *, text: bool
) -> Callable[[Mapping[str, Params], Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """encode(weights, batch) -> the arrays of each example, see encoded.py, its text's if `text`; pure, to be jitted."""
    vae = task.networks["vae"]

    def program(weights: Mapping[str, Params], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        found = {}
        for prefix in ("", "flip_"):
            if f"{prefix}image" in batch:
                latents = vae.apply(weights["vae"], from_uint8(batch[f"{prefix}image"]), method="encode")
                found |= {f"{prefix}mean": latents.mean, f"{prefix}logvar": latents.logvar}
        if text:
            found |= _texts(task.networks, weights, batch)
        return {name: x.astype(dtype) for name, x in found.items()}

    return program


def check_encodes(config: Config) -> None:
    """Raise ValueError for what differs from one time to the next, and so cannot be encoded once."""
    check_trains(config)
    if not config.data.center_crop:
        raise ValueError("center_crop=False cannot be encoded: every time another crop is trained on; allowed: true")


def check_trains(config: Config) -> None:
    """Raise ValueError for training that what is encoded cannot serve."""
    if config.data.aspect_ratio_buckets:
        raise ValueError("aspect_ratio_buckets=True cannot be encoded: what is encoded are squares; allowed: false")
    if config.model.train_vae:
        raise ValueError("train_vae=True cannot be trained from what it has encoded before; allowed: false, or images")


def check_text(config: Config, source: EncodedSource) -> None:
    """Raise ValueError for captions that are encoded where the text is to be another every time."""
    if source.has_text and (why := _text_differs(config)):
        raise ValueError(f"{why} cannot be trained from {source.folder}, where captions are encoded: the text is another every "
                         "time (allowed: to encode again, which then encodes images alone)")  # fmt: skip


def _encodes_text_into(config: Config, folder: Path) -> bool:
    """Whether captions are encoded; not into a folder of images alone, which serves captions that stay the same as well.

    Raises:
        ValueError: if captions are encoded there and must not be.
    """
    why, there = _text_differs(config), made_of_there(folder)
    if there is not None and why and LATENTS_ALONE not in there:
        raise ValueError(f"{folder} holds captions, encoded, and {why} wants images alone; allowed: another encoded_dir, or to "
                         "remove this one")  # fmt: skip
    if there is not None and LATENTS_ALONE in there and not why:
        why = f"{folder} holds images alone"
    if why:
        say(f"images alone are encoded, and captions are not: {why}")
    return not why


def encodes_text(config: Config) -> bool:
    """Whether an example's text states are always the same, and so encoded with its image."""
    return not _text_differs(config)


def _text_differs(config: Config) -> str:
    """The key and value for which they are not; "" if they are."""
    data = config.data
    if config.model.train_text_encoder:
        return "train_text_encoder=True"
    for key, off in (("shuffle_tags", False), ("tag_dropout", 0.0)):
        if (value := getattr(data, key)) != off:
            return f"{key}={value!r}"
    if data.caption_mode == "choose" and len(inputs.caption_columns(config).names) > 1:
        return f"caption_mode='choose' of caption_column={data.caption_column!r}"
    return ""


def made_of(config: Config, task: Task, source: str, *, text: bool) -> dict[str, Any]:
    """What decides an encoding's contents, name -> value: source, transform, weights.

    Args:
        text: whether captions are encoded too.
    """
    data = {key: getattr(config.data, key) for key in (*DECIDES, *(CAPTIONS if text else ()))}
    data |= {} if text else {LATENTS_ALONE: True}
    labels = inputs.caption_columns(config).labels
    frozen = {name: params for name, params in task.constants["frozen"].items() if text or name == "vae"}
    networks = {name: digest(task.networks[name].config.to_dict()) for name in frozen}
    weights = {f"{name}, its weights": fingerprint(frozen[name]) for name in frozen}
    words = {name: digest(tokenizer.contents()) for name, tokenizer in task.tokenizers.items() if text}
    return {
        **networks, **words, "activations_dtype": config.model.activations_dtype, "precision": config.model.precision,
        "source": source, **data, "idx_to_prompt": digest(labels) if labels else "", "mirrored images": config.data.random_flip,
        "encoded_dtype": config.data.encoded_dtype, **weights,
    }  # fmt: skip


def _here(task: Task, mesh: Mesh, text: bool) -> dict[str, Params]:
    """The frozen weights on this process's devices alone: each process encodes for itself."""
    whole = NamedSharding(mesh, PartitionSpec())
    own = lambda x: jax.device_put(x.addressable_data(0) if jax.process_count() > 1 else x, whole)
    names = [name for name in task.networks if name == "vae" or (text and name != "unet")]
    return {name: jax.tree.map(own, task.constants["frozen"][name]) for name in names}


def _texts(networks: Mapping[str, Network], weights: Mapping[str, Params], batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    states, pooled = encode_text(networks, weights, {name: batch[name] for name in TOKEN_NAMES if name in batch})
    return {"states": states} if pooled is None else {"states": states, "pooled": pooled}


def _empty(config: Config, task: Task, weights: Mapping[str, Params]) -> dict[str, np.ndarray]:
    """The text of no words."""
    ids = {name: tokenizer("") for name, tokenizer in zip(TOKEN_NAMES, task.tokenizers.values(), strict=False)}
    found = jax.jit(functools.partial(_texts, task.networks))(weights, ids)
    return {name: np.asarray(x.astype(config.data.encoded_dtype)) for name, x in found.items()}


def _fetch(found: Mapping[str, jax.Array], count: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(x)[:count] for name, x in found.items()}


def _batches(
    config: Config, tokenizers: Sequence[Any], source: Source, shards: Sequence[int], at_once: int
) -> Iterator[tuple[list[Loaded], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """(examples, their sizes, what the devices get) of these shards; the last of a shard is filled up with its last example.

    Raises:
        ValueError: past max_bad_fraction; bad examples are replaced as in training.
    """
    plan = inputs.make_plan(config)
    tally = BadTally(config.data.max_bad_fraction)
    with ThreadPoolExecutor(THREADS, "maxdiff-encode") as pool:
        for shard in shards:
            for first in range(shard * ROWS, min(len(source), (shard + 1) * ROWS), at_once):
                indexes = range(first, min(first + at_once, len(source), (shard + 1) * ROWS))
                examples, batch = _load(source, plan, tokenizers, indexes, at_once, pool)
                tally.add(len(examples), [example.bad[0] for example in examples if example.bad], min(MIN_SEEN, len(source)))
                sizes = {name: np.array([getattr(x.picture, name) for x in examples], np.int32) for name in SIZES}
                yield examples, sizes, batch


def _load(
    source: Source, plan: BatchPlan, tokenizers: Sequence[Any], indexes: range, at_once: int, pool: ThreadPoolExecutor
) -> tuple[list[Loaded], dict[str, np.ndarray]]:
    plans = [dataclasses.replace(plan, flip=flip) for flip in ([False, True] if plan.random_flip else [False])]
    ways = [list(pool.map(lambda i, plan=plan: load_example(source, plan, i, i), indexes)) for plan in plans]
    filled = [way + way[-1:] * (at_once - len(way)) for way in ways]
    names = ("image", "flip_image")
    batch = {name: np.stack([x.picture.image for x in way]) for name, way in zip(names, filled, strict=False)}
    for name, tokenizer in zip(TOKEN_NAMES, tokenizers, strict=False):
        batch[name] = tokenizer([x.caption for x in filled[0]])
    return ways[0], batch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
