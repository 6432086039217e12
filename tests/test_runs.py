"""Kinds of training and what a run leaves behind, in this process: pictures, pipelines, an audit."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff import audit, export, generate, inputs
from maxdiff.build import check_restart, find_checkpoint
from maxdiff.checkpoint import Checkpoints
from maxdiff.command import Lost
from maxdiff.config import Config, load_config
from maxdiff.metrics import read_metrics
from maxdiff.models.network import flatten
from maxdiff.pipeline import Pipeline
from maxdiff.train import train

ROOT = Path(__file__).parent.parent
HELD_OUT = str(ROOT / "data" / "emoji" / "heldout-000000.tar")
TINY_VAE = "{block_out_channels: [16, 16], down_block_types: [DownEncoderBlock2D, DownEncoderBlock2D], \
up_block_types: [UpDecoderBlock2D, UpDecoderBlock2D], norm_num_groups: 8}"
TINY_UNET = "{block_out_channels: [32], down_block_types: [DownBlock2D], up_block_types: [UpBlock2D], \
layers_per_block: 1, attention_head_dim: 2, norm_num_groups: 8, cross_attention_dim: 32}"
TINY_TEXT = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1}"

# What makes the program of a step; runs that have the same compile it once.
TRAINING = ["train_text_encoder=true", "text_encoder_learning_rate=1e-2", "max_grad_norm=0", "caption_dropout=0.3"]
VAE_TRAINING = [f"vae={TINY_VAE}", "train_vae=true", "learning_rate=3e-3", f"eval_data_dir={HELD_OUT}"]


def configuration(tmp_path: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "base.yml", [
        "run_name=r", f"output_dir={tmp_path}", f"train_data_dir={HELD_OUT}", f"dataset_save_location={tmp_path}", "resolution=16",
        "activations_dtype=float32", "attention=dot_product", "data_workers=0", "max_train_steps=2", "log_period=1",
        "learning_rate=1e-3", *overrides,
    ])  # fmt: skip


def scratch(tmp_path: Path, *overrides: str) -> Config:
    """Diffusion with nothing pretrained at all."""
    return configuration(tmp_path, f"vae={TINY_VAE}", f"unet={TINY_UNET}", f"text_encoder={TINY_TEXT}", *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run that trained a UNet and a text encoder from nothing, with everything watched."""
    folder = tmp_path_factory.mktemp("scratch")
    train(scratch(folder, *TRAINING, f"eval_data_dir={HELD_OUT}", "eval_examples=12", "eval_every=2", "max_train_steps=4",
                  "validation_prompts=[red heart, cat, dog]", "num_inference_steps=2", "checkpoint_every=16",
                  "enable_profiler=true", "skip_first_n_steps_for_profiler=1", "profiler_steps=1"))  # fmt: skip
    return folder / "r"


def test_a_run_leaves_what_the_readme_says(run: Path):
    assert {path.name for path in run.iterdir()} == {
        "config.yml",
        "data.json",
        "heartbeat.json",
        "checkpoints",
        "metrics",
        "tensorboard",
        "samples",
        "pipeline",
    }
    assert {path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()} == {"2", "4"}
    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step-000002.png", "step-000004.png"]
    with Image.open(run / "samples" / "step-000004.png") as sheet:
        assert sheet.size == (16 + 4 + 16, 16 + 4 + 16)  # three prompts, in two rows
        assert sheet.info["prompts"] == "red heart\ncat\ndog"
    records = read_metrics(run)
    assert [record["step"] for record in records if "held_out_loss" in record] == [0, 2, 4]
    assert records[-1].keys() >= {"step", "held_out_loss"}
    assert any("text_encoder_learning_rate" in record for record in records)
    assert list((run / "tensorboard" / "plugins" / "profile").glob("*/*"))
    assert load_config(run / "config.yml").batch.global_batch_size == 8


def test_text_encoders_are_trained_at_their_own_rate_and_exported(run: Path):
    trained = Pipeline.load(run / "pipeline")
    config = load_config(run / "config.yml")
    start = Pipeline.load("", new=config.model.new, seed=config.run.seed)
    moved = lambda part: max(
        float(np.abs(a - b).max())
        for (_, a), (_, b) in zip(flatten(getattr(trained, part).params), flatten(getattr(start, part).params), strict=True)
    )
    # Adam's first steps are as long as the rate; the average has gone part of the way. A new UNet's last layers begin
    # as zeros, so the text encoder first feels a gradient at the third step. The autoencoder is at rest.
    assert 1e-3 < moved("unet") < 4e-3
    assert 4e-3 < moved("text_encoder") < 2e-2
    assert moved("vae") == 0


