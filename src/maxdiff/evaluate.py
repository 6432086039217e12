"""Judge a model: pictures drawn from held-out captions beside the held-out pictures, and its loss at each level of noise.

    python -m maxdiff.evaluate configs/base15.yml run_name=my_run output_dir=runs [step=1000] [--follow] [key=value ...]
    python -m maxdiff.evaluate configs/base15.yml pretrained_model_name_or_path=FOLDER output_dir=judged eval_data_dir=...

The first eval_examples of eval_data_dir are compared with eval_images drawings from their captions, at each of
eval_guidance_scales, by the features of a network: Inception, where inception_path has its published weights, and else
EfficientNet-Lite0. With Inception's the distances are FID and KID; with another network's they are called what they are, and
are comparable with themselves alone. Where clip_path names a CLIP model, how well pictures fit captions is measured too.

Results go to the run's evaluation/ (or that of output_dir): a JSON file and pictures for each model, a table and a plot of all
that was measured in one way. What stands there is not measured again. With --follow a run that is still training is judged at
each of its checkpoints, until its last. docs/QUALITY.md says what the measures mean.
"""

import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from maxdiff import build, command, features, inputs, report
from maxdiff.checkpoint import DamagedCheckpoint, saved_steps
from maxdiff.checksums import digest, fingerprint
from maxdiff.config import Config, Evaluation
from maxdiff.features import CLIPEmbedder, FeatureNetwork
from maxdiff.generate import load, of_run
from maxdiff.images import grid, write_png
from maxdiff.measure import (
    SHOWN,
    Captioned,
    Programs,
    Reference,
    look,
    losses_by_timestep,
    make_drawings,
    make_programs,
    make_reference,
    timesteps,
)
from maxdiff.mirror import Mirror
from maxdiff.pace import Pace
from maxdiff.peers import Peers
from maxdiff.pipeline import Pipeline
from maxdiff.processes import agree, agreed_json, say, start
from maxdiff.quality import NEIGHBOURS, Statistics, frechet_distance, kernel_distance, precision_and_recall
from maxdiff.weights.tensors import write_atomically, write_json

PROGRAM = "python -m maxdiff.evaluate"
FOLLOW = "--follow"
FOLDER, TABLE, PLOT = "evaluation", "report.md", "plot.png"
WAIT_SECONDS = 10.0  # between two looks for another checkpoint
# Keys of drawing that results depend on, beside the model, the captions and the guidance scale.
DRAWN = ("negative_prompt", "sampler", "num_inference_steps", "guidance_rescale", "eta", "timestep_spacing",
         "use_karras_sigmas", "clip_skip")  # fmt: skip
INSTALL = "pip install 'maxdiff[plot]'"


def main(argv: Sequence[str]) -> int:
    """The command line: as generate.py's, and --follow."""
    follows = FOLLOW in argv
    rest, step = command.split_number([argument for argument in argv if argument != FOLLOW], "step")

    def action(config: Config) -> None:
        start(config.run)
        # Of several processes one that fails takes the others along: they would wait for it.
        with Peers(lambda: f"evaluating {config.run.place}", config.safety.lost_process_seconds, PROGRAM):
            if follows:
                if not config.run.run_name or step() is not None:
                    raise ValueError(f"{FOLLOW} is for all checkpoints of a run (run_name and output_dir, without step)")
                follow(of_run(config, rest))
            else:
                evaluate(of_run(config, rest), step())

    return command.run(PROGRAM, rest, action, f"{command.STEP} [{FOLLOW}]")


def evaluate(config: Config, step: int | None = None) -> dict[str, Any]:
    """Measure a model, say what was found, and keep it; returns it, as `Evaluator.measure` does.

    Args:
        step: the checkpoint of a run; by default its latest.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before anything is drawn.
    """
    with _mirror(config):
        evaluator = Evaluator(config)
        if step is None and config.run.run_name:
            steps = _steps(config)
            step = steps[-1] if steps else None
        found = evaluator.measure(step)
        evaluator.report(found)
    return found


