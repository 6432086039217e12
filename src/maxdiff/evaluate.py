"""Judge a model: pictures drawn from held-out captions beside the held-out pictures, and its loss at each level of noise.

    python -m maxdiff.evaluate configs/base15.yml run_name=my_run output_dir=runs [step=1000] [--follow] [key=value ...]
    python -m maxdiff.evaluate configs/base15.yml pretrained_model_name_or_path=FOLDER output_dir=judged eval_data_dir=...

The first eval_examples of eval_data_dir are compared with eval_images drawings from their captions, at each of
eval_guidance_scales, by the features of a network: Inception, where inception_path has its published weights, and else
EfficientNet-Lite0. With Inception's the distances are FID and KID; with another network's they are called what they are, and are
comparable with themselves alone. Where clip_path names a CLIP model, how well pictures fit their captions is measured too.

Results go to the run's evaluation/ (or that of output_dir): a JSON file and pictures for each model, and a plot of all. What
stands there, measured in the same way, is not measured again. With --follow a run that is still training is judged at each of its
checkpoints, until its last.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxdiff import build, command, features, inputs
from maxdiff.checkpoint import Checkpoints
from maxdiff.config import Config
from maxdiff.data.examples import Source
from maxdiff.features import Clip, FeatureNetwork
from maxdiff.generate import load, of_run
from maxdiff.images import grid, write_png
from maxdiff.measure import Reference, losses_by_timestep, make_drawings, make_reference
from maxdiff.pace import Pace
from maxdiff.pipeline import Pipeline
from maxdiff.processes import say, start
from maxdiff.quality import Statistics, frechet_distance, kernel_distance, precision_and_recall
from maxdiff.sharding import Layout
from maxdiff.weights.tensors import write_json

PROGRAM = "python -m maxdiff.evaluate"
FOLDER, PLOT = "evaluation", "plot.png"
SHOWN = 64  # drawings on a picture
WAIT_SECONDS = 10.0  # between two looks for another checkpoint
# What a line of the table has, and what it is called where features are Inception's.
MEASURES = {"frechet_distance": "FID", "kernel_distance": "KID", "kernel_spread": "KID spread", "precision": "precision",
            "recall": "recall", "clip_score": "CLIP score"}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """The command line: as generate.py's, and --follow."""
    follows = "--follow" in argv
    rest, step = command.split_number([argument for argument in argv if argument != "--follow"], "step")

    def action(config: Config) -> None:
        start(config.run)
        config = of_run(config, rest)
        if follows:
            if not config.run.run_name or step() is not None:
                raise ValueError("--follow is for all checkpoints of a run (run_name and output_dir, without step)")
            follow(config)
        else:
            evaluate(config, step())

    return command.run(PROGRAM, rest, action)


@dataclasses.dataclass(frozen=True)
class Eyes:
    """What pictures are looked at with: a feature network, what it sees of the real ones, and CLIP, if it is wanted."""

    network: FeatureNetwork
    source: Source
    reference: Reference
    clip: Clip | None


def evaluate(config: Config, step: int | None = None) -> dict[str, Any]:
    """Measure a model, say what was found, and keep it; returns it.

    Args:
        step: the checkpoint of a run; by default its latest.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before anything is drawn.
    """
    layout = build.layout_of(config)
    eyes = open_eyes(config)
    found = _measured(config, layout, eyes, step)
    _show(config, eyes.network)
    return found


def follow(config: Config, wait: Callable[[float], None] = time.sleep) -> None:
    """Measure each checkpoint of a run, the oldest first, as they come; ends with that of the run's last step."""
    layout, eyes = build.layout_of(config), open_eyes(config)
    last, seen = config.batch.steps(config.batch.global_batch_size), set[int]()
    waiting = False
    while last not in seen:
        with Checkpoints(config.run.checkpoints, read_only=True) as checkpoints:
            new = [step for step in checkpoints.steps() if step not in seen]
        if not new:
            if not waiting:
                say(f"waiting for another checkpoint of {config.run.place}, the last of which is step {last}")
            waiting = True
            wait(WAIT_SECONDS)
            continue
        waiting = False
        seen.add(new[0])
        try:
            _measured(config, layout, eyes, new[0])
        except FileNotFoundError as error:  # a checkpoint that has been let go of meanwhile
            say(f"step {new[0]} is passed over: {error}")
        _show(config, eyes.network)


