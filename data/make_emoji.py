"""Make the shards of data/emoji from the original ones: 128 pixels, on white, some of them held out.

    python data/make_emoji.py FOLDER_OF_ORIGINALS data/emoji

The originals are WebDataset tars of 256-pixel RGBA WebP files, each with its label in a .txt and what emojibase says of it in
a .json: Microsoft's Fluent 3D emoji (npm @lobehub/fluent-emoji-3d), emojibase's labels. The output depends on them and on the
version of libwebp alone. They are stored on white, as they are trained on: the alpha channels would take as many bytes again as
the colours.
"""

import argparse
import json
from pathlib import Path

from emoji_captions import captions
from emoji_shards import NONE, Files, examples, is_one_in, on_white, opened, webp, write_shards
from PIL import Image

PIXELS = 128
QUALITY = 75
SHARD_EXAMPLES = 1100
# One family in 20 is held out.
HELD_OUT = 20
SKIN_TONES = {f"1f3f{digit}" for digit in "bcdef"}


def made(files: Files) -> Files:
    """The files of an example: its picture, its label, and more captions as the fields of a .json."""
    rgba = opened(files).convert("RGBA")
    small = on_white(rgba).resize((PIXELS, PIXELS), Image.Resampling.LANCZOS)
    said = json.dumps(captions(rgba, json.loads(files["json"])), ensure_ascii=False)
    return {"webp": webp(small, QUALITY, method=6), "txt": files["txt"], "json": said.encode()}


def held_out(key: str) -> bool:
    """Whether the emoji is held out: by a hash of its key less skin tones, so that its variants stay together."""
    return is_one_in(HELD_OUT, "-".join(part for part in key.split("-") if part not in SKIN_TONES))


def main() -> None:
    """Write the shards named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("originals", type=Path, help="folder with the original tars")
    parser.add_argument("output", type=Path, help="folder for the new ones")
    arguments = parser.parse_args()
    found = dict(sorted(examples(str(arguments.originals / "*.tar"))))
    if not found:
        parser.error(f"originals={arguments.originals} {NONE}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, wanted in (("train", False), ("heldout", True)):
        write_shards(
            arguments.output, split, [(key, made(found[key])) for key in found if held_out(key) is wanted], SHARD_EXAMPLES
        )


if __name__ == "__main__":
    main()