def follow(config: Config, wait: Callable[[float], None] = time.sleep) -> None:
    """Measure each checkpoint of a run, the oldest first, as they come; ends with that of the run's last step.

    A checkpoint that the run has let go of before it was read, or that is damaged, is passed over.

    Raises:
        ValueError, OSError: as `evaluate`; FileNotFoundError if there is no such run.
    """
    if not agree((config.run.folder / "config.yml").is_file()):
        raise FileNotFoundError(f"there is no run in {config.run.place} (allowed with {FOLLOW}: one that has begun)")
    last, seen, waiting = config.batch.steps(config.batch.global_batch_size), set[int](), False
    with _mirror(config):
        evaluator = Evaluator(config)
        while not any(step >= last for step in seen):
            new = [step for step in _steps(config) if step not in seen]
            if not new:
                if not waiting:
                    say(f"waiting for another checkpoint of {config.run.place}, whose last is that of step {last}")
                waiting = True
                wait(WAIT_SECONDS)
                continue
            waiting = False
            seen.add(new[0])
            try:
                found = evaluator.measure(new[0])
            except (FileNotFoundError, DamagedCheckpoint) as error:
                if isinstance(error, FileNotFoundError) and new[0] in _steps(config):
                    raise  # something else is missing
                say(f"step {new[0]} is passed over: {error}")
                continue
            evaluator.report(found)


def _mirror(config: Config) -> Mirror:
    check(config)
    build.make_folder(config)
    return Mirror(config.run, [FOLDER, *(["pipeline"] if config.run.run_name else [])], uploads=jax.process_index() == 0)


def _steps(config: Config) -> list[int]:
    """The checkpoints that the first process sees: all go by them."""
    return agreed_json(lambda: saved_steps(config.run.checkpoints))


def check(config: Config) -> None:
    """Raise ValueError for a configuration that cannot be evaluated with, naming key, value and what is allowed."""
    build.require(config, "output_dir", "eval_data_dir")
    if config.model.train_vae:
        raise ValueError("train_vae=True: a run that trains an autoencoder draws nothing (allowed: false)")
    side, least = config.data.resolution, NEIGHBOURS + 1
    for key, value, off in (("height", config.sampling.height, 0), ("width", config.sampling.width, 0)):
        if value not in (off, side):
            raise ValueError(f"{key}={value}: drawings are compared with squares of resolution={side} (allowed: 0, {side})")
    examples, images = config.data.eval_examples, config.evaluation.eval_images
    why = f"precision and recall look at the {NEIGHBOURS} nearest of each"
    if examples < least:
        raise ValueError(f"eval_examples={examples} is too few to evaluate with: {why} (allowed: {least} or more)")
    if images and images < least:
        raise ValueError(f"eval_images={images} is too few: {why} (allowed: 0, or {least} or more)")


def open_networks(section: Evaluation) -> tuple[FeatureNetwork, CLIPEmbedder | None]:
    """What pictures are looked at with; raises ValueError, naming the key, for whatever is not there or cannot be read."""
    if section.inception_path:
        network = _named("inception_path", section.inception_path, features.inception)
    else:
        network = _named("inception_path", "", lambda _: features.efficientnet())
        say("features are EfficientNet-Lite0's: distances are no FID, and comparable with themselves alone "
            "(key inception_path: Inception's published weights)")  # fmt: skip
    return network, _named("clip_path", section.clip_path, features.clip) if section.clip_path else None


def _named(key: str, value: str, opened: Callable[[str], Any]) -> Any:
    try:
        return opened(value)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{key}={value!r}: {error}") from error


