"""Whether a model of the emoji composes: things in colours that no caption of its training has.

    python benchmarks/compositions.py runs/my_run/pipeline --prompts 200 --guidance_scale 3 --grid compositions.png

Draws combinations that data/make_emoji_variants.py holds out ("a purple cat face"), then the same things without a colour, from
the same noise. A JSON line each, and one for the real emoji recoloured as the variants are, which is what could be reached:
  * colour: share of pictures of which the colour asked for is the main one, by the rule that made the captions.
  * thing: share of pictures whose nearest real emoji, in grey, is the thing asked for, among all that are recoloured, by
    EfficientNet-Lite0's features; thing_in_5: among the nearest five.
  * both: colour and thing_in_5.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
sys.path.insert(0, str(Path(__file__).parent))
from emoji_captions import colours, phrase
from emoji_shards import NONE, examples, on_white, opened
from make_emoji_variants import COLOURED, LEAST, TARGETS, cut_out, held_out_pairs, recoloured, thing_of
from report import progress

from maxdiff import Pipeline
from maxdiff.features import FeatureNetwork, efficientnet
from maxdiff.images import grid

SHARDS = Path(__file__).parents[1] / "data" / "emoji" / "train-*.tar"
AT_ONCE = 8


def features(network: FeatureNetwork, images: Sequence[np.ndarray]) -> np.ndarray:
    """Of the images in grey, of length 1: [n dim]."""
    grey = [np.asarray(Image.fromarray(image).convert("L").convert("RGB")) for image in images]
    filled = [*grey, *grey[-1:] * (-len(grey) % AT_ONCE)]
    parts = [network.extract(np.stack(filled[i : i + AT_ONCE])) for i in range(0, len(filled), AT_ONCE)]
    found = np.concatenate(parts)[: len(grey)]
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def main_colour(image: np.ndarray) -> str:
    """Of a picture on white; "" if none prevails."""
    return next(iter(colours(cut_out(Image.fromarray(image)), 1, LEAST)), "")


def score(pictures: Sequence[np.ndarray], pairs: Sequence[tuple[str, str]], seen: np.ndarray, things: Sequence[str],
          known: np.ndarray) -> dict[str, float]:  # fmt: skip
    """The shares; `seen` are the pictures' features, `known` those of the real emoji called `things`."""
    nearest = np.argsort(-seen @ known.T, axis=1)[:, :5]
    names = [[things[i] for i in row] for row in nearest]
    right = np.array([main_colour(picture) == colour for picture, (_, colour) in zip(pictures, pairs, strict=True)])
    first = np.array([row[0] == thing for row, (thing, _) in zip(names, pairs, strict=True)])
    five = np.array([thing in row for row, (thing, _) in zip(names, pairs, strict=True)])
    shares = {"colour": right, "thing": first, "thing_in_5": five, "both": right & five}
    return {name: round(float(share.mean()), 3) for name, share in shares.items()}


def draw(pipeline: Pipeline, prompts: Sequence[str], args: argparse.Namespace, name: str) -> list[np.ndarray]:
    """A picture of each prompt, the i-th from the noise of seed + i."""
    pictures: list[np.ndarray] = []
    started = time.monotonic()
    for first in range(0, len(prompts), AT_ONCE):
        some = list(prompts[first : first + AT_ONCE])
        some += some[-1:] * (AT_ONCE - len(some))
        given = {"steps": args.num_inference_steps, "guidance_scale": args.guidance_scale, "seed": args.seed + first}
        pictures += list(pipeline.generate(some, **given))[: len(prompts) - first]
        progress(len(pictures), len(prompts), name, started)
    return pictures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a pipeline's folder")
    parser.add_argument("--shards", default=str(SHARDS))
    parser.add_argument("--prompts", type=int, default=200, help="combinations, every so many of those held out")
    parser.add_argument("--guidance_scale", type=float, default=3.0)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", type=Path, help="where the first 64 drawings go")
    args = parser.parse_args(argv)
    found = list(examples(args.shards))
    if not found:
        parser.error(f"--shards={args.shards} {NONE}")
    real = {thing_of(files["txt"].decode()): cut_out(opened(files)) for _, files in found
            if json.loads(files["json"])["group"] in COLOURED}  # fmt: skip
    # Those that could be met: whose real emoji can be recoloured so.
    images = {pair: image for pair in held_out_pairs(found) if (image := recoloured(real[pair[0]], pair[1])) is not None}
    pairs = list(images)[:: max(1, len(images) // args.prompts)][: args.prompts]
    pipeline, network = Pipeline.load(args.model), efficientnet()
    pixels = lambda images: [np.asarray(on_white(image)) for image in images]
    known = features(network, pixels(real.values()))
    drawn = draw(pipeline, [phrase(thing, [colour]) for thing, colour in pairs], args, "composed")
    plain = draw(pipeline, [phrase(thing, []) for thing, _ in pairs], args, "without colour")
    options = {name: getattr(args, name) for name in ("model", "guidance_scale", "num_inference_steps", "seed")}
    counts = {"combinations": len(pairs), "colours": len(TARGETS), "things": len(real)}
    real_ones = pixels(images[pair] for pair in pairs)
    for name, pictures in {"composed": drawn, "without colour": plain, "real, recoloured": real_ones}.items():
        shares = score(pictures, pairs, features(network, pictures), list(real), known)
        print(json.dumps({"pictures": name, **shares, **options, **counts, "date": time.strftime("%Y-%m-%d")}), flush=True)
    if args.grid:
        Image.fromarray(grid(np.stack(drawn[:64]))).save(args.grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
