"""Draw prompts with the weights of a run, or of any pipeline; what stands there already is not drawn again.

    python generate.py configs/base14.yml run_name=my_run output_dir=runs prompt="a red heart" [step=1000]
    python generate.py configs/base14.yml pretrained_model_name_or_path=FOLDER output_dir=images prompts_file=prompts.txt

Images go to the run's images/NAME/, where NAME is the run and the step, or to output_dir. Each is named after its prompt
and its seed, and carries all that it was made of: an image of the same name that was made in another way is kept.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from maxdiff import bucket, build, command
from maxdiff.checkpoint import Checkpoints, has_checkpoints
from maxdiff.config import Config, Run, Sampling, load_config
from maxdiff.data.pipeline import one_behind
from maxdiff.diffusion.sampler_config import sampler_config, sampler_name
from maxdiff.draw import check_given, cut_prompts, requests, usual_strength
from maxdiff.images import grid, image_size, read_image, read_mask, read_texts, write_png
from maxdiff.mirror import Mirror
from maxdiff.models.network import Network
from maxdiff.pace import Pace
from maxdiff.pipeline import WEIGHTS, Part, Pipeline
from maxdiff.processes import agreed, say, start, wait_for_all
from maxdiff.prompts import Wanted, wanted
from maxdiff.sharding import Layout
from maxdiff.task import make_compute, make_task

# As other tools spell them in a PNG's `parameters`.
SPELLED = {"ddpm": "DDPM", "ddim": "DDIM", "pndm": "PLMS", "euler": "Euler", "euler_ancestral": "Euler a", "heun": "Heun",
           "lms": "LMS", "dpmpp_2m": "DPM++ 2M", "dpmpp_2m_sde": "DPM++ 2M SDE", "unipc": "UniPC", "lcm": "LCM"}  # fmt: skip
SHEETS = "MaxDiff's contact sheet"
SHEET_FILE = "sheet.png"
SHEET = 100  # images at most on the contact sheet
WRITERS = 4  # threads that write PNGs


def main(argv: Sequence[str]) -> int:
    """The command line: as train.py's, and step=N for another checkpoint of a run than the latest."""
    rest, step = command.split_number(argv, "step")

    def action(config: Config) -> None:
        start(config.run)
        generate(of_run(config, rest), step())

    return command.run("generate.py", rest, action, command.STEP)


def of_run(config: Config, argv: Sequence[str]) -> Config:
    """A run's own configuration, as far as it says what the run is; where and on what it draws is said here."""
    saved = command.saved_config(config, argv)
    if saved is None:
        return config
    trained = vars(load_config(config.run.folder / "config.yml").model)
    for key, value in vars(saved.model).items():
        if value != trained[key] and (key.endswith("_path") or key in ("revision", "variant", "from_pt")):
            raise ValueError(f"{key}={value!r} is not for a run, whose own weights are drawn with (allowed: without run_name)")
    if not has_checkpoints(config.run.checkpoints) and any(argument.startswith("use_ema=") for argument in argv):
        raise ValueError(f"use_ema is of a checkpoint, and the run {config.run.place} has none; its pipeline/ is drawn with")
    # What is said of drawing in the file named here, or on the command line, goes before what the run was trained with.
    said = {key: value for key, value in vars(config.sampling).items() if value != getattr(Sampling(), key)}
    drawing = dataclasses.replace(saved.sampling, **said)
    return dataclasses.replace(saved, run=config.run, mesh=config.mesh, evaluation=config.evaluation, sampling=drawing)


def generate(config: Config, step: int | None = None) -> list[Path]:
    """Draw what the configuration asks for; returns the images' paths, in order.

    Args:
        step: the checkpoint of a run; by default its latest.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before anything is drawn.
    """
    run = config.run
    if bucket.is_bucket(run.place):
        bucket.check_writable(run.place)
    with Mirror(run, ["pipeline"] if run.run_name else []) as mirror:
        return _generate(config, step, mirror)


