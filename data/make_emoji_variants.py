"""More emoji out of those in data/emoji, to train on beside them: in other colours, and mirrored where that changes no meaning.

    python data/make_emoji_variants.py 'data/emoji/train-*.tar' runs/emoji_variants

writes recoloured-*.tar ("a purple lemon"), mirrored-*.tar, and held_out.jsonl: combinations of a thing and a colour that are in
none of them, as prompts for generate.py. What they teach is that colours are words.
"""

import argparse
import json
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from emoji_captions import COLOURS, colours, names_of, phrase
from emoji_shards import NONE, Files, examples, is_one_in, on_white, opened, webp, write_shards
from PIL import Image, ImageDraw

SHARD_EXAMPLES = 2000
QUALITY = 85
LEAST = 0.3  # share of a picture's pixels that its main colour has
# Hue in degrees, least saturation, and what saturation and value are multiplied by. White has no place on white.
TARGETS = {
    "red": (357, 0.6, 1, 1),
    "orange": (24, 0.6, 1, 1),
    "yellow": (48, 0.6, 1, 1),
    "green": (135, 0.5, 1, 0.85),
    "blue": (212, 0.55, 1, 1),
    "purple": (270, 0.45, 0.9, 0.85),
    "pink": (328, 0.45, 0.75, 1),
    "brown": (22, 0.5, 0.9, 0.55),
    "gray": (270, 0, 0.06, 0.7),
    "black": (270, 0, 0.15, 0.25),
}
# Not people, whose colours mean something else, nor symbols.
COLOURED = {"smileys", "animals", "food", "travel", "activities", "objects"}
MIRRORED = {"smileys", "people", "animals", "food", "travel", "activities", "objects"}
# Words of which one says that a mirrored picture would be another thing.
SIDES = r"\b(left|right|leftwards|rightwards|clock|thirty|quarter|writing|abc|button|keycap|number|calendar)\b"
# One combination in ten is held out, and these.
HELD_OUT = 10
CHECKED = {("cat face", "purple"), ("dog face", "blue"), ("elephant", "pink"), ("banana", "green"), ("lion", "green"),
           ("rocket", "purple"), ("pizza", "blue"), ("owl", "red"), ("rose", "blue"), ("guitar", "green")}  # fmt: skip


def held_out(thing: str, colour: str) -> bool:
    """Whether this combination is in no variant."""
    return (thing, colour) in CHECKED or is_one_in(HELD_OUT, f"{colour} {thing}")


def cut_out(image: Image.Image) -> Image.Image:
    """A picture on white, transparent where white reaches in from a corner."""
    image = image.convert("RGB")
    filled, marker = image.copy(), (255, 0, 254)
    right, bottom = image.width - 1, image.height - 1
    for corner in ((0, 0), (right, 0), (0, bottom), (right, bottom)):
        if min(filled.getpixel(corner)) > 235:  # pyright: ignore[reportArgumentType]
            ImageDraw.floodfill(filled, corner, marker, thresh=24)
    inside = (np.asarray(filled) != marker).any(-1)
    image.putalpha(Image.fromarray(inside.astype(np.uint8) * 255))
    return image


