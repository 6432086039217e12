"""Images on disk."""

import io
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin

from maxdiff.weights.tensors import write_atomically

GAP = 4  # pixels between the images of a grid


def grid(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Images uint8 [n h w 3] side by side, row by row, with white gaps -> uint8 [H W 3].

    Args:
        columns: images in a row; by default the grid is as nearly square as can be.

    Raises:
        ValueError: for images of another shape or dtype, or columns below 1.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or not len(images) or images.dtype != np.uint8:
        raise ValueError(f"images is {images.dtype.name} {list(images.shape)}, but must be uint8 [n h w 3] with n >= 1")
    n, h, w, _ = images.shape
    columns = math.ceil(math.sqrt(n)) if columns is None else columns
    if columns < 1:
        raise ValueError(f"columns={columns} must be at least 1")
    columns = min(columns, n)
    rows = -(-n // columns)
    sheet = np.full((rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (h + GAP), i % columns * (w + GAP)
        sheet[top : top + h, left : left + w] = image
    return sheet


def read_image(path: str | Path, height: int, width: int) -> np.ndarray:
    """An image file as uint8 [height width 3]: its middle, scaled to cover that; transparent pixels are white.

    Raises:
        ValueError, OSError: if it cannot be read.
    """
    return np.asarray(_read(path, "RGBA", (height, width), Image.Resampling.LANCZOS))


def read_mask(path: str | Path, height: int, width: int) -> np.ndarray:
    """A mask file as float32 [height width 1], 0 to 1, of its lightness; fitted as `read_image` fits."""
    return np.asarray(_read(path, "L", (height, width), Image.Resampling.BILINEAR), np.float32)[..., None] / 255


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height; raises ValueError unless the file begins as an image does. Its pixels are not read."""
    with _opened(path) as image:
        return image.size


def _opened(path: str | Path) -> Image.Image:
    try:
        return Image.open(Path(path).expanduser())
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None


def _read(path: str | Path, mode: str, size: tuple[int, int], resampling: Image.Resampling) -> Image.Image:
    try:
        with _opened(path) as image:
            image = ImageOps.exif_transpose(image).convert(mode)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None
    if mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return ImageOps.fit(image, (size[1], size[0]), resampling)


def read_texts(path: Path) -> dict[str, str] | None:
    """The texts of a PNG that `write_png` wrote; {} of another image, None if there is none that is whole."""
    try:
        with Image.open(path) as image:
            texts = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
            image.load()
            return texts
    except (OSError, SyntaxError):  # Pillow's word for a damaged PNG is SyntaxError
        return None


def write_png(path: Path, image: np.ndarray, metadata: Mapping[str, str] | None = None) -> None:
    """Write an image uint8 [h w 3]; the file appears whole or not at all.

    Args:
        metadata: texts that go with it (prompt, seed, ...), as PNG tEXt, or iTXt where Latin-1 cannot spell them.

    Raises:
        ValueError: for an image of another shape or dtype.
        OSError: if the disk is full or the folder not writable.
    """
    if image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
        raise ValueError(f"image is {image.dtype.name} {list(image.shape)}, but must be uint8 [h w 3]")
    texts = PngImagePlugin.PngInfo()
    for key, value in (metadata or {}).items():
        texts.add_text(key, value)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png", pnginfo=texts)
    write_atomically(path, [buffer.getbuffer()])
