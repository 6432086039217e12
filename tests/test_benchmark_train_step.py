"""benchmarks/train_step.py: a line of figures from a tiny architecture, and the real ones' sizes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import train_step
from benchmarks.architectures import ARCHITECTURES
from maxdiff.models import flops
from maxdiff.weights.origins import open_origins

ROOT = Path(__file__).parent.parent
TINY = [
    "unet={block_out_channels: [32], layers_per_block: 1, cross_attention_dim: 32, attention_head_dim: 2,"
    " down_block_types: [DownBlock2D], up_block_types: [UpBlock2D]}",
    "vae={block_out_channels: [32], down_block_types: [DownEncoderBlock2D], up_block_types: [UpDecoderBlock2D]}",
    "text_encoder={hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1}",
]
FIGURES = ["compile_s", "step_ms", "step_ms_min", "step_ms_max", "step_alone_ms", "dispatch_ms", "host_free", "images_per_s",
           "tflops", "unet_tflops", "matmul_tflops", "mfu_of_matmul", "host_peak_gib", "loss", "last_loss"]  # fmt: skip


def test_a_case_is_one_line_of_finite_figures():
    # A process with one device, as a user has: eight would compile for twice as long.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--model", "sd15", "--resolution", "8", "--batch", "3",
               "--steps", "2", "use_ema=false", *TINY]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert all(math.isfinite(line[key]) for key in FIGURES)
    expected = {"model": "sd15", "resolution": 8, "batch": 3, "global_batch": 3, "remat": "none", "ema": False, "device": "cpu",
                "devices": 1, "jax": jax.__version__, "mfu": None, "peak_gib": None}  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    assert 0.5 < line["loss"] < 1.5
    assert line["step_ms_min"] <= line["step_ms"] <= line["step_ms_max"]
    assert line["images_per_s"] == pytest.approx(3e3 / line["step_ms"], rel=0.01)


# Parameters of the published checkpoints; GFLOP of one forward pass at 64 x 64 latents, as torch.utils.flop_counter
# counts diffusers'.
@pytest.mark.parametrize(("model", "parameters", "gflop"), [("sd15", 859_520_964, 803), ("sd2", 865_910_724, 804)])
def test_rates_count_the_published_networks(model: str, parameters: int, gflop: float):
    config = train_step.configuration(model, 512, 1, ["global_batch_size=8"])
    origins = open_origins("", new=config.model.new)
    networks = origins.networks(origins.names())
    assert networks["unet"].num_parameters() == parameters
    total = flops.training(networks, ("unet",), 512).total
    task = SimpleNamespace(networks=networks, trained=("unet",), flops=total)
    rates = train_step.rates(config, task, 1000.0, 10.0)  # an image a second on each of the eight devices
    assert rates["unet_tflops"] == pytest.approx(3 * gflop / 1e3, rel=1e-3)
    assert rates["tflops"] == pytest.approx(total / 1e12, rel=1e-3)
    assert rates["mfu_of_matmul"] == pytest.approx(total / 1e13, rel=1e-3)
    assert rates["mfu"] is None


@pytest.mark.parametrize("override", ["remat=some", "use_em=false"])
def test_a_wrong_override_is_said_before_anything_runs(override: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        train_step.main(["--model", "sd15", override])
    assert override.partition("=")[0] in capsys.readouterr().err


def test_each_model_has_a_configuration():
    assert train_step.CONFIGS.keys() == ARCHITECTURES.keys()
