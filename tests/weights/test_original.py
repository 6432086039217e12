"""Single-file checkpoints, proven against diffusers' own from_single_file."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

from maxdiff.pipeline import Pipeline
from maxdiff.weights.checkpoint import make_network
from maxdiff.weights.tensors import read_metadata

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


def assert_same_networks(a: Pipeline, b: Pipeline):
    assert [name for name, _ in a.networks()] == [name for name, _ in b.networks()]
    for (name, x), (_, y) in zip(a.networks(), b.networks(), strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, x.params, y.params)), name


def with_the_layer_that_sd2_drops(path: Path, metadata: dict[str, str]):
    """A published SD 2.x file has one more layer, a text projection, and training's leftovers."""
    tensors = safetensors.numpy.load_file(path)
    prefix = "cond_stage_model.model.transformer.resblocks."
    last = max(int(k.removeprefix(prefix).split(".")[0]) for k in tensors if k.startswith(prefix))
    extra = {
        k.replace(f"{prefix}{last}.", f"{prefix}{last + 1}."): v for k, v in tensors.items() if k.startswith(f"{prefix}{last}.")
    }
    extra["cond_stage_model.model.text_projection"] = np.ones((64, 64), np.float32)
    extra["cond_stage_model.model.logit_scale"] = np.array(4.6, np.float32)
    extra["model_ema.decay"] = np.array(0.99, np.float32)
    extra["betas"] = np.ones(1000, np.float32)
    safetensors.numpy.save_file({**tensors, **extra}, path, metadata)


@pytest.mark.parametrize("kind", ["sd1", "inpaint", "sd2", "sdxl"])
def test_diffusers_reads_our_single_file_and_so_do_we(diffusers_pipelines: dict[str, Any], tmp_path: Path, kind: str):
    theirs, folder = diffusers_pipelines[kind]
    pipeline = Pipeline.load(folder)
    path = tmp_path / "model.safetensors"
    pipeline.save_single_file(path)
    found = type(theirs).from_single_file(str(path), config=str(folder), local_files_only=True)
    for part in PARTS:
        if getattr(theirs, part, None) is not None:
            expected, actual = getattr(theirs, part).state_dict(), getattr(found, part).state_dict()
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[k], actual[k]) for k in expected), part

    if kind == "sd2":
        with_the_layer_that_sd2_drops(path, read_metadata(path))
    again = Pipeline.load(path)
    assert_same_networks(again, pipeline)
    assert again.tokenizer == pipeline.tokenizer
    assert again.tokenizer_2 == pipeline.tokenizer_2
    assert again.scheduler["prediction_type"] == pipeline.scheduler["prediction_type"]
    ours, expected = again.unet.network.config, pipeline.unet.network.config
    differing = {k for k, v in vars(ours).items() if v != getattr(expected, k)}
    assert differing <= {"sample_size"}


def test_a_whole_pickled_checkpoint(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    pipeline = Pipeline.load(diffusers_pipelines["sd1"][1])
    pipeline.save_single_file(tmp_path / "x.safetensors")
    weights = {k: torch.from_numpy(v) for k, v in safetensors.numpy.load_file(tmp_path / "x.safetensors").items()}
    torch.save({"state_dict": weights, "global_step": 470_000}, tmp_path / "x.ckpt")
    assert_same_networks(Pipeline.load(tmp_path / "x.ckpt"), pipeline)


def test_an_sd2_file_that_does_not_say_what_it_predicts(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    path = tmp_path / "v2.safetensors"
    Pipeline.load(diffusers_pipelines["sd2"][1]).save_single_file(path)
    with_the_layer_that_sd2_drops(path, {"format": "pt"})
    with pytest.raises(ValueError, match="does not say what its UNet predicts; pass prediction_type=epsilon"):
        Pipeline.load(path)
    pipeline = Pipeline.load(path, prediction_type="v_prediction")
    assert pipeline.scheduler["prediction_type"] == "v_prediction"
    assert pipeline.unet.network.config.sample_size == 96


def test_parts_from_files_of_their_own(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    """An autoencoder in the original layout, and a UNet whose file is bare weights (as SDXL-Lightning's)."""
    folder = diffusers_pipelines["sdxl"][1]
    pipeline = Pipeline.load(folder)
    pipeline.save_single_file(tmp_path / "whole.safetensors")
    whole = safetensors.numpy.load_file(tmp_path / "whole.safetensors")
    vae = {k.removeprefix("first_stage_model."): v for k, v in whole.items() if k.startswith("first_stage_model.")}
    safetensors.numpy.save_file(vae, tmp_path / "vae.safetensors")
    unet = {k: 2 * v for k, v in safetensors.numpy.load_file(folder / "unet" / "diffusion_pytorch_model.safetensors").items()}
    safetensors.numpy.save_file(unet, tmp_path / "unet.safetensors")
    mixed = Pipeline.load(folder, sources={"vae": tmp_path / "vae.safetensors", "unet": tmp_path / "unet.safetensors",
                                           "text_encoder_2": folder / "text_encoder_2"})  # fmt: skip
    assert jax.tree.all(jax.tree.map(np.array_equal, mixed.vae.params, pipeline.vae.params))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, 2 * b), mixed.unet.params, pipeline.unet.params))
    # The configuration is the pipeline's: an original file cannot tell whose autoencoder it is.
    assert mixed.vae.network.config == pipeline.vae.network.config
    assert mixed.vae.network.config.scaling_factor == 0.13025
    with pytest.raises(ValueError, match="is no whole checkpoint; name it as one of the sources"):
        Pipeline.load(tmp_path / "unet.safetensors")
    with pytest.raises(ValueError, match="tokenizer_path: .*unet.safetensors has no tokenizer"):
        Pipeline.load(folder, sources={"tokenizer": tmp_path / "unet.safetensors"})


