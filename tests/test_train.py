"""python train.py as a user starts it, and makes a mistake; test_crashes.py has runs that it makes."""

import os
import subprocess
import sys
from pathlib import Path

from maxdiff.loop import due

ROOT = Path(__file__).parent.parent


def test_a_mistake_is_one_line_and_exit_status_2(folders: dict[str, Path], tmp_path: Path):
    """Of a real process; test_bad_input.py has the others."""
    keys = {
        "run_name": "r", "output_dir": tmp_path, "pretrained_model_name_or_path": folders["sd1"], "resolution": 16,
        "train_data_dir": ROOT / "data" / "emoji" / "heldout-000000.tar", "ici_fsdp_parallelism": 3,
    }  # fmt: skip
    args = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/base14.yml"), *(f"{k}={v}" for k, v in keys.items())]
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}"}
    result = subprocess.run(args, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "the product must be the number of 4 devices in a slice" in result.stderr
    assert result.stderr.count("\n") == 1


def test_checkpoints_are_due_at_the_first_step_past_each_multiple():
    assert [step for step in range(1, 11) if due(step, 3, 8)] == [3, 6, 8]
    assert not any(due(step, 3, -1) for step in range(1, 11))
