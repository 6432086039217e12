"""Encoding images and captions once, timed: what maxdiff.data.encode does, with random weights.

    python benchmarks/encode.py --model sd15 --batch 32 --data 'data/emoji/train-*.tar' --resolution 512

Prints one JSON line: examples_per_s, of the batches after the first, reading, decoding and writing included; bytes that an
example takes; seconds of everything, compilation included.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from train_step import configuration, digits

from maxdiff import build, inputs
from maxdiff.data.encode import encode
from maxdiff.task import make_task


def main(argv: Sequence[str]) -> int:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=ARCHITECTURES)
    parser.add_argument("--resolution", type=int, default=512, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=32, help="examples that a device takes at once")
    parser.add_argument("--data", default="data/emoji/train-*.tar")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"train_data_dir={args.data}", "center_crop=true", f"dataset_save_location={folder}"]
        config = configuration(args.model, args.resolution, args.batch, overrides)
        task = make_task(config, build.layout_of(config), None)
        source = inputs.open_examples(config, "train_data_dir")
        started = time.perf_counter()
        pace = encode(config, task, source, Path(folder) / "encoded")
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in (Path(folder) / "encoded").iterdir())
    print(json.dumps({
        "model": args.model, "resolution": args.resolution, "batch": args.batch, "examples": len(source),
        "examples_per_s": digits(pace.rate()), "seconds": round(seconds, 1), "bytes_per_example": size // len(source),
        "device": jax.devices()[0].device_kind, "devices": jax.device_count(), "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
