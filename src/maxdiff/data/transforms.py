"""From an image file's bytes to the square, or other rectangle, of pixels that is trained on."""

import io
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from maxdiff.data.examples import BadExample

try:
    import cykooz_resizer as simd
except ImportError:  # it has no wheel for Linux on ARM
    simd = None

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
# A JPEG is decoded at 1/2, 1/4 or 1/8 scale where that leaves this many times the pixels that are wanted. What that changes
# is no more, by mean and worst image, than what BICUBIC instead of LANCZOS would: docs/INPUT_SPEED.md.
KEPT = 1.6
Size = tuple[int, int]
Box = tuple[float, float, float, float]
# What a draw of random numbers is for, so that no two purposes share numbers.
CROP_AND_FLIP, CAPTION = 1, 2


class Picture(NamedTuple):
    """An image as it is trained on, and what SDXL is told of it.

    Attributes:
        image: uint8 [height width 3].
        original_size: (height, width) of the upright image in its file, in pixels.
        crop: (top, left) of what is kept, in pixels of the image resized (and flipped, if it was).
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
    data: bytes,
    key: str,
    words: list[int],
    size: int | Size,
    center_crop: bool = True,
    random_flip: bool = False,
    resizer: str = "simd",
) -> Picture:
    """Decode an image file, resize it to cover `size`, flip it perhaps and crop what is beyond.

    Transparency is flattened on white. As diffusers' SDXL script does it, the flip comes before the crop.

    Args:
        data: the file.
        key: the example's name, for errors.
        words: random numbers, see `random_words`.
        size: side of a square, or (height, width), in pixels.
        center_crop: crop the middle; if false, anywhere.
        random_flip: mirror half of the images.
        resizer: one of RESIZERS.

    Raises:
        BadExample: if the bytes are no image, or a damaged one.
    """
    try:
        h, w = (size, size) if isinstance(size, int) else size
        image, stored, scale, orientation = _decode(data, (h, w))
        width, height = stored[::-1] if orientation in SIDEWAYS else stored
        # Whichever side comes out shorter is as wanted, and the other, as in torchvision's Resize, rounded down.
        wide, high = (w, w * height // width) if height * w >= width * h else (h * width // height, h)
        if center_crop:
            top, left = round((high - h) / 2), round((wide - w) / 2)
        else:
            top, left = (words[0] * (high - h + 1)) >> 64, (words[1] * (wide - w + 1)) >> 64
        flip = random_flip and words[2] >> 63 == 1
        # What is kept is all that is resized: a strip of 1 x 10,000 pixels would become 5 GB at 512 pixels.
        start = wide - w - left if flip else left
        x, y = width / wide, height / high
        box = _box_in_file((start * x, top * y, (start + w) * x, (top + h) * y), stored, orientation)
        # A sum may lie a rounding error beyond the image, which Pillow refuses.
        start_x, start_y, end_x, end_y = (edge / scale for edge in box)
        box = (max(start_x, 0), max(start_y, 0), min(end_x, image.width), min(end_y, image.height))
        pixels = RESIZERS[resizer](image, (h, w) if orientation in SIDEWAYS else (w, h), box)
        if orientation in TURNS:  # now, when it is small
            pixels = np.asarray(Image.fromarray(pixels).transpose(TURNS[orientation]))
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises a dozen types for damaged files
        # Pillow names no file but an object in memory.
        reason = re.sub(r" <_io\.BytesIO object at 0x\w+>", "", str(error))
        raise BadExample(key, f"its image cannot be decoded ({type(error).__name__}: {reason})") from None
    return Picture(np.ascontiguousarray(pixels[:, ::-1]) if flip else pixels, (height, width), (top, left))


def check_resizer(name: str) -> None:
    """Raise ValueError if this machine lacks what `name` of RESIZERS needs."""
    if name == "simd" and simd is None:
        raise ValueError("image_resizer=simd needs a package: pip install cykooz-resizer (allowed without it: pillow)")


def _by_simd(image: Image.Image, size: Size, box: Box) -> np.ndarray:
    """A box of an RGB image as uint8 [height width 3], by LANCZOS; size is (width, height)."""
    assert simd is not None
    left, top, right, bottom = box
    lanczos = simd.ResizeAlg.convolution(simd.FilterType.lanczos3)
    options = simd.ResizeOptions(lanczos, crop_box=simd.CropBox(left, top, right - left, bottom - top))
    made = simd.ImageData(*size, simd.PixelType.U8x3)
    simd.Resizer().resize(simd.ImageData(*image.size, simd.PixelType.U8x3, image.tobytes()), made, options)
    return np.frombuffer(made.get_buffer(), np.uint8).reshape(size[1], size[0], 3)


def _by_pillow(image: Image.Image, size: Size, box: Box) -> np.ndarray:
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS, box=box))


# LANCZOS by either, in 8 bits between the two directions. They take the directions in another order, so that pixels differ
# (56 dB) and both are as far from LANCZOS in real numbers: docs/INPUT_SPEED.md.
RESIZERS: dict[str, Callable[[Image.Image, Size, Box], np.ndarray]] = {"simd": _by_simd, "pillow": _by_pillow}


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) of an image as its EXIF says it stands."""
    width, height = image.size
    return (height, width) if image.getexif().get(EXIF_ORIENTATION, 1) in SIDEWAYS else (width, height)


def _decode(data: bytes, size: Size) -> tuple[Image.Image, tuple[int, int], float, int]:
    """The RGB image as it lies in its file, perhaps reduced; its full (width, height); how often reduced; its orientation."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        stored, orientation = image.size, image.getexif().get(EXIF_ORIENTATION, 1)
        height, width = size[::-1] if orientation in SIDEWAYS else size
        drafted = image.draft(None, (math.ceil(KEPT * width), math.ceil(KEPT * height)))
        # The sides of the reduced image are rounded up: 975 pixels at 1/2 are 488, of which the image fills 487.5.
        scale = stored[0] / drafted[1][2] if drafted else 1.0
        return flatten(image), stored, scale, orientation


def _box_in_file(box: Box, size: tuple[int, int], orientation: int) -> Box:
    """Where (left, top, right, bottom) of the upright image lies in the file's image of this (width, height)."""
    left, top, right, bottom = box
    width, height = size[::-1] if orientation in SIDEWAYS else size
    if orientation in (2, 3, 6, 7):
        left, right = width - right, width - left
    if orientation in (3, 4, 7, 8):
        top, bottom = height - bottom, height - top
    return (top, left, bottom, right) if orientation in SIDEWAYS else (left, top, right, bottom)


def flatten(image: Image.Image) -> Image.Image:
    """As RGB, on white where it is transparent."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            flat = Image.new("RGBA", image.size, "white")
            flat.alpha_composite(image)
            image = flat
    elif image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "RGB":  # `convert` would copy it
        image.load()
        return image
    return image.convert("RGB")
