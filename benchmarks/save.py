"""What a checkpoint costs the steps around it: how long the loop waits, and how much slower steps are while it is written.

    python benchmarks/save.py --model sd15 --resolution 512 --batch 16

Trains from random weights on the repository's emoji, with an average, and saves in the middle and at the end; prints one
JSON line. The wait is that which train.py prints for each save; the last, at the run's end, waits until all is written.
"""

import argparse
import contextlib
import io
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))
from train_step import configuration

from maxdiff.metrics import read_metrics
from maxdiff.train import train

EMOJI = Path(__file__).parent.parent / "data" / "emoji" / "train-*.tar"


def main(argv: Sequence[str]) -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sd15")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="images a device")
    parser.add_argument("--apart", type=int, default=250, help="steps before the first save, and from that to the second")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        first, last = args.apart, 2 * args.apart
        config = configuration(args.model, args.resolution, args.batch, [
            "run_name=r", f"output_dir={folder}", f"train_data_dir={EMOJI}", f"dataset_save_location={folder}", "use_ema=true",
            f"max_train_steps={last}", f"checkpoint_every={first * args.batch * jax.device_count()}", "log_period=2",
        ])  # fmt: skip
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            train(config)
        waits = [float(wait) for wait in re.findall(r"the loop waited ([\d.]+) s", said.getvalue())]
        seconds = {record["step"]: record["seconds"] for record in read_metrics(Path(folder) / "r") if "seconds" in record}
    before = [value for step, value in seconds.items() if 10 < step <= first]
    during = [value for step, value in seconds.items() if first + 2 < step <= first + 22]
    print(json.dumps({
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "model": args.model, "batch": args.batch,
        "step_s": round(statistics.median(before), 4), "loop_waited_s": waits[0],
        "step_s_while_written": round(statistics.mean(during), 4), "saves": len(waits),
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
