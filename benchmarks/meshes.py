"""One training on many meshes: the losses of one device, the bytes a device has, the collectives of the step.

    python benchmarks/meshes.py            about 20 minutes on two quiet cores

Trains a small UNet 20 steps on the emoji with train.py's own loop and loader, in processes with fake CPU devices,
and prints a row of a Markdown table for each mesh: data x fsdp x tensor. Ends with status 1 if losses differ by more
than LOSSES from those of one device, or kernels take more than BYTES above their share of a device.
"""

import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices on fewer cores wait for each other's threads otherwise.
os.environ.setdefault("PJRT_NPROC", "16")

import jax
from together import free_port, run_together

from maxdiff import hlo

ROOT = Path(__file__).parent.parent
DEVICES, GLOBAL_BATCH, STEPS = 8, 32, 20
LOSSES, BYTES = 1e-5, 0.01
TIMEOUT = 600.0

# Every kernel has a dimension that 8 divides.
NEW: dict[str, dict[str, Any]] = {
    "unet": {"block_out_channels": [64], "layers_per_block": 1, "cross_attention_dim": 64, "attention_head_dim": 8,
             "down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]},
    "vae": {"block_out_channels": [32, 32], "layers_per_block": 1, "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2},
    "text_encoder": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 1,
                     "projection_dim": 64},
}  # fmt: skip
# A kernel whose place the edited rule changes.
SHOWN = ("down_blocks", 0, "resnets", 0, "conv1", "kernel")


@dataclass(frozen=True)
class Case:
    """A mesh, data x fsdp x tensor, and how a batch gets through it."""

    mesh: tuple[int, int, int]
    accumulation: int = 1
    processes: int = 1
    edited: bool = False

    @property
    def name(self) -> str:
        shown = f"{'x'.join(map(str, self.mesh))}, {self.accumulation}, {self.processes}"
        return f"{shown}, conv_in" if self.edited else shown


MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2))
CASES = [Case((1, 1, 1))]
CASES += [Case(mesh, accumulation) for mesh in MESHES for accumulation in (1, 2, 4)]
CASES += [Case((1, 8, 1), processes=2), Case((1, 4, 2), 2, processes=2), Case((1, 1, 8), processes=2)]
CASES += [Case((1, 8, 1), edited=True)]


def main() -> int:
    """Run every case and print the table."""
    bad = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_pipeline(folder / "pipeline")
        print("| mesh, accumulation, processes | losses differ by | parameters | average | moments | of one device's "
              "(kernels) | all-gather | reduce-scatter | all-reduce | permute | all-to-all |")  # fmt: skip
        print("|---" * 11 + "|", flush=True)
        reference: dict[str, Any] = {}
        for number, case in enumerate(CASES):
            found = measure(case, folder, folder / str(number))
            reference = reference or found
            difference = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], reference["losses"], strict=True))
            share = found["kernels"] / reference["kernels"]
            print(row(case, found, reference, difference), flush=True)
            if not difference <= LOSSES:
                bad.append(f"{case.name}: losses differ by {difference:.1e}")
            # Rules split every kernel over fsdp, and some over tensor besides.
            if share > (1 + BYTES) / case.mesh[1]:
                bad.append(f"{case.name}: kernels take {share:.4f} of one device's bytes, more than 1/{case.mesh[1]}")
            if found["ema"] > found["params"] or found["moments"] > (1 + BYTES) * 2 * found["params"]:
                bad.append(f"{case.name}: average or moments are not split as the parameters are")
            if case.edited:
                print(f"\nWith [conv_in, fsdp] {'.'.join(map(str, SHOWN))} is {found['spec']}.")
        print(f"\nOne device's losses go from {reference['losses'][0]:.4f} to {reference['losses'][-1]:.4f}.")
    print("\n".join(["", *bad] if bad else ["", f"All within {LOSSES:g} of the losses and {BYTES:.0%} of the bytes."]))
    print(f"{os.cpu_count()} CPU cores, jax {jax.__version__}, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")
    return 1 if bad else 0


