"""Emoji that models draw, beside real ones.

    python benchmarks/emoji_grid.py docs/emoji.webp --row 'guidance 3' data/emoji_model 3 --row 'guidance 7' data/emoji_model 7

A row for each model and guidance scale, a column for each prompt, all from the same noise; above them real emoji, recoloured
and dressed as data/make_emoji_variants.py does. The combinations in COMPOSED are in no caption of the training.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from emoji_captions import phrase
from emoji_shards import TRAIN, Files, examples, on_white, opened
from make_emoji_variants import cut_out, dressed, held_out, recoloured, wearing, worn_images

from maxdiff import Pipeline

KNOWN = ("red heart", "smiling face", "octopus", "pizza", "automobile", "flag: Italy")
# Label of the emoji that is changed, what it is called then, its colour, and what it wears.
COMPOSED = (
    ("cat face", "cat face", "purple", ""),
    ("elephant", "elephant", "pink", ""),
    ("dog face", "dog face", "blue", ""),
    ("banana", "banana", "green", ""),
    ("red heart", "heart", "green", "bow"),
    ("frog", "frog", "", "crown"),
)
MARGIN = 90  # pixels left of the pictures, for a row's label


def columns(found: Mapping[str, Files], worn: Mapping[str, Image.Image]) -> list[tuple[str, Image.Image]]:
    """(prompt, real picture) of each column."""
    known = [(json.loads(found[label]["json"])["phrase"], opened(found[label])) for label in KNOWN]
    return known + [composed(found[label], thing, colour, worn, name) for label, thing, colour, name in COMPOSED]


def composed(files: Files, thing: str, colour: str, worn: Mapping[str, Image.Image], name: str) -> tuple[str, Image.Image]:
    """(prompt, picture made of the real one) of a thing in a colour, wearing something; "" for neither.

    Raises:
        ValueError: if it cannot be recoloured so, or a caption of the training may say that.
    """
    if not any(held_out(thing, other) for other in (colour, name) if other):
        raise ValueError(f"{thing}, {colour}, {name} is not held out")
    image = cut_out(opened(files))
    if colour and (image := recoloured(image, colour)) is None:
        raise ValueError(f"the {thing} cannot be made {colour}")
    said = phrase(thing, [colour] if colour else [])
    return (wearing(said, name), on_white(dressed(image, worn[name]))) if name else (said, on_white(image))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a .png or .webp")
    parser.add_argument("--row", nargs=3, action="append", required=True, metavar=("LABEL", "MODEL", "GUIDANCE_SCALE"))
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    found = {files["txt"].decode(): files for _, files in examples(TRAIN)}
    prompts, real = zip(*columns(found, worn_images(found.items())), strict=True)
    rows = [("real", list(real))]
    for label, model, scale in args.row:
        options = {"steps": args.num_inference_steps, "guidance_scale": float(scale), "seed": args.seed}
        rows.append((label, [Image.fromarray(image) for image in Pipeline.load(model).generate(prompts, **options)]))
    size = real[0].width
    sheet = Image.new("RGB", (MARGIN + size * len(prompts), size * len(rows)), "white")
    for row, (label, pictures) in enumerate(rows):
        ImageDraw.Draw(sheet).text((4, size * row + size // 2), label, "black", font_size=14)
        for column, picture in enumerate(pictures):
            sheet.paste(picture.convert("RGB"), (MARGIN + size * column, size * row))
    sheet.save(args.output, quality=80)
    print(f"wrote {args.output}: {'; '.join(prompts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
