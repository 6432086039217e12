"""A large set of tars: what it costs to index, to open, to draw from in a shuffled order, and to read so.

    python benchmarks/data_order.py                                 a million examples, 2 GB of temporary files
    python benchmarks/data_order.py --examples 10000 --folder /scratch

Writes tars of 10,000 captioned images of 8 x 8 pixels, then runs each phase in a process of its own:
  * index: opens the tars for the first time, which reads every header.
  * open: opens them again, by their indexes.
  * draw: the indexes of batches of a shuffled order, anywhere in it; draw_block: the same with shuffle_block.
  * read: opens, and reads the image and caption of examples of that order, one after another; read_block: likewise.

Prints one JSON line: of each phase its seconds and the most memory that its process had; bytes_per_example is what the
process had more after opening than before, over the number of examples.
"""

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maxdiff.data.mixed import examples_at
from maxdiff.data.order import batch_positions
from maxdiff.data.sources import open_source

SHARD, BATCH, BLOCK, SEED = 10_000, 1024, 128, 0
PHASES = ("index", "open", "draw", "draw_block", "read", "read_block")


def write(folder: Path, examples: int) -> None:
    """Tars of SHARD examples each."""
    image = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(image, "png")
    for first in range(0, examples, SHARD):
        with (folder / f"shard-{first // SHARD:06d}.tar").open("wb") as file:
            for i in range(first, min(first + SHARD, examples)):
                for suffix, data in (("png", image.getvalue()), ("txt", f"caption {i}".encode())):
                    header = tarfile.TarInfo(f"{i:010d}.{suffix}")
                    header.size = len(data)
                    file.write(header.tobuf(tarfile.USTAR_FORMAT) + data.ljust(tarfile.BLOCKSIZE, b"\0"))
            file.write(bytes(2 * tarfile.BLOCKSIZE))


def resident() -> int:
    """This process's memory now, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(phase: str, folder: Path, batches: int) -> dict[str, Any]:
    """Seconds of a phase, and what else is measured of it."""
    before, started = resident(), time.perf_counter()
    source = open_source(str(folder / "*.tar"))
    held, opened = resident() - before, time.perf_counter()
    result: dict[str, Any] = {"seconds": opened - started}
    if phase == "open":
        result["bytes_per_example"] = held / len(source)
    name, _, block = phase.partition("_")
    # Steps from all of ten epochs, in an order of no meaning.
    steps = np.random.default_rng(0).permutation(max(1, 10 * len(source) // BATCH))[:batches]
    drawn = lambda step: examples_at(source, SEED, batch_positions(int(step), BATCH), BLOCK if block else 0)[1]
    if name == "draw":
        for step in steps:
            drawn(step)
        seconds = time.perf_counter() - opened
        result = {"seconds": seconds, "batches": len(steps), "milliseconds_per_batch": 1000 * seconds / len(steps)}
    if name == "read":
        wanted = drawn(steps[0])
        started = time.perf_counter()
        size = sum(len(source[int(i)].image) for i in wanted)
        seconds = time.perf_counter() - started
        result = {
            "seconds": seconds,
            "examples": len(wanted),
            "bytes": size,
            "milliseconds_per_example": 1000 * seconds / len(wanted),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {key: round(value, 3) for key, value in {**result, "base_mib": before / 2**20, "peak_mib": peak}.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=1000, help=f"of {BATCH} examples, that are drawn")
    parser.add_argument("--folder", type=Path, help="where temporary files are made")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.phase:
        print(json.dumps(run(parsed.phase, parsed.folder, parsed.batches)))
        return
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        started = time.perf_counter()
        write(Path(folder), parsed.examples)
        result: dict[str, Any] = {
            "examples": parsed.examples,
            "tars": -(-parsed.examples // SHARD),
            "batch": BATCH,
            "block": BLOCK,
        }
        result["write"] = {"seconds": round(time.perf_counter() - started, 3)}
        for phase in PHASES:
            command = [sys.executable, __file__, "--phase", phase, "--folder", folder, "--batches", str(parsed.batches)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result[phase] = json.loads(said)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
