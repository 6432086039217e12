"""What SD1.5, SD2 and SDXL need of TPU slices: bytes, collectives and an estimate of the time of a step, compiled on this CPU.

    python benchmarks/tpu.py [--jobs 2] [NAME ...] > cases.jsonl      5 to 15 minutes of a core a case; 9 GB, SDXL 12
    python benchmarks/tpu.py --published [--jobs 2] > published.jsonl the steps whose times MaxDiffusion's authors published
    python benchmarks/tpu.py --table cases.jsonl                      both as Markdown

Each is train.py's own step with random weights, as `python -m maxdiff.aot` reports it, in a process of its own. Latents and
texts come from a cache. A line of JSON a case, and a line of progress on stderr.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from report import progress

from maxdiff.report import markdown

ROOT = Path(__file__).parent.parent
GIB, MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """A step on some slices.

    Attributes:
        file: of configs/tpu, without its ending; none if empty.
        keys: what the command line says after that file.
        published: seconds that MaxDiffusion's README gives for it; 0 where it gives none.
        label: ends the name, where model and topology are several cases'.
    """

    model: str
    topology: str
    slices: int = 1
    file: str = ""
    keys: tuple[str, ...] = ()
    published: float = 0.0
    label: str = ""

    @property
    def name(self) -> str:
        times = f"{self.slices}x" if self.slices > 1 else ""
        return f"{self.model}@{times}{self.topology}" + (f"/{self.label}" if self.label else "")


SLICES = [("v4-8", 1, "v4-8"), ("v5e-16", 1, "v5e-16"), ("v5e-256", 1, "v5e-256"), ("v5p-8", 1, "v5p"),
          ("v5p-128", 1, "v5p"), ("v6e-256", 1, "v6e-256"), ("v5p-128", 2, "v5p")]  # fmt: skip
# What the files say that SDXL wants.
XL = {
    "v4-8": ("ici_fsdp_parallelism=4", "remat=full", "per_device_batch_size=1"),
    "v5e-256": ("remat=full", "per_device_batch_size=1"),
    "v5p": ("ici_fsdp_parallelism=4", "remat=full", "per_device_batch_size=8"),
    "v6e-256": ("ici_fsdp_parallelism=16", "remat=full", "per_device_batch_size=2"),
}
CASES = [
    *(Case(model, *one) for model in ("sd15", "sd2") for one in SLICES),
    *(Case("sdxl", *one, XL[one[-1]]) for one in SLICES if one[-1] in XL),
    # So many chips divide few dimensions: what is left whole of average and moments.
    Case("sd15", "v5p-1024", 1, "v5p", ("ici_fsdp_parallelism=8",)),
    # With a tensor axis, alone and beside fsdp.
    Case("sd15", "v5p-8", 1, "v5p", ("ici_tensor_parallelism=2", "max_replicated_mib=0"), label="tensor"),
    Case("sdxl", "v5p-8", 1, "v5p", ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", *XL["v5p"][1:]), label="tensor"),
    # What fitting.KEPT is from.
    *(
        Case("sd15", "v5p-8", keys=(f"remat={remat}", "per_device_batch_size=16"), label=f"remat={remat}")
        for remat in ("none", "dots", "selective", "full")
    ),
]
# SD2, 512 pixels, cached: https://github.com/AI-Hypercomputer/maxdiffusion. Of which slices it doesn't say: here small ones.
PUBLISHED = [
    Case("sd2", topology, keys=(f"per_device_batch_size={batch}", "use_ema=false"), published=seconds, label=str(batch))
    for batch, topology, seconds in ((32, "v5p-8", 0.370), (16, "v5p-8", 0.202), (2, "v5p-8", 0.065), (4, "v6e-4", 0.091))
]


def one(case: Case, level: str) -> dict[str, Any]:
    """The report of a case, in this process."""
    # Imported here, as it takes seconds that a table has no need of.
    from train_step import configuration

    from maxdiff import aot
    from maxdiff.topologies import parse

    topology = parse(case.topology, case.slices)
    file = [str(ROOT / "configs" / "tpu" / f"{case.file}.yml")] if case.file else []
    keys = ["cache_latents_text_encoder_outputs=true", *file, *case.keys]
    config = configuration(case.model, 1024 if case.model == "sdxl" else 512, 1, keys)
    return aot.report(aot.prepare(config, topology.devices()), topology, level)


def run(case: Case, level: str) -> dict[str, Any]:
    """The same in another process; of one that fails the last line of what it said."""
    from maxdiff.aot import WITHOUT_TPU

    given = json.dumps([dataclasses.asdict(case), level])
    done = subprocess.run([sys.executable, __file__, "--one", given], capture_output=True, text=True,
                          env={**os.environ, **WITHOUT_TPU, "JAX_PLATFORMS": "cpu"})  # fmt: skip
    found = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr.strip().splitlines()[-1:]}
    return {**dataclasses.asdict(case), "name": case.name, **found}


COLUMNS = ("model", "topology", "data x fsdp x tensor", "batch a chip", "file, keys", "fits, GiB", "weights", "average",
           "moments", "activations", "collectives of a step, MiB sent by a chip", "estimate ms", "compile s")  # fmt: skip


def row(found: dict[str, Any]) -> list[str]:
    """The cells of a line of the table."""
    size = lambda name: f"{found['bytes'][name] / GIB:.2f}" if found["bytes"].get(name) else ""
    sent = found.get("collectives", {}).items()
    estimate = found.get("estimate")
    files = [f"{found['file']}.yml"] if found["file"] else []
    return [
        found["model"],
        found["topology"].replace(" slices", ""),
        " x ".join(map(str, found["mesh"].values())),
        str(found["per_device_batch"]),
        " ".join([*files, *(key for key in found["keys"] if not key.startswith("per_device"))]),
        f"{'yes' if found['fits'] else '**no**'}, {found['needs'] / GIB:.1f} of {found['has'] / GIB:.1f}"
        if "needs" in found
        else f"**no**: {found['said']}",
        *map(size, ("parameters", "average", "moments", "activations")),
        ", ".join(f"{name} {total['bytes'] / MIB:.0f}" for name, total in sent if total["bytes"] > MIB),
        f"{1e3 * estimate['step_s']:.0f}" if estimate else "",
        f"{found['compile_s']:.0f}",
    ]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    if all(found["published"] for found in lines):
        columns = ("topology", "batch a chip", "published s", "estimate s", "published / estimate")
        steps = [found["estimate"]["step_s"] for found in lines]
        ratios = [found["published"] / step for found, step in zip(lines, steps, strict=True)]
        cells = [[found["topology"], str(found["per_device_batch"]), f"{found['published']:.3f}", f"{step:.3f}", f"{ratio:.2f}"]
                 for found, step, ratio in zip(lines, steps, ratios, strict=True)]  # fmt: skip
    else:
        columns, cells = COLUMNS, [row(found) for found in lines]
    return markdown(columns, cells)


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases, as sd15@v5e-16; all, if none is given")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--optimization", default="quick", choices=["quick", "full"])
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        keys, level = json.loads(args.one)
        print(json.dumps(one(Case(**keys), level)))
        return 0
    if args.table:
        lines = [json.loads(line) for line in args.table.read_text().splitlines()]
        print(table([found for found in lines if "failed" not in found]))
        return 0
    cases = PUBLISHED if args.published else CASES
    if unknown := set(args.names) - {case.name for case in cases}:
        parser.error(f"there is no case {min(unknown)} (allowed: {', '.join(case.name for case in cases)})")
    wanted = [case for case in cases if not args.names or case.name in args.names]
    failed, started = 0, time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(run, case, args.optimization) for case in wanted]
        for number, done in enumerate(as_completed(running), 1):
            found = done.result()
            failed += "failed" in found
            print(json.dumps(found), flush=True)
            progress(number, len(wanted), found["name"], started)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
