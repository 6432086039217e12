"""What evaluate.py has measured, as a table and as a plot: pure functions of its results (see `Evaluator.measure`)."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

# What a row of the table has: its name with the features of any network, and with Inception's, as published.
MEASURES = {
    "frechet_distance": ("Fréchet distance", "FID"), "kernel_distance": ("kernel distance", "KID"),
    "kernel_spread": ("its deviation", "its deviation"), "precision": ("precision", "precision"),
    "recall": ("recall", "recall"), "clip_score": ("CLIP score", "CLIP score"),
}  # fmt: skip
INCHES = 5.0, 4.0  # width and height of a part of the plot

Found = Sequence[Mapping[str, Any]]


def names(found: Found) -> dict[str, str]:
    """Measure -> what it is called, of those that were made. The distances are FID and KID with Inception's features alone."""
    published = all(one["settings"]["features"]["is_inception"] for one in found)
    made = {measure for one in found for row in one["drawn"] for measure in row}
    return {measure: called[published] for measure, called in MEASURES.items() if measure in made}


def table(found: Found) -> str:
    """Markdown: how these results were made, a row for each model and guidance scale, and each model's loss by timestep.

    Args:
        found: results of the same settings.
    """
    named = names(found)
    rows = [[one["model"], one["weights"][:8], f"{row['guidance_scale']:g}",
             *(f"{row[measure]:.4g}" for measure in named)] for one in found for row in one["drawn"]]  # fmt: skip
    drawn = markdown(["model", "weights", "guidance scale", *named.values()], rows)
    times = sorted({int(t) for one in found for t in one["losses"]})
    at = lambda one, t: f"{one['losses'][str(t)]:.4f}" if str(t) in one["losses"] else ""
    losses = [[one["model"], one["weights"][:8], *(at(one, t) for t in times)] for one in found]
    return "\n\n".join([_how(found[0]["settings"]), drawn, "Held-out loss at timesteps:",
                        markdown(["model", "weights", *map(str, times)], losses)])  # fmt: skip


def _how(settings: Mapping[str, Any]) -> str:
    network = settings["features"]
    no_fid = "" if network["is_inception"] else ", so the distances are not FID and KID, and comparable with themselves alone"
    sampler = settings["sampler"] or "each model's own sampler"
    return (f"{settings['images']} drawings beside {settings['examples']} held-out pictures of {settings['resolution']} px, by "
            f"the features of {network['name']}{no_fid}; {settings['num_inference_steps']} steps of {sampler}, seed "
            f"{settings['seed']}.")  # fmt: skip


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def plot(found: Found) -> bytes | None:
    """A PNG: the Fréchet distance over guidance scales, over CLIP scores and over a run's steps, and losses over timesteps.

    Returns:
        None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    named = names(found)
    distance, scale = named["frechet_distance"], "guidance scale"
    scored, steps = "clip_score" in named, [one for one in found if one["step"] is not None]
    panels = [scale, *([named["clip_score"]] if scored else []), *(["step"] if steps else []), "timestep"]
    figure = Figure(figsize=(INCHES[0] * len(panels), INCHES[1]), layout="constrained")
    axes = dict(zip(panels, figure.subplots(1, len(panels)), strict=True))
    for one in found:
        for x, measure in ((scale, "guidance_scale"), *([("CLIP score", "clip_score")] if scored else [])):
            points = [(row[measure], row["frechet_distance"]) for row in one["drawn"]]
            axes[x].plot(*zip(*points, strict=True), marker="o", label=one["model"])
        axes["timestep"].plot(list(map(int, one["losses"])), list(one["losses"].values()), marker=".", label=one["model"])
    for label, points in _by_step(steps).items():
        axes["step"].plot(*zip(*points, strict=True), marker="o", label=label)
    for x, part in axes.items():
        part.set(xlabel=x, ylabel="held-out loss" if x == "timestep" else distance)
        part.legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _by_step(found: Found) -> dict[str, list[tuple[int, float]]]:
    """A run's line for each guidance scale -> (step, Fréchet distance), ascending."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in sorted(found, key=lambda one: one["step"]):
        run = one["model"].replace(f"-{one['step']}", "", 1)
        for row in one["drawn"]:
            lines.setdefault(f"{run}, guidance {row['guidance_scale']:g}", []).append((one["step"], row["frechet_distance"]))
    return lines
