"""From an image file's bytes to the square of pixels that is trained on."""

import io
import re
from typing import NamedTuple

import numpy as np
from PIL import Image

from maxdiff.data.examples import BadExample

# A file may be of another format than its name says. Formats that Pillow hands to other programs (EPS)
# have no place in a data set.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
EXIF_ORIENTATION = 0x0112
# How to turn an image whose EXIF says this orientation (Exif 2.32, 4.6.4.A), as ImageOps.exif_transpose does.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)
# What a draw of random numbers is for, so that no two purposes share numbers.
CROP_AND_FLIP, CAPTION = 1, 2


class Picture(NamedTuple):
    """An image as it is trained on, and what SDXL is told of it.

    Attributes:
        image: uint8 [resolution resolution 3].
        original_size: (height, width) of the upright image in its file, in pixels.
        crop: (top, left) of the square, in pixels of the image resized (and flipped, if it was).
    """

    image: np.ndarray
    original_size: tuple[int, int]
    crop: tuple[int, int]


def random_words(seed: int, position: int, purpose: int) -> list[int]:
    """Four random 64-bit numbers for this example and purpose, the same on every host.

    Philox's raw words are used because their values are fixed by its definition (Salmon et al. 2011);
    those of numpy's distributions may change with its version.
    """
    key = purpose << 64 | seed % 2**64
    return [int(word) for word in np.random.Philox(key=key, counter=position).random_raw(4)]


def make_picture(
    data: bytes, key: str, words: list[int], resolution: int, center_crop: bool = True, random_flip: bool = False
) -> Picture:
    """Decode an image file, resize its shorter side to `resolution`, flip it perhaps and crop a square.

    Transparency is flattened on white. As diffusers' SDXL script does it, the flip comes before the crop.

    Args:
        data: the file.
        key: the example's name, for errors.
        words: random numbers, see `random_words`.
        resolution: side of the square, in pixels.
        center_crop: crop the middle; if false, anywhere.
        random_flip: mirror half of the images.

    Raises:
        BadExample: if the bytes are no image, or a damaged one.
    """
    try:
        image, (width, height) = _decode(data, resolution)
        short = min(width, height)
        # torchvision's Resize rounds the longer side down.
        wide, high = resolution * width // short, resolution * height // short
        if center_crop:
            top, left = round((high - resolution) / 2), round((wide - resolution) / 2)
        else:
            top, left = (words[0] * (high - resolution + 1)) >> 64, (words[1] * (wide - resolution + 1)) >> 64
        flip = random_flip and words[2] >> 63 == 1
        # The square is all that is resized: a strip of 1 x 10,000 pixels would become 5 GB at 512 pixels.
        start = wide - resolution - left if flip else left
        x, y = image.width / wide, image.height / high
        box = (start * x, top * y, (start + resolution) * x, (top + resolution) * y)
        square = np.asarray(image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box))
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises a dozen types for damaged files
        # Pillow names no file but an object in memory.
        reason = re.sub(r" <_io\.BytesIO object at 0x\w+>", "", str(error))
        raise BadExample(key, f"its image cannot be decoded ({type(error).__name__}: {reason})") from None
    return Picture(np.ascontiguousarray(square[:, ::-1]) if flip else square, (height, width), (top, left))


def _decode(data: bytes, resolution: int) -> tuple[Image.Image, tuple[int, int]]:
    """The image, upright, RGB, perhaps at reduced scale; and its (width, height) at full scale."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        # A JPEG is decoded at 1/2, 1/4 or 1/8 scale where that leaves twice the pixels that are wanted.
        image.draft(None, (2 * resolution, 2 * resolution))
        orientation = image.getexif().get(EXIF_ORIENTATION, 1)
        flat = _flatten(image)
    if orientation in TURNS:
        flat = flat.transpose(TURNS[orientation])
    return flat, (height, width) if orientation in SIDEWAYS else (width, height)


def _flatten(image: Image.Image) -> Image.Image:
    """As RGB, on white where it is transparent."""
    if image.has_transparency_data:
        flat = Image.new("RGBA", image.size, "white")
        flat.alpha_composite(image.convert("RGBA"))
        return flat.convert("RGB")
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
