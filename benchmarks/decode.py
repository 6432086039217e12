"""Ways from an image file to a square: their time, and how far they are from full decoding and LANCZOS.

    python benchmarks/decode.py --jpeg 1080                     the repository's emoji, as large JPEGs
    python benchmarks/decode.py --data 'photos-*.tar' --jpeg 720 768 1080

Prints one JSON line a way, resolution and size of JPEG (without --jpeg, of the files as they are). `draft` is how many
times the wanted pixels a JPEG decoded at 1/2, 1/4 or 1/8 scale must still have (null: it is decoded in full),
`reducing_gap` Pillow's option of that name, `maxdiff` is make_picture, by either of its resizers. Milliseconds are of
processor time, an image's the least of `--repeats`, and of these the mean. PSNR is in dB, over the images: its mean and
least. Then one line with the milliseconds that a batch of the images takes in each stage.
"""

import argparse
import functools
import io
import itertools
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from input_pipeline import EMOJI, digits, jpeg, read_tars

from maxdiff.data.order import example_index
from maxdiff.data.transforms import flatten, make_picture
from maxdiff.weights.tokenizer import published_tokenizer

FILTERS = Image.Resampling
# (draft, filter, reducing_gap)
WAYS = [
    (None, FILTERS.LANCZOS, None),
    (None, FILTERS.BICUBIC, None),
    (None, FILTERS.BILINEAR, None),
    (None, FILTERS.LANCZOS, 1.0),
    (1.0, FILTERS.LANCZOS, None),
    (1.6, FILTERS.LANCZOS, None),
    (2.0, FILTERS.LANCZOS, None),
]


def square(data: bytes, resolution: int, draft: float | None, filter_: FILTERS, gap: float | None) -> np.ndarray:
    """The middle of the image, uint8 [resolution resolution 3]."""
    with Image.open(io.BytesIO(data)) as image:
        # A draft's sides are rounded up; what it returns says which part the image fills.
        wanted = draft and round(draft * resolution)
        drafted = image.draft(None, (wanted, wanted)) if wanted else None
        width, height = drafted[1][2:] if drafted else image.size
        image = flatten(image)
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((resolution, resolution), filter_, box=box, reducing_gap=gap))


def lossless(data: bytes) -> bytes:
    """The image, decoded in full, as a file that is not compressed."""
    file = io.BytesIO()
    flatten(Image.open(io.BytesIO(data))).save(file, "BMP")
    return file.getvalue()


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """(milliseconds of processor time, the least of some calls; the last result)."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        result = function()
        taken.append(1e3 * (time.process_time() - began))
    return min(taken), result


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """In dB; 99 for equal images."""
    error = np.mean((a.astype(float) - b) ** 2)
    return min(99.0, 10 * np.log10(255**2 / max(error, 1e-9)))


def ways(images: Sequence[bytes], resolution: int, repeats: int) -> list[dict[str, Any]]:
    """A line for each way."""
    whole = [square(data, resolution, *WAYS[0]) for data in images]
    named: list[tuple[dict[str, Any], Callable[[bytes], np.ndarray], list[np.ndarray]]] = [
        ({"way": "pillow", "draft": draft, "filter": filter_.name.lower(), "reducing_gap": gap},
         lambda data, way=(draft, filter_, gap): square(data, resolution, *way), whole)
        for draft, filter_, gap in WAYS
    ]  # fmt: skip
    # Its square lies on whole pixels of the resized image: compared with Pillow's LANCZOS of the same pixels, in no JPEG.
    ours = lambda data, resizer="simd": make_picture(data, "", [0] * 4, resolution, resizer=resizer).image
    wanted = [ours(lossless(data), "pillow") for data in images]
    for resizer in ("simd", "pillow"):
        named.append(({"way": "maxdiff", "resizer": resizer}, functools.partial(ours, resizer=resizer), wanted))
    lines = []
    for name, way, wanted in named:
        took, got = zip(*(timed(lambda data=data, way=way: way(data), repeats) for data in images), strict=True)
        ratios = [psnr(a, b) for a, b in zip(got, wanted, strict=True)]
        worst = max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(got, wanted, strict=True))
        lines.append({**name, "ms": digits(statistics.mean(took)), "psnr": digits(statistics.mean(ratios)),
                      "psnr_min": digits(min(ratios)), "max_error": worst})  # fmt: skip
    return lines


def stages(examples: Sequence[tuple[bytes, bytes]], resolution: int, repeats: int) -> dict[str, float]:
    """Milliseconds of what a batch of these examples is made of; `pipe` is the pickling alone, both ends."""
    tokenizer, texts = published_tokenizer(), [caption.decode() for _, caption in examples]
    tokenizer(texts)
    pictures = [make_picture(image, "", [0] * 4, resolution).image for image, _ in examples]
    stacked = np.stack(pictures)
    parts: dict[str, Callable[[], Any]] = {
        "pictures_ms": lambda: [make_picture(image, "", [0] * 4, resolution) for image, _ in examples],
        "order_ms": lambda: example_index(0, 10**6, np.arange(len(examples))),
        "tokens_ms": lambda: tokenizer(texts),
        "stack_ms": lambda: np.stack(pictures),
        "pipe_ms": lambda: pickle.loads(pickle.dumps(stacked, protocol=5)),
    }
    return {name: digits(timed(part, repeats)[0]) for name, part in parts.items()}


def main(argv: Sequence[str]) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(EMOJI), help="tars of captioned images: a path, a glob or brace notation")
    parser.add_argument("--jpeg", nargs="+", type=int, metavar="SIDE", help="as JPEGs of these shorter sides, pixels")
    parser.add_argument("--examples", type=int, default=32, help="how many images")
    parser.add_argument("--resolution", nargs="+", type=int, default=[256, 512], help="side of the squares, pixels")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    examples = read_tars(args.data, args.examples)
    for side, resolution in itertools.product(args.jpeg or [None], args.resolution):
        made = [(jpeg(image, side) if side else image, caption) for image, caption in examples]
        about = {"jpeg": side, "resolution": resolution, "images": len(made)}
        for line in ways([image for image, _ in made], resolution, args.repeats):
            print(json.dumps({**about, **line}), flush=True)
        print(json.dumps({**about, "way": "stages", **stages(made, resolution, args.repeats)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
