"""What is said of an emoji besides its name: a phrase with its colours, and its tags."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray", "white")
# Hue in degrees up to which a colour goes that is bright and saturated; red begins again at 345.
HUES = (
    (14, "red"),
    (36, "orange"),
    (68, "yellow"),
    (165, "green"),
    (252, "blue"),
    (295, "purple"),
    (345, "pink"),
    (361, "red"),
)
FURTHER = 0.2  # share of the pixels from which a second colour is named
SHADES = {"orange": "yellow", "gray": "white", "brown": "orange"}
# emojibase's groups, by their numbers.
GROUPS = ("smileys", "people", "components", "animals", "food", "travel", "activities", "objects", "symbols", "flags")


def captions(rgba: Image.Image, about: Mapping[str, Any]) -> dict[str, str]:
    """{"phrase": "a red and white mushroom", "tags": "mushroom, fungus, toadstool", "group": "food"}.

    Args:
        rgba: the emoji, transparent where it is not.
        about: emojibase's label, tags, group and skin_tone.
    """
    label = about["label"]
    tags = [tag for tag in about["tags"] if tag.lower() != label.lower()]
    group = GROUPS[about["group"]]
    named = any(word in COLOURS for word in label.lower().replace("-", " ").split())
    most, least = (3, 0.28) if group == "flags" else (2, 0.35)
    seen = [] if named or about["skin_tone"] else colours(rgba, most, least)
    return {"phrase": phrase(label, seen), "tags": ", ".join([label, *tags]), "group": group}


def phrase(label: str, seen: Sequence[str]) -> str:
    """A label as one would say it, with these colours: "flag: Japan" is "the white and red flag of Japan"."""
    name, _, rest = label.partition(": ")
    if name == "flag":
        return f"the {_listed(seen)}flag of {rest}"
    if rest:
        details = ["no hair" if part == "bald" else part.replace(" skin tone", " skin") for part in rest.split(", ")]
        name += {"family": " of ", "kiss": " of ", "couple with heart": ", ", "keycap": " "}.get(name, " with ") + " and ".join(
            details
        )
    words = f"{_listed(seen)}{name}"
    plural = name.endswith("s") and not name.endswith(("ss", "us"))
    return words if plural else f"{'an' if words[0] in 'aeiouAEIO' else 'a'} {words}"


def colours(rgba: Image.Image, most: int, least: float) -> list[str]:
    """Names of at most so many colours of a picture, the commonest first; [] if none has this share of its pixels."""
    pixels = np.asarray(rgba).reshape(-1, 4)
    pixels = pixels[pixels[:, 3] >= 128, :3].astype(np.float32) / 255
    if not len(pixels):
        return []
    names = names_of(pixels)
    shares = sorted(((np.mean(names == i), colour) for i, colour in enumerate(COLOURS)), reverse=True)
    if shares[0][0] < least:
        return []
    found = [shares[0][1], *(colour for share, colour in shares[1:most] if share >= FURTHER)]
    # Yellow is shaded with orange, and gray with white.
    return [colour for colour in found if not (colour in SHADES and SHADES[colour] in found)]


def names_of(rgb: np.ndarray) -> np.ndarray:
    """The number in COLOURS of each pixel [n 3], by hue, saturation and value."""
    value, low = rgb.max(1), rgb.min(1)
    spread = np.maximum(value - low, 1e-6)
    saturation = (value - low) / np.maximum(value, 1e-6)
    red, green, blue = rgb.T
    hue = np.where(
        value == red, (green - blue) / spread, np.where(value == green, 2 + (blue - red) / spread, 4 + (red - green) / spread)
    )
    hue = hue * 60 % 360
    number = COLOURS.index
    name = np.array([number(colour) for _, colour in HUES])[np.searchsorted([end for end, _ in HUES], hue, side="right")]
    warm = (hue < 40) | (hue >= 345)
    name = np.where(warm & (value < 0.65), number("brown"), name)
    name = np.where((name == number("red")) & (saturation < 0.5) & (value > 0.8), number("pink"), name)
    name = np.where((name == number("pink")) & (value < 0.55), number("purple"), name)
    grey = np.where(value > 0.85, number("white"), np.where(value > 0.3, number("gray"), number("black")))
    tinted = (hue >= 230) & (hue < 300)  # as most of these greys are
    name = np.where(saturation < np.where(tinted, 0.35, 0.18), grey, name)
    return np.where(value < 0.2, number("black"), name)


def _listed(words: Sequence[str]) -> str:
    """ "red, white and blue ", or "" of none."""
    return f"{', '.join(words[:-1])} and {words[-1]} " if len(words) > 1 else "".join(f"{word} " for word in words)
