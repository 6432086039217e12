"""What training will see of its data: counts, sizes, captions, bad examples, and pictures as they are trained on.

    python -m maxdiff.data.inspect configs/base15.yml train_data_dir='shards/*.tar' output_dir=. [examples=1000]

Looks at the first examples of the order in which training takes them; writes inspect.png into output_dir.
"""

import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from maxdiff import bucket, build, command, inputs
from maxdiff.config import Config
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.examples import BadExample
from maxdiff.data.mixed import examples_at
from maxdiff.data.pipeline import Loaded, load_example
from maxdiff.images import grid, write_png
from maxdiff.weights.tokenizer import CLIPTokenizer, published_tokenizer

EXAMPLES = 1000  # looked at, if nothing is said
SHOWN = 16  # pictures on the sheet
SIDE, LINES = 192, 4  # of a picture on the sheet, pixels; of its caption
BAD = 10  # bad examples that are named


def main(argv: Sequence[str]) -> int:
    """The command line: as train.py's, and examples=N."""
    rest, examples = command.split_number(argv, "examples")

    def action(config: Config) -> None:
        build.require(config, "train_data_dir")
        for line in inspect(config, examples() or EXAMPLES):
            print(line, flush=True)

    return command.run("maxdiff.data.inspect", rest, action, "[examples=N]")


def inspect(config: Config, examples: int) -> Iterator[str]:
    """Lines about the training data; the last one says where the sheet of pictures is.

    Args:
        examples: how many are read.

    Raises:
        ValueError, OSError: for data that training would refuse.
    """
    if bucket.is_bucket(config.run.output_dir):
        raise ValueError(f"output_dir={config.run.output_dir!r} is in a bucket (allowed here: a folder)")
    source = inputs.open_training(config)
    if isinstance(source, EncodedSource):
        yield f"{len(source)} examples, encoded in {source.folder}{f' from {source.path}' if source.path else ''}"
        yield from (f"  {name}: {value!r}" for name, value in source.made_of.items())
        yield from (f"  {name}: {list(shape)} {dtype.name}" for name, (shape, dtype) in source.shapes().items())
        return
    count = min(examples, len(source))
    where = ", ".join(path for path, _ in config.data.data_mix) or config.data.train_data_dir
    yield f"{len(source)} examples in {where}; looking at {count} of them, in training's order"
    started = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        plan = inputs.with_buckets(config, inputs.make_plan(config), source)
        wanted = examples_at(source, plan.seed, np.arange(count), plan.shuffle_block)[1].tolist()
        size = lambda index: plan.buckets.shapes[plan.buckets.bucket[index]] if plan.buckets else None
        loaded = list(pool.map(lambda i: load_example(source, plan, i, wanted[i], size(wanted[i])), range(count)))
    rate = count / (time.perf_counter() - started)
    yield f"read and decoded at {rate:.0f} examples/s by {os.cpu_count()} threads"
    yield from _sizes(loaded)
    if plan.buckets:
        yield from plan.buckets.describe(config.batch.global_batch_size or config.batch.per_device_batch_size)
    yield from _captions([example.caption for example in loaded], published_tokenizer())
    yield from _bad([example.bad[0] for example in loaded if example.bad], count)
    path = Path(config.run.output_dir or ".") / "inspect.png"
    write_png(path, sheet(loaded[:SHOWN]))
    yield f"wrote {path}: the first {min(SHOWN, count)}, as they are trained on"


def sheet(loaded: Sequence[Loaded]) -> np.ndarray:
    """Pictures with their captions below them, uint8 [h w 3]."""
    font = ImageFont.load_default(12)
    tiles = []
    for example in loaded:
        tile = Image.new("RGB", (SIDE, SIDE + 14 * LINES + 4), "white")
        tile.paste(ImageOps.contain(Image.fromarray(example.picture.image), (SIDE, SIDE), Image.Resampling.LANCZOS))
        lines = textwrap.wrap(example.caption, 29, max_lines=LINES, placeholder=" ...") or ["(no caption)"]
        ImageDraw.Draw(tile).multiline_text((2, SIDE + 2), "\n".join(lines), "black", font, spacing=2)
        tiles.append(np.asarray(tile))
    return grid(np.stack(tiles))


def _sizes(loaded: Sequence[Loaded]) -> Iterator[str]:
    sizes = np.array([example.picture.original_size for example in loaded])
    trained = np.array([example.picture.image.shape[:2] for example in loaded])
    yield _spread("shorter side, pixels", sizes.min(1))
    yield _spread("width / height", sizes[:, 1] / sizes[:, 0], "{:.2f}")
    scale = trained / sizes
    yield f"enlarged: {_share(scale.max(1) > 1)}"
    yield f"cut off by the crop: {100 * (1 - (scale.min(1) / scale.max(1)).mean()):.0f}% of the pixels"


def _captions(captions: Sequence[str], tokenizer: CLIPTokenizer) -> Iterator[str]:
    lengths = np.array([tokenizer.length(caption) for caption in captions])
    yield _spread("tokens of a caption, start and end included", lengths)
    yield f"captions cut at {tokenizer.max_length} tokens: {_share(lengths > tokenizer.max_length)}"
    yield f"captions without a word: {_share(lengths <= 2)}"
    most, times = Counter(captions).most_common(1)[0]
    often = f"; the most frequent, {times} times: {most[:60]!r}" if times > 1 else ""
    yield f"different captions: {len(set(captions))}{often}"


def _bad(errors: Sequence[BadExample], count: int) -> Iterator[str]:
    yield f"bad examples, replaced by the next: {_share(np.arange(count) < len(errors))}"
    yield from (f"  {error}" for error in errors[:BAD])
    if len(errors) > BAD:
        yield f"  and {len(errors) - BAD} more"


def _spread(name: str, values: np.ndarray, form: str = "{:.0f}") -> str:
    least, low, middle, high, most = (form.format(x) for x in np.quantile(values, [0, 0.05, 0.5, 0.95, 1]))
    return f"{name}: {middle} in the middle, {low} to {high} for 90%, {least} to {most} for all"


def _share(which: np.ndarray) -> str:
    return f"{int(which.sum())} of {len(which)} ({100 * which.mean():.1f}%)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