def test_original_parts_alone_and_with_trainings_leftovers(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    folder = diffusers_pipelines["sd1"][1]
    pipeline = Pipeline.load(folder)
    pipeline.save_single_file(tmp_path / "whole.safetensors")
    whole = safetensors.numpy.load_file(tmp_path / "whole.safetensors")
    prefix = "model.diffusion_model."
    files = {
        "unet": {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)},
        "prefixed": {k: v for k, v in whole.items() if not k.startswith("cond_stage_model.")},
        "vae": {k.removeprefix("first_stage_model."): v for k, v in whole.items() if k.startswith("first_stage_model.")},
        "clip": {k.replace("text_model.", ""): v for k, v in whole.items() if k.startswith("cond_stage_model.")},
    }
    files["vae"] |= {"loss.logvar": np.ones(1, np.float32), "model_ema.decay": np.ones(1, np.float32)}
    for name, tensors in files.items():
        safetensors.numpy.save_file(tensors, tmp_path / f"{name}.safetensors")
    for sources in (
        {"unet": "unet", "vae": "vae"},
        {"unet": "prefixed", "vae": "prefixed"},
        {"vae": "whole", "text_encoder": "whole"},
    ):
        loaded = Pipeline.load(folder, sources={k: tmp_path / f"{v}.safetensors" for k, v in sources.items()})
        assert_same_networks(loaded, pipeline)
    # The spelling of transformers 5.6, in a whole file.
    safetensors.numpy.save_file({**files["prefixed"], **files["clip"]}, tmp_path / "new.safetensors")
    assert_same_networks(Pipeline.load(tmp_path / "new.safetensors"), pipeline)


def test_sd2_round_trips_through_our_own_single_file(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    pipeline = Pipeline.load(diffusers_pipelines["sd2"][1])
    pipeline.save_single_file(tmp_path / "x.safetensors")
    assert_same_networks(Pipeline.load(tmp_path / "x.safetensors"), pipeline)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "unet",
            {"attention_head_dim": 4},
            "the layout cannot say that the unet has attention_head_dim=.*4.*; a reader takes .*8",
        ),
        ("vae", {"scaling_factor": 0.5}, "the vae has scaling_factor=0.5; a reader takes 0.18215"),
        ("text_encoder", {"hidden_act": "gelu"}, "the text_encoder has hidden_act='gelu'; a reader takes 'quick_gelu'"),
    ],
)
def test_what_a_single_file_cannot_say_is_an_error(diffusers_pipelines, tmp_path: Path, part: str, change: dict, message: str):
    pipeline = Pipeline.load(diffusers_pipelines["sd1"][1])
    old = getattr(pipeline, part)
    network = make_network(part, dataclasses.replace(old.network.config, **change))
    changed = dataclasses.replace(pipeline, **{part: dataclasses.replace(old, network=network)})
    with pytest.raises(ValueError, match=message):
        changed.save_single_file(tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_zero_terminal_snr_is_read(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    path = tmp_path / "x.safetensors"
    Pipeline.load(diffusers_pipelines["sdxl"][1]).save_single_file(path)
    whole = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({**whole, "v_pred": np.ones(0, np.float32), "ztsnr": np.ones(0, np.float32)}, path)
    scheduler = Pipeline.load(path).scheduler
    assert scheduler["prediction_type"] == "v_prediction"
    assert scheduler["rescale_betas_zero_snr"] is True


def test_strange_files_are_named(diffusers_pipelines: dict[str, Any], tmp_path: Path):
    path = tmp_path / "x.safetensors"
    Pipeline.load(diffusers_pipelines["sd1"][1]).save_single_file(path)
    whole = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({**whole, "control_model.x": np.ones(1)}, path)
    with pytest.raises(ValueError, match="1 keys belong to no part: control_model.x"):
        Pipeline.load(path)
    safetensors.numpy.save_file({k: v for k, v in whole.items() if not k.startswith("first_stage")}, path)
    with pytest.raises(ValueError, match="has no vae: no key begins with first_stage_model."):
        Pipeline.load(path)
    broken = {k: v for k, v in whole.items() if k != "model.diffusion_model.input_blocks.0.0.weight"}
    safetensors.numpy.save_file(broken, path)
    with pytest.raises(ValueError, match="the unet has no key 'input_blocks.0.0.weight', from which its architecture is read"):
        Pipeline.load(path)
    safetensors.numpy.save_file({"lora_unet_down.alpha": np.ones(1)}, path)
    with pytest.raises(ValueError, match="holds a LoRA .* not supported"):
        Pipeline.load(path)
    extra = {**whole, "model.diffusion_model.middle_block.9.weight": np.ones(1, np.float32)}
    safetensors.numpy.save_file(extra, path)
    with pytest.raises(ValueError, match="1 keys have no place in this network: middle_block.9.weight"):
        Pipeline.load(path)
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ValueError, match="a single file ends in one of .safetensors"):
        Pipeline.load(tmp_path / "x.txt")
