"""python train.py as a user starts it: real processes on the real emoji, killed and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from maxdiff.loop import due
from maxdiff.metrics import read_metrics
from maxdiff.pipeline import Pipeline

ROOT = Path(__file__).parent.parent


def command(folder: Path, output: Path, *overrides: str) -> list[str]:
    keys = {
        "run_name": "r", "output_dir": output, "pretrained_model_name_or_path": folder, "activations_dtype": "float32",
        "train_data_dir": ROOT / "data" / "emoji" / "heldout-000000.tar", "dataset_save_location": output / "index",
        "resolution": 16, "global_batch_size": 8, "data_workers": 1, "learning_rate": "1e-3", "max_train_steps": 48, "log_period": 1,
        "jax_cache_dir": output.parent / "cache", "center_crop": "true", "ici_fsdp_parallelism": 2, "caption_dropout": 0.1,
    }  # fmt: skip
    return [
        sys.executable,
        str(ROOT / "train.py"),
        str(ROOT / "configs/base14.yml"),
        *(f"{k}={v}" for k, v in keys.items()),
        *overrides,
    ]


def environment(devices: int = 4) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}"}


def losses(output: Path) -> dict[int, float]:
    """step -> loss; of a step that was made twice, the later."""
    return {line["step"]: line["loss"] for line in read_metrics(output / "r") if "loss" in line}


def test_killed_and_started_again_is_bit_for_bit_the_uninterrupted_run(one_level: Path, tmp_path: Path):
    whole = subprocess.run(command(one_level, tmp_path / "whole"), env=environment(), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    assert "P(None, None, None, 'fsdp')" in whole.stdout  # what the rules did is said

    args = command(one_level, tmp_path / "killed", "checkpoint_every=80")
    process = subprocess.Popen(args, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 37/"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    time.sleep(0.1)
    again = subprocess.run(args, env=environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "going on from step " in again.stdout
    expected = losses(tmp_path / "whole")
    assert len(expected) == 48
    assert losses(tmp_path / "killed") == expected
    ours, expected = (Pipeline.load(tmp_path / run / "r" / "pipeline") for run in ("killed", "whole"))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours.unet.params, expected.unet.params))


def test_a_mistake_is_one_line_and_exit_status_2(folders: dict[str, Path], tmp_path: Path):
    """Of a real process; test_bad_input.py has the others."""
    args = command(folders["sd1"], tmp_path, "ici_fsdp_parallelism=3")
    result = subprocess.run(args, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2
    assert "the product must be the number of 4 devices in a slice" in result.stderr
    assert result.stderr.count("\n") == 1


def test_checkpoints_are_due_at_the_first_step_past_each_multiple():
    assert [step for step in range(1, 11) if due(step, 3, 8)] == [3, 6, 8]
    assert not any(due(step, 3, -1) for step in range(1, 11))
