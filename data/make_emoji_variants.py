"""More emoji out of those in data/emoji, to train on beside them: in other colours, wearing something, and mirrored.

    python data/make_emoji_variants.py 'data/emoji/train-*.tar' runs/emoji_variants

writes recoloured-*.tar ("a purple lemon"), dressed-*.tar ("a lemon with a crown"), mirrored-*.tar of what stays the same so,
and held_out.jsonl: combinations that are in none of them, as prompts for generate.py. What they teach is that words can be put
together.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from emoji_captions import COLOURS, colours, names_of, phrase
from emoji_shards import NONE, Files, examples, hash_of, is_one_in, on_white, opened, webp, write_shards
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
# What things wear, and which emoji that is.
WORN = {"bow": "ribbon", "crown": "crown", "top hat": "top hat", "flower": "hibiscus"}
# Words of which one says that a mirrored picture would be another thing.
SIDES = (
    r"\b(left|right|leftwards|rightwards|clock|thirty|quarter|waxing|waning|chart|writing|abc|button|keycap|number|calendar|hundred"
    r"|banknote|bank|store|hotel|post office|newspaper|medal|8 ball)\b"
)
MOST_SHARED = 20  # emoji that may have a tag by which one of them is called
# One combination in ten is held out, and these, also of what else has such a name ("growing heart").
HELD_OUT = 10
ALWAYS_HELD_OUT = {("cat face", "purple"), ("dog face", "blue"), ("elephant", "pink"), ("banana", "green"), ("lion", "green"),
           ("rocket", "purple"), ("pizza", "blue"), ("owl", "red"), ("rose", "blue"), ("guitar", "green"),
           ("heart", "bow"), ("swan", "crown"), ("frog", "crown"), ("cat face", "top hat"), ("penguin", "bow")}  # fmt: skip


def held_out(thing: str, other: str) -> bool:
    """Whether the combination of a thing with a colour, or with what it wears, is in no variant."""
    always = any(name == other and re.search(rf"\b{known}s?\b", thing) for known, name in ALWAYS_HELD_OUT)
    return always or is_one_in(HELD_OUT, f"{other} {thing}")


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


def dressed(rgba: Image.Image, worn: Image.Image) -> Image.Image:
    """The emoji made smaller, with another one on its top."""
    size = rgba.width
    small = rgba.resize((round(0.78 * size),) * 2, Image.Resampling.LANCZOS)
    rows, columns = np.nonzero(np.asarray(small)[..., 3] > 127)
    head = columns[rows < rows.min() + 0.2 * (rows.max() - rows.min() + 1)]
    worn = worn.crop(worn.getbbox(alpha_only=True))
    worn = worn.resize((round(0.38 * size), round(0.38 * size * worn.height / worn.width)), Image.Resampling.LANCZOS)
    result = Image.new("RGBA", rgba.size, (255, 255, 255, 0))
    left, top = (size - small.width) // 2, size - small.height
    result.alpha_composite(small, (left, top))
    middle, lowest = left + round(float(np.median(head))), top + int(rows.min()) + round(0.45 * worn.height)
    place = np.clip((middle - worn.width // 2, lowest - worn.height), 0, (size - worn.width, size - worn.height))
    result.alpha_composite(worn, (int(place[0]), int(place[1])))
    return result


def wearing(thing: str, worn: str) -> str:
    """ "lion with a crown"."""
    return f"{thing} {'and' if ' with ' in thing else 'with'} a {worn}"


def worn_images(found: Iterable[tuple[str, Files]]) -> dict[str, Image.Image]:
    """What is worn, by its name in WORN."""
    labels = {label: name for name, label in WORN.items()}
    return {labels[label]: cut_out(opened(files)) for _, files in found if (label := files["txt"].decode()) in labels}


def own_tags(found: Iterable[tuple[str, Files]]) -> dict[str, list[str]]:
    """By its label, what an emoji is also called, and no other is ("car" of "automobile"): tags that few have, of no colour."""
    about = {files["txt"].decode(): json.loads(files["json"])["tags"] for _, files in found}
    tags = {label: some.removeprefix(label).split(", ")[1:] for label, some in about.items()}
    count = Counter(tag for some in tags.values() for tag in some)
    others = {thing_of(label) for label in tags}
    fits = lambda tag: count[tag] <= MOST_SHARED and tag not in others and thing_of(tag) == tag
    return {label: [tag for tag in some if fits(tag)] for label, some in tags.items()}


def called(name: str, tags: Sequence[str], *others: str) -> str:
    """One of its tags, another one with each colour and what is worn; its name where there is none."""
    words = [tag for tag in tags if not any(held_out(tag, other) for other in others)]
    return words[hash_of(" ".join([name, *others])) % len(words)] if words else name


def thing_of(label: str) -> str:
    """A label without the colour that it names."""
    named = rf"(?<!\S)((light|dark) )?({'|'.join([*COLOURS, 'grey'])})(?!\S)"
    return " ".join(re.sub(named, "", label, flags=re.IGNORECASE).split())


def coloured(thing: str, colour: str, image: Image.Image) -> str:
    """The thing with the colour that it was given and another that is seen, unless that combination is held out."""
    also = [other for other in colours(image, 2, LEAST) if other != colour and not held_out(thing, other)]
    return phrase(thing, [colour, *also[:1]])


class Variant(NamedTuple):
    """One more picture: its set, the end of its key, its name, and what else is said of it, by columns."""

    kind: str
    end: str
    image: Image.Image
    text: str
    said: dict[str, str]


def variants(worn: Mapping[str, Image.Image], tags: Mapping[str, Sequence[str]], example: tuple[str, Files]
             ) -> list[tuple[str, str, Files]]:  # fmt: skip
    """(set, key, files) of each variant of an example; `worn` is what things may wear, `tags` what they are called."""
    key, files = example
    label, about = files["txt"].decode(), json.loads(files["json"])
    made: list[Variant] = []
    if about["group"] in MIRRORED and not re.search(SIDES, label.lower()):
        mirrored = opened(files).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        said = {**about, "called": phrase(called(label, tags[label]), [])}
        made.append(Variant("mirrored", "mirrored", mirrored, label, said))
    if about["group"] in COLOURED and thing_of(label):
        made += composed(label, about["phrase"], cut_out(opened(files)), tags[label], worn)
    said_of = lambda one: json.dumps({**one.said, "group": about["group"]}).encode()
    return [
        (
            one.kind,
            f"{key}-{one.end}",
            {"webp": webp(one.image, QUALITY, method=4), "txt": one.text.encode(), "json": said_of(one)},
        )
        for one in made
    ]


def composed(label: str, said_of_it: str, rgba: Image.Image, tags: Sequence[str], worn: Mapping[str, Image.Image]
             ) -> Iterator[Variant]:  # fmt: skip
    """An emoji in other colours, and wearing each thing once, in other colours where it has some."""
    thing = thing_of(label)
    images = {colour: image for colour in TARGETS
              if not held_out(thing, colour) and (image := recoloured(rgba, colour)) is not None}  # fmt: skip
    for colour, image in images.items():
        said = {"phrase": coloured(thing, colour, image), "called": phrase(called(thing, tags, colour), [colour])}
        yield Variant("recoloured", colour, on_white(image), f"{colour} {thing}", said)
    choices = [("", rgba), *images.items()]
    for number, name in enumerate(worn):
        if held_out(thing, name) or thing == WORN[name]:
            continue
        colour, image = choices[(hash_of(label) + number) % len(choices)]
        text, said = label, {"phrase": said_of_it, "called": phrase(called(label, tags, name), [])}
        if colour:
            text = f"{colour} {thing}"
            said = {"phrase": coloured(thing, colour, image), "called": phrase(called(thing, tags, colour, name), [colour])}
        said = {column: wearing(words, name) for column, words in said.items()}
        yield Variant("dressed", name.replace(" ", "-"), on_white(dressed(image, worn[name])), wearing(text, name), said)


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


def held_out_dresses(found: Iterable[tuple[str, Files]]) -> list[tuple[str, str]]:
    """(thing, what it wears) of each combination that is held out."""
    things = {thing_of(files["txt"].decode()) for _, files in found if json.loads(files["json"])["group"] in COLOURED}
    return [(thing, name) for thing in sorted(things - {""}) for name in WORN if held_out(thing, name) and thing != WORN[name]]


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
        of = partial(variants, worn_images(found), own_tags(found))
        made = [one for each in pool.map(of, found, chunksize=16) for one in each]
    for name in ("recoloured", "dressed", "mirrored"):
        write_shards(arguments.output, name, [(key, files) for which, key, files in made if which == name], SHARD_EXAMPLES)
    prompts = [phrase(thing, [colour]) for thing, colour in held_out_pairs(found)]
    prompts += [wearing(phrase(thing, []), name) for thing, name in held_out_dresses(found)]
    (arguments.output / "held_out.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{arguments.output / 'held_out.jsonl'}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