class Evaluator:
    """Measures models in one way; the checkpoints of a run share what is compiled.

    With several processes all draw and measure losses, and the first alone looks at drawings, reads and writes. Every process
    calls every method.

    Raises:
        ValueError, OSError: for networks or held-out pictures that cannot be read.
    """

    def __init__(self, config: Config):
        self._config, self._first = config, jax.process_index() == 0
        build.use_cache(config)
        self._layout = build.layout_of(config)
        self._networks = open_networks(config.evaluation) if self._first else None
        self._source = inputs.open_examples(config, "eval_data_dir")
        if len(self._source) <= NEIGHBOURS:
            raise ValueError(f"eval_data_dir={config.data.eval_data_dir!r} has {len(self._source)} pictures, which are too few "
                             f"(allowed: {NEIGHBOURS + 1} or more)")  # fmt: skip
        seen = self._source.fingerprint()
        if not agree(seen == agreed_json(lambda: seen)):
            raise ValueError("eval_data_dir: processes see different data (allowed: the same on every host)")
        self._programs: Programs | None = None
        self._folder = config.run.folder / FOLDER

    @functools.cached_property
    def _reference(self) -> Reference:
        """On the first process alone."""
        assert self._networks is not None
        return make_reference(self._config, self._source, self._networks[0], self._folder)

    def measure(self, step: int | None) -> dict[str, Any]:
        """What there is to say of a model, and is kept in a file: as far as it is there, it is not measured again.

        Args:
            step: the checkpoint of a run; None for a pipeline.

        Returns:
            model: its name; step; weights: a fingerprint of all that it is made of.
            settings: all else that results depend on, see `_settings`.
            losses: timestep, as a string -> the mean held-out loss there.
            drawn: for each guidance scale guidance_scale, images, frechet_distance, kernel_distance, kernel_spread, precision,
                recall and, with CLIP, clip_score.

        Raises:
            FileNotFoundError, ValueError: as `generate.load`.
        """
        config = self._config
        pipeline, model = load(config, self._layout, step)
        if self._programs is None:
            self._programs = make_programs(config, self._layout, pipeline, guidance_scales(config))
        programs, weights = self._programs, fingerprint_of(pipeline)
        found = agreed_json(lambda: self._begun(model, step, weights))
        times = timesteps(programs.num_timesteps, config.evaluation.eval_timesteps)
        missing = [t for t in times if str(t) not in found["losses"]]
        there = {row["guidance_scale"] for row in found["drawn"]}
        scales = [scale for scale in guidance_scales(config) if scale not in there]
        if not missing and not scales:
            say(f"{config.run.shown(self._path(found))} is there already")
        if missing:
            key = build.run_key(config, self._layout.mesh)
            losses = losses_by_timestep(config, self._layout, programs, pipeline, self._source, key, missing)
            say(f"{model}: held-out losses measured at {len(missing)} timesteps")
            found["losses"] |= {str(t): loss for t, loss in losses.items()}
            found["losses"] = dict(sorted(found["losses"].items(), key=lambda item: int(item[0])))
            self._keep(found)
        captions = agreed_json(lambda: wanted(config, self._reference.captions)) if scales else []
        for scale in scales:
            started = time.perf_counter()
            drawings = make_drawings(config, self._layout, programs.drawings[scale], pipeline, captions)
            paced = _paced(drawings, Pace(len(captions), "images", started), f"of {model} drawn at guidance_scale={scale:g}")
            row = self._look(found, scale, captions, paced) if self._first else _drained(paced)
            row = agreed_json(lambda row=row: row)
            found["drawn"] = sorted([*found["drawn"], row], key=lambda row: row["guidance_scale"])
            self._keep(found)
        return found

    def report(self, found: dict[str, Any]) -> None:
        """Print and keep a table of all models that were measured as this one was, and plot them."""
        if not self._first:
            return
        shown = self._config.run.shown
        alike = [one for one in results(self._folder) if one["settings"] == found["settings"]]
        text = report.table(alike)
        write_atomically(self._folder / TABLE, [f"{text}\n".encode()])
        say(f"\n{text}\n\nwrote {shown(self._folder / TABLE)}")
        image = report.plot(alike)
        if image is None:
            say(f"there is no plot without matplotlib ({INSTALL})")
        else:
            write_atomically(self._folder / PLOT, [image])
            say(f"wrote {shown(self._folder / PLOT)}")

    def _begun(self, model: str, step: int | None, weights: str) -> dict[str, Any]:
        """What is kept of a model, or what it begins with."""
        found = {"model": model, "step": step, "weights": weights, "settings": self._settings(), "losses": {}, "drawn": []}
        return read(path) if (path := self._path(found)).is_file() else found

    def _settings(self) -> dict[str, Any]:
        config, reference = self._config, self._reference
        assert self._networks is not None
        network, clip = self._networks
        captions = wanted(config, reference.captions)
        return {
            "features": {"name": network.name, "is_inception": network.is_inception, "fingerprint": network.fingerprint},
            "clip": clip and clip.fingerprint, "reference": reference.fingerprint, "examples": len(reference.captions),
            "images": len(captions), "resolution": config.data.resolution, "seed": config.run.seed,
            **{key: getattr(config.sampling, key) for key in DRAWN},
            "rescale_zero_terminal_snr": config.objective.rescale_zero_terminal_snr,
            "activations_dtype": config.model.activations_dtype, "precision": config.model.precision,
        }  # fmt: skip

    def _path(self, found: dict[str, Any]) -> Path:
        """Another model of the same name, and other settings, have files of their own."""
        name = re.sub(r"[^\w.-]+", "-", found["model"]).strip("-.")[-80:]
        return self._folder / f"{name}-{digest([found['weights'], found['settings']])[:8]}.json"

    def _keep(self, found: dict[str, Any]) -> None:
        if self._first:
            write_json(self._path(found), found)

    def _look(
        self, found: dict[str, Any], scale: float, captions: Sequence[str], drawings: Iterator[Captioned]
    ) -> dict[str, Any]:
        """What is measured of drawings; the first of them are kept as a picture."""
        assert self._networks is not None
        seen, real = look(drawings, *self._networks), self._reference.features
        path = self._path(found)
        write_png(path.with_name(f"{path.stem}-guidance-{scale:g}.png"), grid(seen.first),
                  {"prompts": "\n".join(captions[:SHOWN]), "guidance_scale": f"{scale:g}"})  # fmt: skip
        kernel, spread = kernel_distance(real, seen.features)
        precision, recall = precision_and_recall(real, seen.features)
        row = {"guidance_scale": scale, "images": len(captions),
               "frechet_distance": frechet_distance(Statistics.of(real), Statistics.of(seen.features)),
               "kernel_distance": kernel, "kernel_spread": spread, "precision": precision, "recall": recall}  # fmt: skip
        return row if seen.scores is None else {**row, "clip_score": float(seen.scores.mean())}


