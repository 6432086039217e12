"""Loading weights: our time beside diffusers' from_pretrained, and our peak of anonymous memory.

    python benchmarks/load.py            about 15 minutes, 20 GB of disk in the temporary folder, 16 GB of memory

Prints one JSON line per case:
  * `speed`: an SD1.5-sized pipeline of random weights, from the same safetensors (in the page cache) to float32
    arrays of which every byte has been read once. Each run is a process of its own and starts its clock after the
    imports; ours and theirs take turns, and the ratio of medians is ours / theirs: below 1 is faster.
  * `memory`: an SDXL-sized UNet in float32. The peak of anonymous memory (RssAnon; pages of the file don't
    count) above that before loading, over the size of the parameters.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import parity


def write_pipeline(folder: Path) -> None:
    """An SD1.5-sized diffusers folder of random weights, and its float16 variant."""
    import diffusers
    import torch
    import transformers

    from maxdiff.weights.tokenizer import published_tokenizer

    parts: dict[str, Any] = {}
    for name, variant in (("unet", "sd1-unet"), ("vae", "vae-encoder"), ("text_encoder", "clip-l")):
        config = parity.VARIANTS[variant].full
        assert config is not None
        parts[name] = parity.torch_module(parity.VARIANTS[variant], config)
    published_tokenizer().save(folder / "tokenizer")
    parts["tokenizer"] = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer")
    parts |= {"scheduler": diffusers.DDIMScheduler(), "safety_checker": None, "feature_extractor": None}
    pipeline = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder / "sd15")
    for name in ("unet", "vae", "text_encoder"):
        parts[name].to(torch.float16)
    pipeline.save_pretrained(folder / "sd15", variant="fp16")


def touch(arrays: Iterable[np.ndarray]) -> float:
    """Read every byte."""
    return float(sum(float(np.sum(array)) for array in arrays))


def load_theirs(folder: str, variant: str | None) -> float:
    """Seconds of diffusers.StableDiffusionPipeline.from_pretrained."""
    import diffusers
    import torch
    import transformers  # noqa: F401  (its import is not what is timed)

    diffusers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder, variant=variant, torch_dtype=torch.float32)
    modules = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    touch(p.detach().numpy() for module in modules for p in module.parameters())
    return time.perf_counter() - start


def load_ours(folder: str, variant: str | None) -> float:
    """Seconds of maxdiff.Pipeline.load."""
    import jax

    import maxdiff

    jax.devices()
    start = time.perf_counter()
    pipeline = maxdiff.Pipeline.load(folder, variant=variant)
    touch(np.asarray(leaf) for _, part in pipeline.networks() for leaf in jax.tree.leaves(part.params))
    return time.perf_counter() - start


def load_memory(folder: str) -> dict[str, float]:
    """Peak of anonymous memory while an SDXL-sized UNet is placed."""
    import jax

    from maxdiff.weights.checkpoint import make_network, open_checkpoint
    from maxdiff.weights.load import load_params

    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    jax.devices()
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config("unet")
    assert config is not None
    network = make_network("unet", config)
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    params = jax.block_until_ready(load_params(network, *checkpoint.tensors("unet")))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"gib": round(size / 2**30, 2), "peak_over_size": round((peak - before) / size, 3), "seconds": round(seconds, 1)}


def run(*args: str) -> Any:
    """Run this file's `--child` in a fresh process and read the JSON that it prints last."""
    out = subprocess.run(
        [sys.executable, __file__, "--child", *args], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return json.loads(out.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Print the cases; 1 if the peak of memory is above 1.25 times the parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each loader")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        what, folder, *rest = args.child
        variant = rest[0] if rest else None
        child = {"ours": lambda: load_ours(folder, variant), "theirs": lambda: load_theirs(folder, variant),
                 "memory": lambda: load_memory(folder)}  # fmt: skip
        print(json.dumps(child[what]()))
        return 0

    versions = {name: importlib.metadata.version(name) for name in ("jax", "torch", "diffusers", "transformers", "accelerate")}
    print(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "processor": parity.processor(), **versions}),
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        write_pipeline(Path(scratch))
        for variant in ((), ("fp16",)):
            times: dict[str, list[float]] = {"ours": [], "theirs": []}
            for i in range(args.repeats + 1):
                for who, seconds in times.items():
                    seconds.append(run(who, f"{scratch}/sd15", *variant))
                    if i == 0:
                        seconds.clear()  # the first brings the file into the page cache
            ours, theirs = (statistics.median(times[who]) for who in ("ours", "theirs"))
            case = {
                "case": "speed",
                "stored": "".join(variant) or "float32",
                "ours_s": round(ours, 2),
                "theirs_s": round(theirs, 2),
            }
            spread = {who: [round(min(seconds), 2), round(max(seconds), 2)] for who, seconds in times.items()}
            print(json.dumps({**case, "ratio": round(ours / theirs, 2), "spread": spread}), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-c", WRITE_SDXL, scratch, str(Path(__file__).parent)], check=True, stderr=subprocess.DEVNULL
        )
        memory = run("memory", scratch)
        print(json.dumps({"case": "memory", "network": "sdxl-unet", **memory}), flush=True)
    return int(memory["peak_over_size"] > 1.25)


# In a process of its own: the random network takes 10 GB.
WRITE_SDXL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import parity
variant = parity.VARIANTS["sdxl-unet"]
parity.torch_module(variant, variant.full).save_pretrained(sys.argv[1])
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
