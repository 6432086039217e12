"""The input pipeline: images a second from WebDataset tars to batches, ours beside webdataset's and Hugging Face datasets'.

    python benchmarks/input_pipeline.py                                    the repository's emoji, as they are
    python benchmarks/input_pipeline.py --jpeg 1080 --examples 512         the same, as large JPEGs
    python benchmarks/input_pipeline.py --data 'photos-*.tar' --jpeg 720

Every system reads, decodes, resizes (shorter side, LANCZOS), crops anywhere, flips half, tokenises and batches the same
files with the same number of worker processes; `maxdiff_threads` does it in threads of one process, as many as there are
cores. The peers (benchmarks/peers/torch_input.py) need the extra `bench`; one whose package is missing prints a line that
says so. A `_uint8` peer leaves out ToTensor's and Normalize's floats, which we make on the accelerator.

Each run is a process of its own. The systems take turns, `--repeats` times, and the consumer does nothing but take
batches, so that nothing is made ahead of the clock. Prints one JSON line a system and resolution:
  * images_per_s: the median over the runs, with the least and the greatest.
  * images_per_core_s: images per second of processor time, of all processes of the run; what other work on the machine
    disturbs least. Only on Linux.
  * times_best_peer: ours over the faster peer's, by either measure; in our lines.
"""

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

from maxdiff.data.paths import expand_braces
from maxdiff.data.pipeline import BatchPlan, batches
from maxdiff.data.sources import open_source
from maxdiff.data.transforms import flatten
from maxdiff.weights.tokenizer import published_tokenizer

OURS = ("maxdiff", "maxdiff_threads")
PEERS = ("webdataset", "webdataset_uint8", "datasets", "datasets_uint8")
EMOJI = Path(__file__).parent.parent / "data" / "emoji" / "train-*.tar"
IMAGES = ("jpg", "jpeg", "png", "webp")
TARS = 8  # webdataset gives each worker tars of its own
SEED = 0


def tars_of(data: str) -> list[str]:
    """The files that a glob or brace notation names."""
    return [str(path) for name in map(Path, expand_braces(data)) for path in sorted(name.parent.glob(name.name))]


def read_tars(data: str, count: int) -> list[tuple[bytes, bytes]]:
    """(image file, caption) of the first examples that have a .txt."""
    found: dict[str, dict[str, bytes]] = {}
    for path in tars_of(data):
        with tarfile.open(path) as tar:
            for member in tar:
                stem, _, suffix = member.name.partition(".")
                if (file := tar.extractfile(member)) and suffix in (*IMAGES, "txt"):
                    found.setdefault(f"{path}:{stem}", {})["txt" if suffix == "txt" else "image"] = file.read()
    return [(each["image"], each["txt"]) for each in found.values() if len(each) == 2][:count]


def write_tars(folder: Path, data: str, side: int, examples: int) -> str:
    """The images of `data`, repeated, as JPEGs whose shorter side is `side`, in TARS tars; returns their glob."""
    encoded = [(jpeg(image, side), caption) for image, caption in read_tars(data, examples)]
    for number in range(TARS):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as tar:
            for i in range(number, examples, TARS):
                for suffix, content in zip(("jpg", "txt"), encoded[i % len(encoded)], strict=True):
                    info = tarfile.TarInfo(f"{i:06d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(folder / "*.tar")


def jpeg(data: bytes, side: int) -> bytes:
    """The image as a JPEG of quality 92 whose shorter side is `side`."""
    image = flatten(Image.open(io.BytesIO(data)))
    scale = side / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92)
    return file.getvalue()


def our_batches(data: str, resolution: int, batch: int, workers: int) -> Iterator[dict[str, Any]]:
    """Batches of MaxDiff's, endlessly; 0 workers are threads."""
    plan = BatchPlan(SEED, batch, resolution, center_crop=False, random_flip=True)
    return batches(open_source(data), [published_tokenizer()], plan, workers=workers)