def test_diffusers_loads_a_runs_pipeline(run: Path):
    import diffusers
    import torch

    theirs = diffusers.StableDiffusionPipeline.from_pretrained(run / "pipeline")
    ours = Pipeline.load(run / "pipeline")
    rng = np.random.default_rng(0)
    x, text = rng.standard_normal((2, 8, 8, 4), np.float32), rng.standard_normal((2, 77, 32), np.float32)
    t = np.array([3, 700], np.int32)
    with torch.no_grad():
        expected = theirs.unet(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(t), torch.from_numpy(text)).sample
    np.testing.assert_allclose(ours.unet(x, t, text), expected.permute(0, 2, 3, 1).numpy(), atol=1e-4)


def test_a_run_draws_by_generate(run: Path, tmp_path: Path):
    common = ["run_name=r", f"output_dir={run.parent}", "resolution=16", "num_inference_steps=2", "activations_dtype=float32"]
    base, drawn = ROOT / "configs" / "base.yml", {}
    for name, step, more in (("last", None, ()), ("plain", None, ("use_ema=false",)), ("named", 4, ()), ("before", 2, ())):
        config = load_config(run / "config.yml", [*common, "prompt=A red heart!", *more])
        (path,) = generate.generate(config, step)
        model = f"r-{step or 4}" + ("-without-average" if more else "")
        assert path == run / "images" / model / "a-red-heart-0.png"
        with Image.open(path) as image:
            assert (image.size, image.info["prompt"], image.info["steps"]) == ((16, 16), "A red heart!", "2")
            assert image.info["model"] == model
            drawn[name] = np.asarray(image).astype(int)
    np.testing.assert_array_equal(drawn["last"], drawn["named"])
    assert all(np.abs(drawn[name] - drawn["last"]).max() > 0 for name in ("before", "plain"))
    # As pipeline/ has it, for which training wrote the same weights; and that is all that a run needs that was moved.
    shutil.copytree(run / "pipeline", tmp_path / "r" / "pipeline")
    shutil.copy(run / "config.yml", tmp_path / "r" / "config.yml")
    (path,) = generate.generate(load_config(run / "config.yml", [*common, f"output_dir={tmp_path}", "prompt=A red heart!"]))
    with Image.open(path) as image:
        assert np.abs(np.asarray(image).astype(int) - drawn["last"]).max() <= 1
    for overrides, step, message in (
        ([*common[1:], "prompt=x"], None, "run_name and output_dir, or pretrained_model_name_or_path, is required"),
        ([*common, "run_name=q", "prompt=x"], None, "q has no checkpoint"),
        ([*common, "prompt=x"], 3, r"has no checkpoint of step 3 \(there are: 2, 4\)"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            generate.generate(load_config(base if step is None else run / "config.yml", overrides), step)


def test_a_run_draws_on_another_mesh_by_its_own_settings(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    asked = []
    monkeypatch.setattr(generate, "generate", lambda config, step: asked.append((config, step)))
    assert generate.main([str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={run.parent}", "prompt=x", "step=2",
                          "skip_jax_distributed_system=true", "ici_fsdp_parallelism=2"]) == 0  # fmt: skip
    ((config, step),) = asked
    assert step == 2
    assert (config.sampling.num_inference_steps, config.model.unet["block_out_channels"]) == (2, [32])  # the run's
    assert (config.sampling.prompt, config.mesh.ici_fsdp_parallelism) == ("x", 2)
    # What a file says of drawing counts too, under the command line, and over the run's.
    (tmp_path / "my.yml").write_text(
        f"base: {ROOT / 'configs' / 'base.yml'}\nsampler: euler\nnum_inference_steps: 7\nprompt: y\n"
    )
    common = ["run_name=r", f"output_dir={run.parent}", "skip_jax_distributed_system=true"]
    assert generate.main([str(tmp_path / "my.yml"), *common, "sampler=heun"]) == 0
    sampling = asked[-1][0].sampling
    assert (sampling.sampler, sampling.num_inference_steps, sampling.prompt) == ("heun", 7, "y")
    for changed, message in (
        ("unet_path=other", "unet_path='other' is not for a run, whose own weights are drawn with"),
        ("revision=v2", "revision='v2' is not for a run"),
    ):
        assert generate.main([str(tmp_path / "my.yml"), *common, changed]) == 2
        assert message in capsys.readouterr().err


def test_an_audit_names_what_made_a_step(run: Path, capsys):
    arguments = [str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={run.parent}"]
    assert audit.main([*arguments, "step=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [dict(zip(lines[1].split("\t"), line.split("\t"), strict=True)) for line in lines[2:]]
    assert [row["position"] for row in rows] == [str(p) for p in range(8, 16)]
    assert len({row["noise key"] for row in rows}) == 8
    assert all(0 <= int(row["timestep"]) < 1000 and row["example"].startswith(HELD_OUT) for row in rows)
    assert any(row["caption"] == "(none)" for row in rows) != all(row["caption"] == "(none)" for row in rows)
    assert audit.main([*arguments, "step=2"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    for wrong, message in (
        (["step=0"], "step=0 is not one whole number"),
        (["step=1", "step=2"], "step=1,2 is not one whole number"),
        ([], "step=N is required"),
        (["run_name=q", "step=1"], "there is no run in "),
    ):
        assert audit.main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_checkpoint_is_exported_on_request(run: Path, tmp_path: Path, capsys):
    shutil.copytree(run, tmp_path / "r")
    unfinished = tmp_path / "r" / "checkpoints" / "6.orbax-checkpoint-tmp"  # a save of a run that is training now
    unfinished.mkdir()
    arguments = [str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={tmp_path}", "skip_jax_distributed_system=true"]
    weights = lambda: dict(flatten(Pipeline.load(tmp_path / "r" / "pipeline").unet.params))["conv_out", "kernel"]
    last = weights()
    assert export.main([*arguments, "step=2"]) == 0
    assert not np.array_equal(weights(), last)
    assert export.main(arguments) == 0
    assert np.array_equal(weights(), last)
    assert export.main([*arguments, "step=3"]) == 2
    assert "has no checkpoint of step 3 (there are: 2, 4)" in capsys.readouterr().err
    assert unfinished.is_dir()


def test_a_finished_run_is_not_trained_again(run: Path, tmp_path: Path, capsys):
    shutil.copytree(run, tmp_path / "r")
    (tmp_path / "r" / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors").unlink()  # as if stopped before it
    config = load_config(run / "config.yml", [f"output_dir={tmp_path}"])
    metrics = tmp_path / "r" / "metrics" / "metrics.jsonl"
    lines = metrics.read_bytes()
    assert int(train(config).step) == 4
    assert metrics.read_bytes() == lines
    assert "nothing is left to train: the run has made 4 of 4 steps" in capsys.readouterr().out
    assert (tmp_path / "r" / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors").is_file()


def test_a_run_that_ended_before_it_was_judged_is_judged(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "r")
    metrics = tmp_path / "r" / "metrics" / "metrics.jsonl"
    *before, last = metrics.read_bytes().splitlines(keepends=True)
    assert b"held_out_loss" in last
    metrics.write_bytes(b"".join(before))
    train(load_config(run / "config.yml", [f"output_dir={tmp_path}"]))
    assert read_metrics(tmp_path / "r") == read_metrics(run)


@pytest.mark.parametrize("override", ["unet={block_out_channels: [64]}", "use_ema=false", "optimizer=lion", "vae_path=x"])
def test_what_a_run_is_cannot_change(run: Path, tmp_path: Path, override: str):
    shutil.copytree(run, tmp_path / "r")
    config = load_config(run / "config.yml", [f"output_dir={tmp_path}", "max_train_steps=9", override])
    with pytest.raises(
        ValueError, match=rf"{override.partition('=')[0]}=.* is another than the run began with, .*another run_name"
    ):
        train(config)
    assert load_config(tmp_path / "r" / "config.yml").batch.max_train_steps == 4


def test_what_else_has_changed_is_said(run: Path, capsys):
    said = ["changed since the last start: seed: 0 -> 3", "changed since the last start: learning_rate: 0.001 -> 1"]
    changed = ["learning_rate=1", "seed=3", "jax_cache_dir=x", "train_data_dir=elsewhere", "ici_fsdp_parallelism=2"]
    with pytest.raises(
        ValueError, match=r"seed=3 is another than the run began with, 0: .* \(allowed: that, or allow_config_change"
    ):
        check_restart(load_config(run / "config.yml", changed))
    lines = capsys.readouterr().out.splitlines()
    assert set(said) <= set(lines)
    check_restart(load_config(run / "config.yml", [*changed, "allow_config_change=true"]))
    assert set(lines) <= set(capsys.readouterr().out.splitlines())


def test_a_failure_after_the_last_step_loses_nothing(tmp_path: Path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "samples").write_text("in the way")
    with pytest.raises(Lost, match=r"File exists(.|\n)*after step 2 on host .*; the last checkpoint is of step 2"):
        train(configuration(tmp_path, *VAE_TRAINING, "eval_examples=8"))
    with Checkpoints(tmp_path / "r" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2]


def test_another_run_goes_on_from_a_checkpoint(run: Path, tmp_path: Path):
    state = train(scratch(tmp_path, f"resume_from={run}", *TRAINING, "max_train_steps=5"))
    assert int(state.step) == 5
    assert [record["step"] for record in read_metrics(tmp_path / "r")] == [5]
    assert find_checkpoint(str(run / "checkpoints" / "2")) == (run / "checkpoints", 2)
    with pytest.raises(FileNotFoundError, match=r"resume_from=.* has no checkpoint"):
        find_checkpoint(str(tmp_path))


def test_what_is_pretrained_is_drawn_before_training(run: Path, tmp_path: Path):
    """As the run that made it drew it in the end."""
    train(configuration(tmp_path, f"pretrained_model_name_or_path={run / 'pipeline'}", "max_train_steps=1", "num_inference_steps=2",
                        "per_device_batch_size=1", "validation_prompts=[red heart, cat, dog]"))  # fmt: skip
    drawn = tmp_path / "r" / "samples"
    assert [path.name for path in sorted(drawn.iterdir())] == ["step-000000.png", "step-000001.png"]
    with Image.open(drawn / "step-000000.png") as before, Image.open(run / "samples" / "step-000004.png") as end:
        assert np.abs(np.asarray(before).astype(int) - np.asarray(end)).max() <= 1


def test_an_autoencoder_learns_and_scales_its_latents(tmp_path: Path):
    import diffusers

    train(configuration(tmp_path, *VAE_TRAINING, "eval_examples=9", "num_examples_to_see=160", "log_period=10",
                        "export_dtype=float16"))  # fmt: skip
    held_out = [record for record in read_metrics(tmp_path / "r") if "held_out_loss" in record]
    assert [record["step"] for record in held_out] == [0, 20]  # 160 images, 8 a step
    assert held_out[-1]["held_out_loss"] < 0.7 * held_out[0]["held_out_loss"]
    assert held_out[-1]["held_out_psnr"] > held_out[0]["held_out_psnr"] + 2
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "r" / "pipeline", subfolder="vae")
    assert vae.config.scaling_factor != 0.18215
    with Image.open(tmp_path / "r" / "samples" / "step-000020.png") as sheet:
        assert sheet.size == (8 * 20 - 4, 2 * 20 - 4)
    # A configuration for the autoencoder alone trains nothing else.
    assert {path.name for path in (tmp_path / "r" / "pipeline").iterdir()} == {"vae"}


def test_the_global_batch_stays_what_the_first_start_made_it(run: Path):
    from maxdiff.build import mesh_of, settle_batch

    config = load_config(ROOT / "configs" / "base.yml", ["run_name=r", f"output_dir={run.parent}"])
    settled, accumulation = settle_batch(config, mesh_of(config))
    assert (settled.batch.global_batch_size, accumulation) == (8, 1)
    config = load_config(ROOT / "configs" / "base.yml", ["run_name=r", f"output_dir={run.parent}", "per_device_batch_size=2"])
    with pytest.raises(ValueError, match="global_batch_size=8 is no multiple of per_device_batch_size=2 x 8 devices"):
        settle_batch(config, mesh_of(config))


def test_a_run_whose_data_have_changed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    """And not a run whose data have not."""
    for path, changed in ((HELD_OUT, False), (HELD_OUT, False), (str(ROOT / "data" / "emoji" / "train-000000.tar"), True)):
        source = inputs.open_examples(configuration(tmp_path, f"train_data_dir={path}"), "train_data_dir")
        message = "the training data have changed since the last start (165 examples then, "
        if changed:
            with pytest.raises(ValueError, match="train_data_dir: " + re.escape(message)):
                inputs.check_data(tmp_path, source, may_change=False)
        inputs.check_data(tmp_path, source, may_change=changed)
        assert (message in capsys.readouterr().out) == changed