def _paced(drawings: Iterator[Captioned], pace: Pace, verb: str) -> Iterator[Captioned]:
    for some in drawings:
        pace.step(len(some[1]))
        yield some
    pace.end(verb, 0)


def _drained(drawings: Iterator[Captioned]) -> None:
    """What other processes do, without which the first cannot draw."""
    for _ in drawings:
        pass


def fingerprint_of(pipeline: Pipeline) -> str:
    """16 hexadecimal digits that stand for a pipeline: weights, architectures, noise schedule and tokenizers."""
    networks = {name: [dataclasses.asdict(part.network.config), fingerprint(part.params)] for name, part in pipeline.networks()}
    words = [one.contents() for one in (pipeline.tokenizer, pipeline.tokenizer_2) if one is not None]
    scheduler = {key: value for key, value in pipeline.scheduler.items() if key != "_diffusers_version"}
    return digest([networks, words, scheduler, pipeline.index.get("force_zeros_for_empty_prompt", True)])


def guidance_scales(config: Config) -> tuple[float, ...]:
    """Those at which is drawn."""
    return tuple(map(float, config.evaluation.eval_guidance_scales or (config.sampling.guidance_scale,)))


def wanted(config: Config, captions: Sequence[str]) -> list[str]:
    """What each drawing is of: the held-out captions in turn."""
    return [captions[i % len(captions)] for i in range(config.evaluation.eval_images or len(captions))]


def results(folder: Path) -> list[dict[str, Any]]:
    """What was measured of each model, in order of names and steps; raises ValueError for a file that is none of these."""
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda one: (one["step"] or 0, one["model"]))


def read(path: Path) -> dict[str, Any]:
    """A file of results; raises ValueError for another."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not {"model", "step", "weights", "settings", "losses", "drawn"} <= found.keys():
            raise ValueError("keys are missing")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no results ({error}); allowed: what {PROGRAM} wrote, or no file") from error
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