def processor_seconds() -> float | None:
    """What this process and its living descendants have used; None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    used: dict[int, float] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used[pid] for pid in family)


def measure(system: str, data: str, resolution: int, batch: int, workers: int, count: int) -> dict[str, float | None]:
    """One run: images a second, and a second of processor time, of `count` batches after those that warm up."""
    if system in OURS:
        made = our_batches(data, resolution, batch, workers if system == "maxdiff" else 0)
    else:
        from peers import torch_input

        name, _, kind = system.partition("_")
        made = torch_input.SYSTEMS[name](data, resolution, batch, workers, kind != "uint8")
    with closing(made):  # pyright: ignore
        for _ in range(2 * workers):
            next(made)
        began, used = time.perf_counter(), processor_seconds()
        images = sum(len(next(made)["input_ids"]) for _ in range(count))
        seconds, after = time.perf_counter() - began, processor_seconds()
    per_core = None if used is None or after is None else images / max(after - used, 1e-3)
    return {"images_per_s": images / seconds, "images_per_core_s": per_core}


def run(system: str, case: Sequence[str]) -> dict[str, Any]:
    """`measure` in a process of its own; a dict with the key `skipped` if a package is missing."""
    command = [sys.executable, __file__, "--one", system, *case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{system} ended with exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and their extremes."""
    line: dict[str, Any] = {}
    for key in ("images_per_s", "images_per_core_s"):
        found = [run[key] for run in runs]
        if None in found:
            line[key] = None
            continue
        line |= {key: digits(statistics.median(found)), f"{key}_min": digits(min(found)), f"{key}_max": digits(max(found))}
    return line


def digits(x: float) -> float:
    """Rounded to four digits."""
    return float(f"{x:.4g}")


def compare(lines: dict[str, dict[str, Any]]) -> None:
    """Add to our lines how many times the faster peer they are."""
    peers = [line for system, line in lines.items() if system in PEERS and "images_per_s" in line]
    for system in OURS:
        if system in lines and peers:
            for key, short in (("images_per_s", "times_best_peer"), ("images_per_core_s", "times_best_peer_per_core")):
                if lines[system][key] is not None:
                    lines[system][short] = round(lines[system][key] / max(peer[key] for peer in peers), 2)


def cases(args: argparse.Namespace, data: str) -> None:
    """Print the lines of each resolution."""
    about = {"data": Path(args.data).name, "jpeg": args.jpeg, "batch": args.batch, "workers": args.workers,
             "cores": os.cpu_count(), "pillow": version("pillow"), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    for resolution in args.resolution:
        case = ["--data", data, "--resolution", str(resolution), "--batch", str(args.batch), "--workers", str(args.workers),
                "--batches", str(args.batches)]  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
        for _, system in itertools.product(range(args.repeats), args.systems):
            if not any("skipped" in run for run in found[system]):
                found[system].append(run(system, case))
        lines = {system: runs[0] if "skipped" in runs[0] else summary(runs) for system, runs in found.items()}
        compare(lines)
        for system, line in lines.items():
            print(json.dumps({"system": system, "resolution": resolution, **about, **line}), flush=True)


def main(argv: Sequence[str]) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(EMOJI), help="tars of captioned images: a path, a glob or brace notation")
    parser.add_argument("--jpeg", type=int, metavar="SIDE", help="turn the images into JPEGs of this shorter side first")
    parser.add_argument("--examples", type=int, default=512, help="with --jpeg: how many, by repetition")
    parser.add_argument("--resolution", nargs="+", type=int, default=[256, 512], help="side of the batches' images, pixels")
    parser.add_argument("--batch", type=int, default=32, help="images of a batch")
    parser.add_argument("--batches", type=int, default=8, help="batches timed in a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of each system")
    parser.add_argument("--systems", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--one", choices=[*OURS, *PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        try:
            line = measure(args.one, args.data, args.resolution[0], args.batch, args.workers, args.batches)
        except ModuleNotFoundError as error:
            line = {"skipped": f"the package {error.name} is not installed"}
        print(json.dumps(line))
        return
    with tempfile.TemporaryDirectory() as folder:
        cases(args, write_tars(Path(folder), args.data, args.jpeg, args.examples) if args.jpeg else args.data)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1:])
