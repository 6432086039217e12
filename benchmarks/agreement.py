"""Whether a training learns the same by the fast path: losses of real steps by our kernels, by XLA alone and in float32.

    python benchmarks/agreement.py --model sd15 --resolution 256 --batch 8 --steps 200        on an NVIDIA GPU

Each run is `python train.py` on the emoji of data/, from the same random weights, with the same examples and noise. A line of
JSON for each two runs: the greatest and the mean difference of a step's losses, over their mean. bfloat16 rounds otherwise in
each; so the first two ought to differ as each differs from float32. key=value is as for train.py.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import startup

from maxdiff.metrics import read_metrics

PLAIN = ["norms=plain", "attention=dot_product"]
RUNS = {"kernels": ["norms=fused", "attention=flash"], "plain": PLAIN, "float32": [*PLAIN, "activations_dtype=float32"]}


def losses(command: Sequence[str], folder: Path) -> np.ndarray:
    """Run it; the loss of each step."""
    subprocess.run(command, env=startup.environment(), check=True, stdout=sys.stderr)
    return np.array([record["loss"] for record in read_metrics(folder) if "loss" in record])


def main(argv: Sequence[str]) -> int:
    """Print a line for each two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15", choices=startup.CONFIGS)
    parser.add_argument("--resolution", type=int, default=256, help="side of the images, pixels")
    parser.add_argument("--batch", type=int, default=8, help="images that a device takes at once")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    args, overrides = parser.parse_known_args(argv)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.runs:
            command = startup.command(args.model, args.resolution, args.batch, Path(folder), name, overrides)
            command += [f"max_train_steps={args.steps}", "learning_rate=1e-4", *RUNS[name]]
            found[name] = losses(command, Path(folder) / "runs" / name)
    for one, other in itertools.combinations(found, 2):
        difference = np.abs(found[one] - found[other]) / found[other].mean()
        print(json.dumps({"runs": [one, other], "steps": len(difference), "greatest": float(f"{difference.max():.2e}"),
                          "mean": float(f"{difference.mean():.2e}"), "first_loss": round(float(found[one][0]), 4),
                          "last_losses": [round(float(found[name][-20:].mean()), 4) for name in (one, other)]}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