def _generate(config: Config, step: int | None, mirror: Mirror) -> list[Path]:
    started, run = time.perf_counter(), config.run
    images = wanted(config.sampling, config.run.seed)
    build.use_cache(config)
    layout = build.layout_of(config)
    pipeline, model = load(config, layout, step)
    networks = {name: part.network for name, part in pipeline.networks()}
    strength = _strength(config, networks, images)
    draw = build.make_draw(config, networks, pipeline.scheduler, strength)
    where = f"images/{model}" if run.run_name else ""
    folder = run.folder / where
    folder.mkdir(parents=True, exist_ok=True)
    texts = _texts(config, pipeline, images, model, strength)
    if jax.process_index() == 0:
        mirror.fetch_files(where, {SHEET_FILE, *(image.file for image in images)})
    missing = _missing(config, folder, images, texts)
    _tell_cut(pipeline, images)

    # One program, for as many images as the devices take at once, and no more than there are.
    shards = build.batch_shards(layout.mesh)
    at_once = min(config.batch.per_device_batch_size, max(1, -(-len(missing) // shards))) * shards
    weights = {name: part.params for name, part in pipeline.networks()}
    program = jax.jit(build.drawing_on(layout, networks, draw))
    pace = Pace(len(missing), "images", started)
    with ThreadPoolExecutor(WRITERS) as writers:
        writing: list[Future[None]] = []
        batches = _batches(config, layout, pipeline, images, missing, at_once, strength)
        for rows, drawn in one_behind((rows, program(weights, {}, request)) for rows, request in batches):
            for at, image in _own(drawn):
                if at < len(rows):
                    writing.append(writers.submit(write_png, folder / images[rows[at]].file, image, texts[rows[at]]))
            pace.step(len(rows))
            while len(writing) > 4 * at_once:
                writing.pop(0).result()
        for future in writing:
            future.result()
    mirror.upload()
    wait_for_all("drawn")
    pace.end("drawn", len(images) - len(missing))
    if jax.process_index() == 0:
        mirror.fetch_files(where, {image.file for image in images[:SHEET]})  # what other processes have drawn
    _show(run, folder, [folder / image.file for image in images])
    return [run.shown(folder / image.file) for image in images]


def load(config: Config, layout: Layout, step: int | None) -> tuple[Pipeline, str]:
    """The pipeline to draw with, on the mesh, and what it is called.

    1. A run's checkpoint: its average weights, unless use_ema=false.
    2. A run's pipeline/, if it has no checkpoint (any more).
    3. pretrained_model_name_or_path and the sources of parts.

    Raises:
        FileNotFoundError, ValueError: if there is nothing of the kind, or it cannot be read.
    """
    run, model = config.run, config.model
    if run.run_name and has_checkpoints(run.checkpoints):
        return _of_checkpoint(config, layout, step)
    if run.run_name:
        whole = (run.folder / "pipeline" / "unet" / f"{WEIGHTS['unet']}.safetensors").is_file()
        if step is not None or not whole:
            raise FileNotFoundError(f"the run {run.place} has no checkpoint" + ("" if step is None else f" step={step}"))
    elif step is not None:
        raise ValueError(f"step={step} is of a run (run_name and output_dir are required)")
    source = str(run.folder / "pipeline") if run.run_name else model.pretrained_model_name_or_path
    if not source and not (model.sources or model.new):
        raise ValueError("run_name and output_dir, or pretrained_model_name_or_path, is required")
    own: dict[str, Any] = {} if run.run_name else {
        "revision": model.revision or None, "variant": model.variant or None, "from_pt": model.from_pt,
        "sources": model.sources, "new": model.new, "seed": run.seed,
    }  # fmt: skip
    pipeline = Pipeline.load(
        source,
        prediction_type=config.objective.prediction_type or None,
        dtype=jnp.dtype(model.weights_dtype),
        compute=make_compute(config, layout),
        placement=layout.place,
        **own,
    )
    # All that it was put together from: of another part, other images.
    parts = [f"{part}={path}" for part, path in {**own.get("sources", {}), **own.get("new", {})}.items()]
    return pipeline, run.run_name or ", ".join([str(source), *parts])


def _of_checkpoint(config: Config, layout: Layout, step: int | None) -> tuple[Pipeline, str]:
    if config.model.train_vae:
        raise ValueError(f"the run {config.run.place} trains an autoencoder, which draws nothing")
    if not (config.run.folder / "pipeline").is_dir():
        raise FileNotFoundError(f"the run {config.run.place} has lost its pipeline/, which holds what is not trained")
    with Checkpoints(config.run.checkpoints, read_only=True) as checkpoints:
        step = checkpoints.steps()[-1] if step is None else step
        task = make_task(config, layout, config.run.folder / "pipeline")
        whole = build.abstract_of(config, layout, task, build.make_adam(config, build.make_rates(config, task)))
        average = config.optimizer.use_ema
        # Laid as the parameters are, whatever shard_optimizer says: here nothing is updated.
        lay: Any = lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)
        part: Any = dataclasses.replace(
            jax.tree.map(lambda _: None, whole),
            **({"ema": jax.tree.map(lay, whole.ema, whole.params)} if average else {"params": whole.params}),
        )
        state = checkpoints.restore(step, part, part=True)
    pipeline = task.pipeline(state.ema if average else state.params)
    # Those that training keeps whole on every device are split too, and not kept as they were.
    placed: Any = {name: Part(part.network, jax.device_put(part.params, layout.shardings(part.network)))
                   for name, part in pipeline.networks()}  # fmt: skip
    name = f"{config.run.run_name}-{step}"
    return dataclasses.replace(pipeline, **placed), name if average else f"{name}-without-average"


def _strength(config: Config, networks: Mapping[str, Network], images: Sequence[Wanted]) -> float | None:
    """The share of the steps that is made of images that begin with one; None where none does."""
    of_image, of_mask = (sum(bool(getattr(image, key)) for image in images) for key in ("image", "mask"))
    for key, count in (("image", of_image), ("mask", of_mask)):
        if count not in (0, len(images)):
            raise ValueError(f"{key} is given for {count} of {len(images)} images; allowed: for all or none")
    check_given(networks, image=bool(of_image), mask=bool(of_mask))
    if not of_image:
        if config.sampling.strength != -1:
            raise ValueError(f"strength={config.sampling.strength} is of a change of an image, and none is given")
        return None
    drawn = build.draw_config(config)
    for path in sorted({path for image in images for path in (image.image, image.mask) if path}):
        width, height = image_size(path)
        if (width, height) != (drawn.width, drawn.height):
            say(f"{path} is {width}x{height}: its middle is drawn, at {drawn.width}x{drawn.height} (keys width and height)")
    given = config.sampling.strength
    return usual_strength(networks) if given == -1 else given


def _texts(
    config: Config, pipeline: Pipeline, images: Sequence[Wanted], model: str, strength: float | None
) -> list[dict[str, str]]:
    """What each PNG says of itself: all that decides its pixels, and what other tools read in `parameters`."""
    drawn, scheduler = build.draw_config(config, strength), build.sampler_keys(config, pipeline.scheduler)
    sampler = drawn.sampler or sampler_name(scheduler)
    common = {
        "sampler": sampler, "steps": str(drawn.num_inference_steps), "guidance_scale": str(drawn.guidance_scale),
        "model": model, "size": f"{drawn.width}x{drawn.height}", "scheduler": json.dumps(scheduler, sort_keys=True),
        "weights_dtype": config.model.weights_dtype, "activations_dtype": config.model.activations_dtype,
    }  # fmt: skip
    usual = {"guidance_rescale": drawn.guidance_rescale, "eta": drawn.eta, "clip_skip": drawn.clip_skip,
             "strength": strength or "", "revision": config.model.revision, "variant": config.model.variant,
             "precision": config.model.precision.removeprefix("DEFAULT"),
             "seed_of_weights": str(config.run.seed) if config.model.new and not config.run.run_name else ""}  # fmt: skip
    common |= {key: str(value) for key, value in usual.items() if value}
    spelled = SPELLED[sampler] + (" Karras" if sampler_config(scheduler, sampler).use_karras_sigmas else "")
    named = {"Steps": common["steps"], "Sampler": spelled, "CFG scale": f"{drawn.guidance_scale:g}"}
    more = {"Size": common["size"], "Model": Path(model.partition(",")[0]).name.removesuffix(".safetensors")}
    more |= {"Denoising strength": f"{strength:g}"} if strength is not None else {}
    # There it counts the layers from the end, from 1.
    more |= {"Clip skip": str(drawn.clip_skip + 1)} if drawn.clip_skip else {}
    # Other contents of the same file are another image to begin with.
    files = {path: f"{path} {_fingerprint(path)}" for image in images for path in (image.image, image.mask) if path}
    texts = []
    for image in images:
        lines = [image.prompt, *([f"Negative prompt: {image.negative_prompt}"] if image.negative_prompt else [])]
        last = ", ".join(f"{key}: {value}" for key, value in {**named, "Seed": str(image.seed), **more}.items())
        own = {"prompt": image.prompt, "negative_prompt": image.negative_prompt, "seed": str(image.seed)}
        own |= {key: files[path] for key, path in (("image", image.image), ("mask", image.mask)) if path}
        texts.append({"parameters": "\n".join([*lines, last]), **own, **common})
    return texts


def _fingerprint(path: str) -> str:
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]


def _missing(config: Config, folder: Path, images: Sequence[Wanted], texts: Sequence[Mapping[str, str]]) -> list[int]:
    """Which images are not there yet, made of just this; the first process looks.

    Raises:
        ValueError: if another stands in the place of one, unless it may be overwritten.
    """
    there, others = np.zeros(len(images), np.int8), {}
    if jax.process_index() == 0:
        for i, (image, text) in enumerate(zip(images, texts, strict=True)):
            found = read_texts(folder / image.file)
            if found is not None and found != text:
                others[i] = [key for key in text if key != "parameters" and found.get(key) != text[key]]
            there[i] = 2 if i in others else found is not None
    there = agreed(there)
    if (there == 2).any() and not config.sampling.overwrite:
        i = int(np.flatnonzero(there == 2)[0])
        differ = f" (differs in {', '.join(others[i])})" if i in others else ""
        raise ValueError(f"{config.run.shown(folder / images[i].file)} was made in another way{differ}; allowed: another "
                         "output_dir, or overwrite=true")  # fmt: skip
    return np.flatnonzero(there != 1).tolist()


def _tell_cut(pipeline: Pipeline, images: Sequence[Wanted]) -> None:
    """Say which prompts are too long to be read whole."""
    long = list(cut_prompts(pipeline.tokenizer, (text for x in images for text in (x.prompt, x.negative_prompt))))
    for sentence in long[:3]:
        say(sentence)
    if len(long) > 3:
        say(f"{len(long) - 3} other prompts are cut too")


def _batches(config: Config, layout: Layout, pipeline: Pipeline, images: Sequence[Wanted], missing: Sequence[int], at_once: int,
             strength: float | None) -> Iterator[tuple[list[int], dict[str, jax.Array]]]:  # fmt: skip
    """(numbers of the images, their request on the devices); the last request is filled up with its last image."""
    drawn = build.draw_config(config, strength)
    for first in range(0, len(missing), at_once):
        rows = list(missing[first : first + at_once])
        some = [images[i] for i in rows + rows[-1:] * (at_once - len(rows))]
        request = requests(pipeline, [x.prompt for x in some], [x.negative_prompt for x in some], seeds=[x.seed for x in some])
        if strength is not None:
            request["image"] = np.stack([read_image(x.image, drawn.height, drawn.width) for x in some])
        if some[0].mask:
            request["mask"] = np.stack([read_mask(x.mask, drawn.height, drawn.width) for x in some])
        yield rows, build.whole_request(layout.mesh, request)


def _own(drawn: jax.Array) -> Iterator[tuple[int, np.ndarray]]:
    """(row, image uint8 [h w 3]) of the rows that this process has, and has first."""
    for shard in drawn.addressable_shards:
        if shard.replica_id == 0:
            yield from enumerate(np.asarray(shard.data), shard.index[0].start or 0)


def _show(run: Run, folder: Path, paths: Sequence[Path]) -> None:
    """Say where they are and, of several, make a contact sheet."""
    if jax.process_index() or len(paths) == 1:
        say(f"wrote {run.shown(paths[0])}")
        return
    shown = paths[:SHEET]
    images = []
    for path in shown:
        with Image.open(path) as image:
            images.append(np.asarray(image.convert("RGB")))
    sheet = folder / SHEET_FILE
    # One that is not ours is left alone.
    if sheet.exists() and (read_texts(sheet) or {}).get("Software") != SHEETS:
        say(f"wrote {run.shown(folder)}, without a sheet, as {run.shown(sheet)} is not of these images")
        return
    write_png(sheet, grid(np.stack(images)), {"Software": SHEETS})
    say(f"wrote {run.shown(folder)}; {len(shown)} of {len(paths)} are on {run.shown(sheet)}")
