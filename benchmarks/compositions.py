"""Whether a model of the emoji composes: things in colours, or wearing something, that no caption of its training has.

    python benchmarks/compositions.py runs/my_run/pipeline --prompts 200 --guidance_scale 3 --grid compositions.png

Draws combinations that data/make_emoji_variants.py holds out ("a purple cat face", "a heart with a bow"), then the same things
alone, from the same noise. A JSON line each, and one for the real emoji made so as the variants are, which is what could be
reached. Of colours:
  * colour: share of pictures of which the colour asked for is the main one, by the rule that made the captions.
  * thing: share of pictures whose nearest real emoji, in grey, is the thing asked for, among all that are recoloured, by
    EfficientNet-Lite0's features; thing_in_5: among the nearest five.
  * both: colour and thing_in_5.
Of things that wear something, by the same features in colour:
  * worn: share of pictures that are nearer to the real thing wearing what was asked for than to it alone or wearing another.
  * both: share whose nearest is just that, among all things asked for, alone and wearing each.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
sys.path.insert(0, str(Path(__file__).parent))
from emoji_captions import colours, phrase
from emoji_shards import NONE, TRAIN, Files, examples, on_white, opened
from make_emoji_variants import (
    COLOURED,
    LEAST,
    TARGETS,
    cut_out,
    dressed,
    held_out_dresses,
    held_out_pairs,
    recoloured,
    thing_of,
    wearing,
    worn_images,
)
from report import progress

from maxdiff import Pipeline
from maxdiff.features import FeatureNetwork, efficientnet
from maxdiff.images import grid

AT_ONCE = 8


def grey(images: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The images without their colours."""
    return [np.asarray(Image.fromarray(image).convert("L").convert("RGB")) for image in images]


def features(network: FeatureNetwork, images: Sequence[np.ndarray]) -> np.ndarray:
    """Of the images, of length 1: [n dim]."""
    filled = [*images, *images[-1:] * (-len(images) % AT_ONCE)]
    parts = [network.extract(np.stack(filled[i : i + AT_ONCE])) for i in range(0, len(filled), AT_ONCE)]
    found = np.concatenate(parts)[: len(images)]
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


def score_worn(
    pairs: Sequence[tuple[str, str]], seen: np.ndarray, known: Mapping[tuple[str, str], np.ndarray]
) -> dict[str, float]:
    """The shares; `known` are the features of each thing with each that is worn, "" for none."""
    names, likeness = list(known), seen @ np.stack(list(known.values())).T
    found = [[names[i] for i in np.argsort(-row)] for row in likeness]
    worn = [
        next(name for name in row if name[0] == thing) == (thing, wears)
        for row, (thing, wears) in zip(found, pairs, strict=True)
    ]
    both = [row[0] == pair for row, pair in zip(found, pairs, strict=True)]
    return {"worn": round(float(np.mean(worn)), 3), "both": round(float(np.mean(both)), 3)}


def some(items: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """So many of them, or all, spread over the whole."""
    return list(items)[:: max(1, len(items) // count)][:count]


def pixels(images: Iterable[Image.Image]) -> list[np.ndarray]:
    """Pictures as they are drawn."""
    return [np.asarray(on_white(image)) for image in images]


class Judge:
    """What draws, what looks at pictures, and how that is reported."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.pipeline, self.network = args, Pipeline.load(args.model), efficientnet()

    def draw(self, prompts: Sequence[str], name: str) -> list[np.ndarray]:
        """A picture of each prompt, the i-th from the noise of seed + i."""
        args, pictures, started = self.args, [], time.monotonic()
        for first in range(0, len(prompts), AT_ONCE):
            batch = list(prompts[first : first + AT_ONCE])
            batch += batch[-1:] * (AT_ONCE - len(batch))
            given = {"steps": args.num_inference_steps, "guidance_scale": args.guidance_scale, "seed": args.seed + first}
            pictures += list(self.pipeline.generate(batch, **given))[: len(prompts) - first]
            progress(len(pictures), len(prompts), name, started)
        return pictures

    def report(self, name: str, shares: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """One line."""
        options = {key: getattr(self.args, key) for key in ("model", "guidance_scale", "num_inference_steps", "seed")}
        line = {"pictures": name, **shares, **counts, **options, "date": time.strftime("%Y-%m-%d")}
        print(json.dumps(line), flush=True)

    def colours(self, found: Sequence[tuple[str, Files]], real: Mapping[str, Image.Image]) -> list[np.ndarray]:
        """Report of things in colours; the drawings."""
        # Those that could be met: whose real emoji can be recoloured so.
        images = {pair: image for pair in held_out_pairs(found) if (image := recoloured(real[pair[0]], pair[1])) is not None}
        pairs = some(list(images), self.args.prompts)
        known = features(self.network, grey(pixels(real.values())))
        counts = {"combinations": len(pairs), "colours": len(TARGETS), "things": len(real)}
        drawn = self.draw([phrase(thing, [colour]) for thing, colour in pairs], "in colours")
        alone = self.draw([phrase(thing, []) for thing, _ in pairs], "without colour")
        made = pixels(images[pair] for pair in pairs)
        for name, pictures in {"in colours": drawn, "without colour": alone, "real, recoloured": made}.items():
            shares = score(pictures, pairs, features(self.network, grey(pictures)), list(real), known)
            self.report(name, shares, counts)
        return drawn

    def worn(self, found: Sequence[tuple[str, Files]], real: Mapping[str, Image.Image]) -> list[np.ndarray]:
        """Report of things that wear something; the drawings."""
        worn = worn_images(found)
        pairs = some([pair for pair in held_out_dresses(found) if pair[1] in worn], self.args.prompts)
        images = {(thing, name): dressed(real[thing], worn[name]) if name else real[thing]
                  for thing in dict.fromkeys(thing for thing, _ in pairs) for name in ("", *worn)}  # fmt: skip
        known = dict(zip(images, features(self.network, pixels(images.values())), strict=True))
        counts = {"combinations": len(pairs), "things": len(images) // (1 + len(worn))}
        drawn = self.draw([wearing(phrase(thing, []), name) for thing, name in pairs], "wearing")
        alone = self.draw([phrase(thing, []) for thing, _ in pairs], "wearing nothing")
        made = pixels(images[pair] for pair in pairs)
        for name, pictures in {"wearing": drawn, "wearing nothing": alone, "real, dressed": made}.items():
            self.report(name, score_worn(pairs, features(self.network, pictures), known), counts)
        return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a pipeline's folder")
    parser.add_argument("--shards", default=TRAIN)
    parser.add_argument("--prompts", type=int, default=200, help="combinations of each kind, every so many of those held out")
    parser.add_argument("--guidance_scale", type=float, default=3.0)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", type=Path, help="where the first 32 drawings of each kind go")
    args = parser.parse_args(argv)
    found = list(examples(args.shards))
    if not found:
        parser.error(f"--shards={args.shards} {NONE}")
    # Reversed, as the first of a name counts.
    real = {thing_of(files["txt"].decode()): cut_out(opened(files)) for _, files in reversed(found)
            if json.loads(files["json"])["group"] in COLOURED}  # fmt: skip
    judge = Judge(args)
    drawn = [*judge.colours(found, real)[:32], *judge.worn(found, real)[:32]]
    if args.grid:
        Image.fromarray(grid(np.stack(drawn))).save(args.grid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