def recoloured(rgba: Image.Image, colour: str) -> Image.Image | None:
    """The emoji with its main colour turned into another; None if it has no main colour, or the other does not prevail."""
    found = colours(rgba, 1, LEAST)
    if not found or found[0] in (colour, "white"):  # what is white has no outline on white
        return None
    hue, least, more, brighter = TARGETS[colour]
    pixels = np.asarray(rgba).astype(np.float32)
    inside = pixels[..., 3] > 0
    h, s, v = np.moveaxis(np.asarray(rgba.convert("RGB").convert("HSV")).astype(np.float32), -1, 0)
    h, s, v = h * (360 / 256), s / 255, v / 255
    main = names_of(pixels[..., :3].reshape(-1, 3) / 255).reshape(h.shape) == COLOURS.index(found[0])
    main &= inside
    if found[0] in ("gray", "black"):
        share = np.clip((0.4 - s) / 0.15, 0, 1)  # what is grey, more or less
        turned, s = np.full_like(h, hue), np.maximum(s, least)
        v = np.maximum(v, 0.35) if found[0] == "black" else v
    else:
        centre = np.angle(np.exp(1j * np.radians(h[main])).mean(), deg=True)
        away = (h - centre + 180) % 360 - 180
        share = np.clip((75 - np.abs(away)) / 30, 0, 1) * np.clip(s / 0.12, 0, 1)
        # Shades keep a part of their distance: yellow's are orange, which is far from yellow.
        turned = hue + away * 0.35
        s = np.maximum(s, np.minimum(least, 2 * s))
    changed = np.stack([turned % 360 * (256 / 360), np.clip(s * more, 0, 1) * 255, np.clip(v * brighter, 0, 1) * 255], -1)
    new = np.asarray(Image.fromarray(np.rint(changed).clip(0, 255).astype(np.uint8), "HSV").convert("RGB")).astype(np.float32)
    share = (share * inside)[..., None]
    mixed = np.concatenate([pixels[..., :3] * (1 - share) + new * share, pixels[..., 3:]], -1)
    result = Image.fromarray(np.rint(mixed).astype(np.uint8), "RGBA")
    return result if colours(result, 1, LEAST) == [colour] else None


def thing_of(label: str) -> str:
    """A label without the colour that it names."""
    return " ".join(word for word in label.split() if word.lower() not in COLOURS)


def variants(example: tuple[str, Files]) -> list[tuple[str, str, Files]]:
    """(set, key, files) of each variant of an example."""
    key, files = example
    label, about = files["txt"].decode(), json.loads(files["json"])
    found = []
    if about["group"] in MIRRORED and not re.search(SIDES, label.lower()):
        mirrored = opened(files).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        found.append(("mirrored", f"{key}-mirrored", {**files, "webp": webp(mirrored, QUALITY, method=4)}))
    thing = thing_of(label)
    if about["group"] not in COLOURED or not thing:
        return found
    rgba = cut_out(opened(files))
    for colour in TARGETS:
        if held_out(thing, colour) or (image := recoloured(rgba, colour)) is None:
            continue
        said = {"phrase": phrase(thing, colours(image, 2, LEAST)), "group": about["group"]}
        files = {
            "webp": webp(on_white(image), QUALITY, method=4),
            "txt": f"{colour} {thing}".encode(),
            "json": json.dumps(said).encode(),
        }
        found.append(("recoloured", f"{key}-{colour}", files))
    return found


def held_out_pairs(found: Iterable[tuple[str, Files]]) -> list[tuple[str, str]]:
    """(thing, colour) of each combination that is held out, and that no caption has: some things are of that colour."""
    things: dict[str, set[str]] = {}
    said: dict[str, set[str]] = {}
    for _, files in found:
        about, label = json.loads(files["json"]), files["txt"].decode()
        thing = thing_of(label)
        words = re.findall(r"\w+", f"{label} {about['phrase']} {about['tags']}".lower())
        said.setdefault(thing, set()).update(word for word in words if word in COLOURS)
        if thing and about["group"] in COLOURED:
            things[thing] = said[thing]
    return [(thing, colour) for thing in sorted(things) for colour in TARGETS
            if held_out(thing, colour) and colour not in things[thing]]  # fmt: skip


def main() -> None:
    """Write the variants of the shards named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a glob of the tars that data/make_emoji.py makes")
    parser.add_argument("output", type=Path, help="folder for the variants")
    arguments = parser.parse_args()
    found = list(examples(arguments.shards))
    if not found:
        parser.error(f"shards={arguments.shards} {NONE}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        made = [one for each in pool.map(variants, found, chunksize=16) for one in each]
    for name in ("recoloured", "mirrored"):
        write_shards(arguments.output, name, [(key, files) for which, key, files in made if which == name], SHARD_EXAMPLES)
    prompts = [phrase(thing, [colour]) for thing, colour in held_out_pairs(found)]
    (arguments.output / "held_out.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{arguments.output / 'held_out.jsonl'}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
