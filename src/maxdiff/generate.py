"""Draw a prompt with a run's pipeline, or with any other.

python generate.py configs/base14.yml run_name=my_run output_dir=runs prompt="a red heart"
python generate.py configs/base14.yml prompt="a red heart"     # pretrained_model_name_or_path
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff import build, command
from maxdiff.config import Config
from maxdiff.draw import requests
from maxdiff.images import write_png
from maxdiff.pipeline import WEIGHTS, Pipeline
from maxdiff.task import make_compute


def main(argv: Sequence[str]) -> int:
    """The command line."""
    return command.run("generate.py", argv, generate)


def generate(config: Config) -> Path:
    """Draw `prompt` and write the image; returns its path.

    Raises:
        ValueError, OSError: for what is wrong with the configuration, before anything is drawn.
    """
    build.require(config, "prompt")
    sampling, seed = config.sampling, config.run.seed
    of_run = bool(config.run.run_name)
    source = config.run.folder / "pipeline" if of_run else config.model.pretrained_model_name_or_path
    # The frozen parts lie there from the start of training, the UNet's weights since the first export.
    if of_run and not (config.run.folder / "pipeline" / "unet" / f"{WEIGHTS['unet']}.safetensors").is_file():
        raise FileNotFoundError(f"{source} is no whole pipeline yet: has the run {config.run.run_name!r} ended?")
    if not source:
        raise ValueError("run_name and output_dir, or pretrained_model_name_or_path, is required")
    build.use_cache(config)
    layout = build.layout_of(config)
    pipeline = Pipeline.load(
        source,
        sources=config.model.sources if not of_run else None,
        prediction_type=config.objective.prediction_type or None,
        dtype=jnp.dtype(config.model.weights_dtype),
        compute=make_compute(config, layout),
    )
    networks = {name: part.network for name, part in pipeline.networks()}
    draw = build.make_draw(config, networks, pipeline.scheduler)
    request = requests(pipeline, [sampling.prompt], [sampling.negative_prompt] if sampling.negative_prompt else None)
    weights = {name: part.params for name, part in pipeline.networks()}
    image = np.asarray(jax.jit(draw)(weights, jax.random.key(seed), request))[0]
    folder = config.run.folder / "images" if of_run else Path(config.run.output_dir or ".")
    path = folder / f"{_name(sampling.prompt)}-{seed}.png"
    write_png(path, image, {
        "prompt": sampling.prompt, "negative_prompt": sampling.negative_prompt, "seed": str(seed), "sampler": "DDIM",
        "steps": str(sampling.num_inference_steps), "guidance_scale": str(sampling.guidance_scale), "model": str(source),
    })  # fmt: skip
    print(f"wrote {path}", flush=True)
    return path


def _name(prompt: str) -> str:
    """A file's name from a prompt."""
    kept = "".join(c if c.isalnum() else "-" for c in prompt.lower())
    return "-".join(filter(None, kept.split("-")))[:60] or "image"
