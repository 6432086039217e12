"""What a model of the emoji is worth: size, speed, the same pictures in diffusers, how well it draws and whether it composes.

    python benchmarks/emoji_model.py [data/emoji_model]     # all of docs/QUALITY.md's figures; half an hour on 2 CPU cores

A JSON line for each figure; the tables of maxdiff.evaluate, for captions that it has never seen and for those it has; the
lines of benchmarks/compositions.py.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import compositions

from maxdiff import Pipeline, evaluate

ROOT = Path(__file__).parents[1]
PROMPTS = ["a red heart", "a smiling face", "a cat face", "the flag of Italy", "a purple cat face", "a green heart with a bow",
           "a pink elephant", "a blue dog face"]  # fmt: skip
STEPS = 20
GUIDANCE_SCALE = 3.0
TIMES = 5
SCALES = [1, 3, 7.5]
EXAMPLES = 165


def size(folder: Path, pipeline: Pipeline) -> dict[str, float]:
    """Megabytes of all files, and millions of parameters of each network."""
    parameters = {name: sum(array.size for array in jax.tree.leaves(part.params)) / 1e6 for name, part in pipeline.networks()}
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    return {"megabytes": round(megabytes, 2), **{name: round(count, 2) for name, count in parameters.items()}}


def speed(pipeline: Pipeline) -> dict[str, float]:
    """Seconds of the first picture, compilation included, and of one more."""
    seconds = []
    for seed in range(1 + TIMES):
        started = time.monotonic()
        pipeline.generate(PROMPTS[0], steps=STEPS, guidance_scale=GUIDANCE_SCALE, seed=seed)
        seconds.append(time.monotonic() - started)
    return {"first_seconds": round(seconds[0], 2), "seconds": round(statistics.median(seconds[1:]), 2),
            "most_seconds": round(max(seconds[1:]), 2)}  # fmt: skip


def drawn_by_both(folder: Path, pipeline: Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """Our pictures of PROMPTS and diffusers', uint8 [n height width 3], from the same noise."""
    import diffusers
    import torch

    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    noise = np.random.default_rng(0).standard_normal((len(PROMPTS), 16, 16, 4), np.float32)
    latents = torch.from_numpy(noise.transpose(0, 3, 1, 2))
    options = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "latents": latents, "output_type": "np"}
    images = np.rint(theirs(PROMPTS, **options).images * 255).astype(np.uint8)
    return pipeline.generate(PROMPTS, steps=STEPS, guidance_scale=GUIDANCE_SCALE, latents=noise), images


def agreement(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """How far pictures are apart, in levels of 255, and the share of numbers that are equal."""
    apart = np.abs(ours.astype(int) - theirs)
    return {"most_levels": int(apart.max()), "equal": round(float((apart == 0).mean()), 5)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "data/emoji_model", help="a pipeline's folder")
    args = parser.parse_args(argv)
    pipeline = Pipeline.load(args.model)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "diffusers")}
    versions |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"model": str(args.model), **versions}))
    print(json.dumps({"of": "size", **size(args.model, pipeline)}), flush=True)
    print(json.dumps({"of": "a picture", **speed(pipeline)}), flush=True)
    print(json.dumps({"of": "diffusers", **agreement(*drawn_by_both(args.model, pipeline))}), flush=True)
    for name, shards in (("never seen", "heldout"), ("of its training", "train")):
        print(f"captions {name}:", flush=True)
        keys = {
            "pretrained_model_name_or_path": args.model,
            "output_dir": f"runs/judged/{shards}",
            "eval_data_dir": ROOT / f"data/emoji/{shards}-*.tar",
            "eval_examples": EXAMPLES,
            "eval_guidance_scales": SCALES,
            "num_inference_steps": STEPS,
            "skip_jax_distributed_system": "true",  # JAX runs already
        }
        failed = evaluate.main([str(ROOT / "configs/emoji.yml"), *(f"{key}={value}" for key, value in keys.items())])
        if failed:
            return failed
    return compositions.main([str(args.model)])


if __name__ == "__main__":
    sys.exit(main())
