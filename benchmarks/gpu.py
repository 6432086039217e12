"""Training steps on GPUs, each beside what PyTorch diffusers makes of the same work on the same card.

    python benchmarks/gpu.py [--profile] [NAME ...] > steps.jsonl     2 to 4 minutes a side and case; --list names the cases
    python benchmarks/gpu.py --table steps.jsonl                      as Markdown

Each side runs in a process of its own: ours is train_step.py, the peer peers/torch_train_step.py, which needs torch,
diffusers and transformers (--only maxdiff leaves it out). Both have float32 weights and moments, bfloat16 activations, AdamW
and clipping. CUDA_VISIBLE_DEVICES is heeded; cases for several GPUs run where there are as many. A line of JSON a side, and a
line of progress on stderr.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from report import progress

from maxdiff.report import markdown

FOLDER = Path(__file__).parent
# Images a second and GPU, which others published for this work on an H100: NVIDIA's MLPerf code (SD2, 32 images a GPU, cached).
PUBLISHED = {"sd2/512/32": 145.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        cached: latents and text states come from a cache; else from images and tokens, by the frozen networks.
        keys: what our command line says besides.
        peer: what the peer's says; None for no peer.
        gpus: how many it runs on.
        label: what sets it apart from another case of the same shape.
    """

    model: str
    resolution: int
    batch: int
    cached: bool = True
    keys: tuple[str, ...] = ("use_ema=false",)
    peer: tuple[str, ...] | None = ()
    gpus: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        parts = [self.model, str(self.resolution), str(self.batch), *([] if self.cached else ["full"])]
        return "/".join([*parts, *([self.label] if self.label else [])])

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """(system, command) of each side."""
        shape = ["--model", self.model, "--resolution", str(self.resolution), "--batch", str(self.batch)]
        yield "maxdiff", [str(FOLDER / "train_step.py"), *shape, *(["--cached"] if self.cached else []), *self.keys]
        if self.peer is not None:
            pipeline = ["--pipeline", "unet" if self.cached else "full", "--modes", "compile"]
            yield "torch-diffusers", [str(FOLDER / "peers" / "torch_train_step.py"), *shape, *pipeline, *self.peer]


MOMENTS = ("use_ema=false", "moment_dtype=bfloat16")
CASES = [
    Case("sd2", 512, 32),
    Case("sd15", 512, 16),
    Case("sd2", 512, 32, keys=MOMENTS, peer=None, label="bfloat16-moments"),
    Case("sd2", 256, 128),
    *(Case("sd2", 512, batch) for batch in (2, 4, 8)),
    Case("sd15", 512, 16, cached=False),
    *(Case("sdxl", 1024, batch, keys=("remat=full",), peer=("--remat", "--ema"), label="ema") for batch in (4, 16)),
    Case("sdxl", 1024, 16, keys=("remat=selective",), peer=("--remat", "--ema"), label="ema-selective"),
    Case("sdxl", 1024, 48, keys=("remat=full",), peer=None, label="ema"),  # what a card of 80 GB holds (gpu_program.py)
    Case("sd2", 512, 32, keys=("use_ema=false",), peer=None, gpus=2, label="data"),
    Case("sd2", 512, 32, keys=("use_ema=false", "ici_fsdp_parallelism=2"), peer=None, gpus=2, label="fsdp"),
]


def gpus() -> list[str]:
    """The NVIDIA GPUs to run on, as CUDA_VISIBLE_DEVICES has them; none without their driver."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    try:
        lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return []
    return [str(number) for number in range(len(lines))]


def run(case: Case, system: str, command: Sequence[str], there: Sequence[str]) -> dict[str, Any]:
    """The line that a side printed, or the last line of what it said."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(there[: case.gpus])}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env={**os.environ, **visible})
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"case": case.name, "system": system, "error": (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]}
    return {**json.loads(lines[-1]), "case": case.name}


COLUMNS = ("case", "system", "images/s", "step ms (least to greatest)", "ratio to the peer", "MFU, data sheet / measured",
           "peak GiB a device", "compile s", "published, H100")  # fmt: skip


def row(found: dict[str, Any], peer: dict[str, Any] | None) -> list[str]:
    """The cells of a side."""
    if "error" in found:
        return [found["case"], found["system"], found["error"], *[""] * (len(COLUMNS) - 3)]
    ours = found["system"] == "maxdiff"
    ratio = f"{found['images_per_s'] / peer['images_per_s']:.2f}" if ours and peer and "images_per_s" in peer else ""
    mfu = f"{100 * found['mfu']:.1f}% / {100 * found['mfu_of_matmul']:.1f}%" if found.get("mfu") else ""
    steps = f"{found['step_ms']:.1f} ({found['step_ms_min']:.1f} to {found['step_ms_max']:.1f})"
    published = PUBLISHED.get(found["case"], "") if ours else ""
    compiled = found.get("compile_s", found.get("warm_up_s"))
    return [found["case"], "MaxDiff" if ours else "diffusers, `compile`", f"{found['images_per_s']:.1f}", steps, ratio, mfu,
            str(found["peak_gib"]), f"{compiled:.0f}", str(published)]  # fmt: skip


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    peers = {found["case"]: found for found in lines if found["system"] != "maxdiff"}
    return markdown(COLUMNS, [row(found, peers.get(found["case"])) for found in lines])


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 1 if a side failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases; all that this host has GPUs for, if none is given")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--only", choices=["maxdiff", "peer"], help="one side")
    parser.add_argument("--profile", action="store_true", help="GPU time by kind of kernel, of our side")
    parser.add_argument("--table", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(case.name for case in CASES))
        return 0
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    cases = {case.name: case for case in CASES}
    if unknown := set(args.names) - cases.keys():
        parser.error(f"there is no case {min(unknown)} (allowed: {', '.join(cases)})")
    if not (there := gpus()):
        parser.error("there is no NVIDIA GPU here")
    wanted = [cases[name] for name in args.names] or [case for case in CASES if case.gpus <= len(there)]
    if short := [case for case in wanted if case.gpus > len(there)]:
        parser.error(f"{short[0].name} needs {short[0].gpus} GPUs, of which there are {len(there)}")
    sides = [(case, *side) for case in wanted for side in case.commands()
             if args.only is None or (side[0] == "maxdiff") == (args.only == "maxdiff")]  # fmt: skip
    failed, started = 0, time.monotonic()
    for number, (case, system, command) in enumerate(sides, 1):
        found = run(case, system, [*command, *(["--profile"] if args.profile and system == "maxdiff" else [])], there)
        failed += "error" in found
        print(json.dumps(found), flush=True)
        progress(number, len(sides), f"{case.name}, {system}", started)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