def write_pipeline(folder: Path) -> None:
    """A diffusers folder of random weights."""
    from maxdiff.pipeline import Pipeline

    Pipeline.load("", new=NEW).save(folder)


def row(case: Case, found: dict[str, Any], reference: dict[str, Any], difference: float) -> str:
    """A row of the table."""
    sizes = [f"{found[key] / 2**10:.0f} KiB" for key in ("params", "ema", "moments")]
    share = f"{found['params'] / reference['params']:.4f} ({found['kernels'] / reference['kernels']:.4f})"
    moved = [f"{count}: {size / 2**10:.0f} KiB" if count else "0" for count, size in found["collectives"].values()]
    return f"| {' | '.join([case.name, f'{difference:.1e}', *sizes, share, *moved])} |"


def measure(case: Case, folder: Path, output: Path) -> dict[str, Any]:
    """Train; what the devices then have, the losses, and what the compiled step sends."""
    output.mkdir()
    devices = math.prod(case.mesh) // case.processes
    shards = case.mesh[0] * case.mesh[1]
    keys: dict[str, Any] = {
        "run_name": "r", "output_dir": output, "pretrained_model_name_or_path": folder / "pipeline",
        "train_data_dir": ROOT / "data" / "emoji" / "heldout-000000.tar", "dataset_save_location": folder / "index",
        "activations_dtype": "float32", "attention": "dot_product", "resolution": 16, "caption_dropout": 0.1,
        "learning_rate": 1e-4, "data_workers": 1, "max_train_steps": STEPS, "log_period": 1,
        "global_batch_size": GLOBAL_BATCH, "per_device_batch_size": GLOBAL_BATCH // shards // case.accumulation,
    }  # fmt: skip
    keys |= {f"ici_{axis}_parallelism": n for axis, n in zip(("data", "fsdp", "tensor"), case.mesh, strict=True)}
    if case.edited:
        keys["logical_axis_rules"] = (
            "[[activation_batch, [data, fsdp]], [conv_batch, [data, fsdp]], [embed, fsdp], [conv_in, fsdp]]"
        )
    if case.processes > 1:
        keys |= {"coordinator_address": f"localhost:{free_port()}", "num_processes": case.processes}
    flags = f"--xla_force_host_platform_device_count={devices} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_train_step"
    commands = [
        [sys.executable, __file__, "--child", *(f"{k}={v}" for k, v in keys.items()),
         *([f"process_id={number}"] if case.processes > 1 else [])]
        for number in range(case.processes)
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "XLA_FLAGS": f"{flags} --xla_dump_to={output / 'hlo'}"}
    said = run_together(commands, env, output, TIMEOUT)[0]
    lines = map(json.loads, (output / "r" / "metrics" / "metrics.jsonl").read_text().splitlines())
    (dumped, *_) = sorted((output / "hlo").glob("*jit_train_step*after_optimizations.txt"))
    return {
        **json.loads(said.splitlines()[-1]),
        "losses": [line["loss"] for line in lines if "loss" in line][:STEPS],
        "collectives": collectives(dumped.read_text()),
    }


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Kind -> (how many, bytes that they give); what lies in a loop over micro-batches counts once."""
    found = hlo.collectives(text)
    of = lambda kind: [one for one in found if one.kind == kind]
    return {kind: (len(of(kind)), sum(hlo.size(shape) for one in of(kind) for shape in one.shapes)) for kind in hlo.KINDS}


def child(overrides: list[str]) -> None:
    """Train as train.py does, then say what the first device of this process has, as a line of JSON."""
    from maxdiff.config import load_config
    from maxdiff.models.network import flatten
    from maxdiff.processes import start
    from maxdiff.train import train

    config = load_config(ROOT / "configs" / "base.yml", overrides)
    start(config.run)
    state = train(config)

    def size(tree: Any) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    unet = dict(flatten(state.params["unet"]))
    sizes = {"params": size(state.params), "ema": size(state.ema), "moments": size(state.opt_state)}
    kernels = size([leaf for path, leaf in unet.items() if path[-1] == "kernel"])
    print(json.dumps({**sizes, "kernels": kernels, "spec": str(unet[SHOWN].sharding.spec)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        sys.exit(main())