def open_eyes(config: Config) -> Eyes:
    """The networks and the held-out pictures that the configuration names; raises ValueError and OSError for what is wrong."""
    build.require(config, "eval_data_dir")
    section = config.evaluation
    if section.inception_path:
        network = features.inception(section.inception_path)
    else:
        network = features.efficientnet()
        say("features are EfficientNet-Lite0's: distances are no FID, and comparable with themselves alone "
            "(key inception_path: Inception's published weights)")  # fmt: skip
    clip = features.clip(section.clip_path) if section.clip_path else None
    build.use_cache(config)
    source = inputs.open_examples(config, "eval_data_dir")
    folder = place(config)
    folder.mkdir(parents=True, exist_ok=True)
    return Eyes(network, source, make_reference(config, source, network, folder), clip)


def place(config: Config) -> Path:
    """Where results are."""
    return config.run.folder / FOLDER


def _measured(config: Config, layout: Layout, eyes: Eyes, step: int | None) -> dict[str, Any]:
    """What is measured of a model; from its file, if it is there."""
    pipeline, model = load(config, layout, step)
    settings = _settings(config, eyes, pipeline)
    path = place(config) / f"{model.replace('/', '-')}.json"
    if path.is_file() and (kept := json.loads(path.read_text(encoding="utf-8")))["settings"] == settings:
        say(f"{config.run.shown(path)} is there already")
        return kept
    key = build.run_key(config, layout.mesh)
    losses = losses_by_timestep(config, layout, pipeline, eyes.source, key)
    scales = guidance_scales(config)
    rows = [
        _drawn(config, layout, pipeline, eyes, scale, path.with_name(f"{path.stem}-guidance-{scale:g}.png")) for scale in scales
    ]
    number = model.rpartition("-")[2] if config.run.run_name else ""
    found = {"model": model, "step": int(number) if number.isdigit() else None, "network": eyes.network.name,
             "settings": settings, "losses": {str(t): loss for t, loss in losses.items()}, "drawn": rows}  # fmt: skip
    if jax.process_index() == 0:
        write_json(path, found)
    return found


def _settings(config: Config, eyes: Eyes, pipeline: Pipeline) -> dict[str, Any]:
    """All that results depend on, besides the model."""
    drawn, section = dataclasses.asdict(build.draw_config(config)), config.evaluation
    del drawn["guidance_scale"], drawn["vae_slicing"]
    return json.loads(json.dumps({
        "features": eyes.network.fingerprint, "clip": section.clip_path, "source": eyes.source.fingerprint(), "seed": config.run.seed,
        "examples": len(eyes.reference.features), "images": len(wanted(config, eyes.reference.captions)),
        "guidance_scales": guidance_scales(config), "timesteps": section.eval_timesteps,
        "drawn": drawn, "scheduler": build.sampler_keys(config, pipeline.scheduler), "negative_prompt": config.sampling.negative_prompt,
        "activations_dtype": config.model.activations_dtype,
    }))  # fmt: skip


def guidance_scales(config: Config) -> tuple[float, ...]:
    """Those at which is drawn."""
    return config.evaluation.eval_guidance_scales or (config.sampling.guidance_scale,)


def wanted(config: Config, captions: Sequence[str]) -> list[str]:
    """What each drawing is of: the held-out captions in turn."""
    return [captions[i % len(captions)] for i in range(config.evaluation.eval_images or len(captions))]


