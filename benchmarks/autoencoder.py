"""How well an autoencoder keeps held-out images: PSNR, and the scale of its latents.

    python benchmarks/autoencoder.py data/emoji_model/vae 'data/emoji/heldout-*.tar' --resolution 128

Prints one JSON line: the mean over images of their PSNR in dB (of values from 0 to 1, decoded from the mean latents), and
the standard deviation of latents times scaling_factor, which is to be about 1.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence

import jax
import numpy as np

from maxdiff.data.pipeline import BatchPlan, load_batch
from maxdiff.data.sources import open_source
from maxdiff.losses import latent_moments, reconstruction_measures
from maxdiff.weights.origins import open_origins


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vae", help="a pipeline, an autoencoder's folder or its file")
    parser.add_argument("images", help="as train_data_dir")
    parser.add_argument("--resolution", type=int, default=512, help="pixels")
    parser.add_argument("--examples", type=int, default=10**9, help="how many at most")
    args = parser.parse_args(argv)
    origins = open_origins("", sources={"vae": args.vae})
    networks = origins.networks(["vae"])
    vae, params = networks["vae"], origins.load(networks)

    def measure(image: jax.Array) -> dict[str, jax.Array]:
        batch = {"image": image}
        measures = reconstruction_measures(vae, lambda *_: image[:, 0, 0, 0].astype("float32"))(params, {}, batch)
        return {"psnr": measures["psnr"], **latent_moments(vae, params, {}, batch)}

    with tempfile.TemporaryDirectory() as index:
        source = open_source(args.images, cache_dir=index)
        examples = min(len(source), args.examples)
        step, found = jax.jit(measure), []
        for number in range(examples):
            batch, _ = load_batch(source, [], BatchPlan(0, 1, args.resolution), number)
            found.append({name: float(value[0]) for name, value in step(batch["image"]).items()})
    mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    scale = vae.config.scaling_factor * math.sqrt(mean["square"] - mean["mean"] ** 2)
    print(json.dumps({"vae": args.vae, "images": examples, "resolution": args.resolution, "psnr_db": round(mean["psnr"], 2),
                      "latent_std": round(scale, 3), "parameters": vae.num_parameters()}))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
