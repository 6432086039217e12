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

from benchmarks import gpu, gpu_program, train_step
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


@pytest.mark.parametrize("cached", [False, True])
def test_a_case_is_one_line_of_finite_figures(cached: bool):
    # A process with one device, as a user has: eight would compile for twice as long.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--model", "sd15", "--resolution", "8", "--batch", "3",
               "--steps", "2", "use_ema=false", *TINY, *(["--cached"] if cached else [])]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert all(math.isfinite(line[key]) for key in FIGURES)
    expected = {"model": "sd15", "pipeline": "cached" if cached else "full", "resolution": 8, "batch": 3, "global_batch": 3, "remat": "none", "ema": False, "device": "cpu",
                "devices": 1, "jax": jax.__version__, "mfu": None, "peak_gib": None}  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    assert 0.5 < line["loss"] < 1.5
    assert line["step_ms_min"] <= line["step_ms"] <= line["step_ms_max"]
    assert line["images_per_s"] == pytest.approx(3e3 / line["step_ms"], rel=0.01)


def test_sides_of_a_case_are_compared():
    ours = {
        "case": "sd2/512/32",
        "system": "maxdiff",
        "images_per_s": 150.0,
        "step_ms": 213.3,
        "step_ms_min": 213.0,
        "step_ms_max": 214.0,
        "mfu": 0.4,
        "mfu_of_matmul": 0.5,
        "peak_gib": 35.0,
        "compile_s": 84.5,
    }
    peer = {**ours, "system": "torch-diffusers", "images_per_s": 120.0, "mfu": None, "compile_s": 100}
    lines = gpu.table([ours, peer, {"case": "sd15/512/16", "system": "maxdiff", "error": "out of memory"}]).splitlines()
    assert lines[2] == "| sd2/512/32 | MaxDiff | 150.0 | 213.3 (213.0 to 214.0) | 1.25 | 40.0% / 50.0% | 35.0 | 84 | 145.0 |"
    assert lines[3].startswith("| sd2/512/32 | diffusers, `compile` | 120.0 | 213.3 (213.0 to 214.0) |  |  |")
    assert "out of memory" in lines[4]
    assert len({case.name for case in gpu.CASES}) == len(gpu.CASES)


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


def test_a_programs_kernels_are_counted_with_what_they_move():
    program = """HloModule step
%fused (p: f32[4,8]) -> f32[4,8] {
  ROOT %negate.1 = f32[4,8]{1,0} negate(%p)
}

ENTRY %main (x.1: f32[4,8], y.1: bf16[8]) -> (f32[4,8], bf16[]) {
  %x.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %y.1 = bf16[8]{0} parameter(1)
  %loop_select_fusion.3 = (f32[4,8]{1,0}, pred[4]{0}) fusion(%x.1, %y.1), kind=kLoop, calls=%fused
  %get-tuple-element.1 = f32[4,8]{1,0} get-tuple-element(%loop_select_fusion.3), index=0
  %pallas_call.2 = bf16[] custom-call(%get-tuple-element.1), metadata={op_name="jit(step)/jvp(layer_norm)/pallas_call"}
  %all-gather-start.1 = ((f32[4,8]{1,0}), f32[8,8]{1,0}) all-gather-start(%get-tuple-element.1), channel_id=1
  %all-gather-done.1 = f32[8,8]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %tuple = (f32[4,8]{1,0}, bf16[]) tuple(%get-tuple-element.1, %pallas_call.2)
}
"""
    assert list(gpu_program.launched(program)) == [
        ("update", 128 + 4 + 128 + 16), ("norms and sums", 2 + 128), ("communication", 256 + 128),
    ]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), [
    (["remat=some"], "remat"), (["remat=full"], "pip install -e '.[cuda]'"), (["--gpus", "0"], "--gpus=0 must be at least 1"),
])  # fmt: skip
def test_a_gpus_program_needs_its_compiler(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def absent(**_: str) -> None:
        raise RuntimeError("topology not implemented for cuda")  # as jax says it

    monkeypatch.setattr(gpu_program.topologies, "get_topology_desc", absent)
    with pytest.raises(SystemExit):
        gpu_program.main(["--batch", "1", *given])
    assert said in capsys.readouterr().err


def test_each_model_has_a_configuration():
    assert train_step.CONFIGS.keys() == ARCHITECTURES.keys()