def _drawn(config: Config, layout: Layout, pipeline: Pipeline, eyes: Eyes, scale: float, picture: Path) -> dict[str, Any]:
    """What is measured of the drawings at a guidance scale; some of them are kept as a picture."""
    captions = wanted(config, eyes.reference.captions)
    count = len(captions)
    seen, scores, shown = [], [], []
    pace = Pace(count, "images", time.perf_counter())
    for images, some in make_drawings(config, layout, pipeline, captions, scale):
        seen.append(eyes.network.extract(images))
        if eyes.clip is not None:
            scores.append((eyes.clip.images(images) * eyes.clip.texts(some)).sum(1))
        shown += list(images[: max(0, SHOWN - len(shown))])
        pace.step(len(images))
    pace.end(f"drawn at guidance_scale={scale:g}", 0)
    if jax.process_index() == 0:
        write_png(picture, grid(np.stack(shown)), {"prompts": "\n".join(captions[:SHOWN]), "guidance_scale": f"{scale:g}"})
    real, drawn = eyes.reference.features, np.concatenate(seen)
    kernel, spread = kernel_distance(real, drawn)
    precision, recall = precision_and_recall(real, drawn)
    row = {"guidance_scale": scale, "images": count, "frechet_distance": frechet_distance(Statistics.of(real), Statistics.of(drawn)),
           "kernel_distance": kernel, "kernel_spread": spread, "precision": precision, "recall": recall}  # fmt: skip
    # 100 times the cosine, or 0 where it is less (Hessel et al. 2021, with the weight that torchmetrics has).
    return row | ({"clip_score": float(np.maximum(100 * np.concatenate(scores), 0).mean())} if scores else {})


def results(folder: Path) -> list[dict[str, Any]]:
    """What was measured of each model of a run, in order of their steps."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda one: (one["step"] or 0, one["model"]))


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each model and guidance scale, then each model's loss by timestep."""
    named = {name: short if all(one["network"] == features.INCEPTION for one in found) else name.replace("_", " ")
             for name, short in MEASURES.items() if any(name in row for one in found for row in one["drawn"])}  # fmt: skip
    lines = [[one["model"], one["network"], f"{row['guidance_scale']:g}", str(row["images"]),
              *(f"{row[name]:.4g}" if name in row else "" for name in named)] for one in found for row in one["drawn"]]  # fmt: skip
    drawn = _markdown(["model", "features", "guidance scale", "images", *named.values()], lines)
    times = sorted({int(t) for one in found for t in one["losses"]})
    lines = [
        [one["model"], *(f"{one['losses'][str(t)]:.4f}" if str(t) in one["losses"] else "" for t in times)] for one in found
    ]
    return f"{drawn}\n\n{_markdown(['held-out loss at timestep', *map(str, times)], lines)}"


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))


def _show(config: Config, network: FeatureNetwork) -> None:
    """Print what there is of the run, and plot it."""
    folder = place(config)
    found = [one for one in results(folder) if one["network"] == network.name]
    say(table(found))
    if jax.process_index() == 0:
        plotted = plot(found, folder / PLOT)
        say(
            f"wrote {config.run.shown(folder / PLOT)}"
            if plotted
            else "there is no plot without matplotlib (pip install matplotlib)"
        )


def plot(found: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw what was measured over guidance scales, over a run's steps, and the losses over timesteps; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4), layout="constrained")
    by_scale, by_step, by_time = figure.subplots(1, 3)
    for one in found:
        rows = one["drawn"]
        by_scale.plot(
            [row["guidance_scale"] for row in rows], [row["frechet_distance"] for row in rows], marker="o", label=one["model"]
        )
        by_time.plot(list(map(int, one["losses"])), list(one["losses"].values()), label=one["model"])
    steps = [one for one in found if one["step"] is not None]
    for scale in sorted({row["guidance_scale"] for one in steps for row in one["drawn"]}):
        points = [
            (one["step"], row["frechet_distance"]) for one in steps for row in one["drawn"] if row["guidance_scale"] == scale
        ]
        by_step.plot(*zip(*points, strict=True), marker="o", label=f"guidance {scale:g}")
    name = "FID" if all(one["network"] == features.INCEPTION for one in found) else "Fréchet distance"
    for axes, x, y in ((by_scale, "guidance scale", name), (by_step, "step", name), (by_time, "timestep", "held-out loss")):
        axes.set(xlabel=x, ylabel=y)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
