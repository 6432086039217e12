import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

import maxdiff
from benchmarks import parity

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")


def config_of(module: Any) -> dict[str, Any]:
    """A diffusers or transformers module's configuration, as JSON has it, without notes on who wrote it."""
    config = module.config.to_dict() if hasattr(module.config, "to_dict") else dict(module.config)
    notes = {"dtype", "transformers_version"}
    return json.loads(json.dumps({k: v for k, v in config.items() if not k.startswith("_") and k not in notes}))


@pytest.mark.parametrize("kind", ["sd1", "inpaint", "sd2", "sdxl"])
def test_a_saved_folder_loads_in_diffusers_without_a_warning_bit_for_bit(
    diffusers_pipelines, tmp_path: Path, kind: str, caplog
):
    theirs, folder = diffusers_pipelines[kind]
    maxdiff.Pipeline.load(folder).save(tmp_path / "saved")
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = type(theirs).from_pretrained(tmp_path / "saved")
    assert not [r for r in caplog.records if "weight" in r.getMessage().lower() or "not used" in r.getMessage()]
    for part in PARTS:
        if getattr(theirs, part, None) is not None:
            expected, actual = getattr(theirs, part).state_dict(), getattr(found, part).state_dict()
            assert expected.keys() == actual.keys()
            assert all(torch.equal(expected[k], actual[k]) for k in expected), part
            assert config_of(getattr(theirs, part)) == config_of(getattr(found, part))
    assert config_of(found.scheduler) == config_of(theirs.scheduler)
    texts = ["a red heart", "hello !"]
    for name in ("tokenizer", "tokenizer_2"):
        if getattr(theirs, name, None) is not None:
            ids = [getattr(p, name)(texts, padding="max_length", max_length=77).input_ids for p in (theirs, found)]
            assert ids[0] == ids[1]
    generic = __import__("diffusers").DiffusionPipeline.from_pretrained(tmp_path / "saved")
    assert type(generic) is type(theirs)


def test_a_second_round_trip_writes_the_same_bytes(folders: dict[str, Path], tmp_path: Path):
    maxdiff.Pipeline.load(folders["sdxl"]).save(tmp_path / "a")
    maxdiff.Pipeline.load(tmp_path / "a").save(tmp_path / "b")
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 18
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_saving_in_half_precision(folders: dict[str, Path], tmp_path: Path):
    pipeline = maxdiff.Pipeline.load(folders["sd1"])
    pipeline.save(tmp_path, dtype=jnp.float16)
    again = maxdiff.Pipeline.load(tmp_path)
    same = jax.tree.map(
        lambda a, b: np.array_equal(np.asarray(a).astype(np.float16).astype(np.float32), b),
        pipeline.unet.params,
        again.unet.params,
    )
    assert jax.tree.all(same)
    assert (
        tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    ).stat().st_size < 2.1 * pipeline.unet.network.num_parameters()


def test_saving_over_an_older_folder_leaves_nothing_that_shadows_it(diffusers_pipelines, folders, tmp_path: Path):
    folder = shutil.copytree(folders["sd1"], tmp_path / "sd1")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    diffusers_pipelines["sd1"][0].unet.save_pretrained(folder / "unet", max_shard_size="500KB")
    (folder / "README.md").write_text("mine")
    pipeline = maxdiff.Pipeline.load(folder)
    pipeline.save(folder)
    assert sorted(os.listdir(folder / "unet")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert (folder / "README.md").read_text() == "mine"
    again = maxdiff.Pipeline.load(folder)  # reading a folder and writing to it at once is safe: weights are copies
    assert jax.tree.all(jax.tree.map(np.array_equal, again.unet.params, pipeline.unet.params))


def test_saving_over_another_family_leaves_that_family_behind(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["sdxl"], tmp_path / "x")  # its tokenizers are tokenizer.json alone
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copy(unet, unet.with_suffix(".fp16.safetensors"))
    pipeline = maxdiff.Pipeline.load(folders["sd1"])
    pipeline.save(folder)
    again = maxdiff.Pipeline.load(folder)
    assert again.text_encoder_2 is None
    assert jax.tree.all(jax.tree.map(np.array_equal, again.unet.params, pipeline.unet.params))
    assert sorted(os.listdir(folder / "unet")) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert "tokenizer.json" not in os.listdir(folder / "tokenizer")


def test_a_part_that_the_index_lists_must_be_there(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["sdxl"], tmp_path / "x")
    shutil.rmtree(folder / "text_encoder_2")
    with pytest.raises(FileNotFoundError, match="has no file text_encoder_2/config.json"):
        maxdiff.Pipeline.load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": jnp.int32}, r"dtype=int32 is not supported \(allowed: float32, bfloat16, float16\)"),
        ({"dtype": np.float64}, "dtype=float64 is not supported"),
        ({"prediction_type": "foo"}, r"prediction_type='foo' is not supported \(allowed: epsilon, v_prediction, sample\)"),
        ({"from_pt": "true"}, r"from_pt='true' is not supported \(allowed: 'auto', True, False\)"),
        ({"sources": {"unett": "x"}}, r"sources: 'unett' is no part of a pipeline \(allowed: unet, vae, "),
    ],
)
def test_bad_options_are_named_first(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        maxdiff.Pipeline.load("/nowhere", **options)


def test_options_that_a_single_file_cannot_serve(folders: dict[str, Path], tmp_path: Path):
    file = tmp_path / "x.safetensors"
    maxdiff.Pipeline.load(folders["sd1"]).save_single_file(file)
    with pytest.raises(ValueError, match="from_pt=False: .* holds PyTorch weights"):
        maxdiff.Pipeline.load(file, from_pt=False)
    with pytest.raises(ValueError, match="variant=fp16: .* has no variants"):
        maxdiff.Pipeline.load(file, variant="fp16")
    with pytest.raises(FileNotFoundError, match="there is no file .*/y.safetensors"):
        maxdiff.Pipeline.load(tmp_path / "y.safetensors")
    for save in ("save", "save_single_file"):
        with pytest.raises(ValueError, match="dtype=int8 is not supported"):
            getattr(maxdiff.Pipeline.load(file), save)(file, dtype=jnp.int8)


def test_parts_that_are_not_made_for_each_other(folders: dict[str, Path], tmp_path: Path):
    sd1 = folders["sd1"]
    with pytest.raises(ValueError, match="cross_attention_dim=192 is not the text encoders' width 64"):
        maxdiff.Pipeline.load(sd1, sources={"unet": folders["sdxl"]})
    with pytest.raises(
        ValueError, match=r"_class_name='AutoencoderKL' is no unet that we know \(allowed: 'UNet2DConditionModel'\)"
    ):
        maxdiff.Pipeline.load(sd1, sources={"unet": sd1 / "vae"})
    with pytest.raises(ValueError, match="_class_name='UNet2DConditionModel' is no text_encoder"):
        maxdiff.Pipeline.load(sd1, sources={"text_encoder": sd1 / "unet"})
    vae = safetensors.numpy.load_file(sd1 / "vae" / "diffusion_pytorch_model.safetensors")
    safetensors.numpy.save_file({k: v.astype(np.int8) for k, v in vae.items()}, tmp_path / "vae.safetensors")
    with pytest.raises(ValueError, match="tensors do not fit: .* has dtype int8, no floating-point numbers"):
        maxdiff.Pipeline.load(sd1, sources={"vae": tmp_path / "vae.safetensors"})


def test_a_variant_of_some_parts_alone(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["sd1"], tmp_path / "x")
    plain = maxdiff.Pipeline.load(folder)
    unet = folder / "unet" / "diffusion_pytorch_model.safetensors"
    unet.rename(unet.with_suffix(".non_ema.safetensors"))
    found = maxdiff.Pipeline.load(folder, variant="non_ema")
    assert jax.tree.all(jax.tree.map(np.array_equal, found.unet.params, plain.unet.params))
    assert jax.tree.all(jax.tree.map(np.array_equal, found.vae.params, plain.vae.params))


def test_parts_from_elsewhere(folders: dict[str, Path], tmp_path: Path):
    other = maxdiff.Pipeline.load(folders["sd2"])
    other.save(tmp_path / "other")
    vae = {"block_out_channels": (32, 64), "norm_num_groups": 16}
    import diffusers

    torch.manual_seed(1)
    config = {**dict(diffusers.AutoencoderKL.load_config(folders["sd1"] / "vae")), **vae}
    diffusers.AutoencoderKL.from_config(config).save_pretrained(tmp_path / "vae-alone")
    mixed = maxdiff.Pipeline.load(
        folders["sd1"],
        sources={"vae": tmp_path / "vae-alone", "tokenizer": tmp_path / "other", "scheduler": tmp_path / "other" / "scheduler"},
    )
    assert mixed.vae.network.config.block_out_channels == (32, 64)
    assert mixed.tokenizer.pad_token == "!"
    assert mixed.scheduler["prediction_type"] == "v_prediction"


def test_prediction_type_overrides_the_scheduler(folders: dict[str, Path]):
    pipeline = maxdiff.Pipeline.load(folders["sd1"], prediction_type="v_prediction")
    assert pipeline.scheduler["prediction_type"] == "v_prediction"


def test_an_unsupported_configuration_is_named_before_weights_are_read(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["sd1"], tmp_path / "sd1")
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps({**config, "mid_block_add_attention": False}))
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="sd1/vae/config.json: mid_block_add_attention=False is not supported"):
        maxdiff.Pipeline.load(folder)


def test_the_parts_together_equal_diffusers(diffusers_pipelines: dict[str, Any]):
    """Text to states to noise to pixels, each through what was loaded."""
    theirs, folder = diffusers_pipelines["sdxl"]
    ours = maxdiff.Pipeline.load(folder)
    assert ours.text_encoder_2 is not None
    assert ours.tokenizer_2 is not None
    prompt = ["a cat in a hat"]
    with torch.no_grad():
        states, _, pooled, _ = theirs.encode_prompt(prompt[0], device="cpu", do_classifier_free_guidance=False)
    first = ours.text_encoder(ours.tokenizer(prompt))
    second = ours.text_encoder_2(ours.tokenizer_2(prompt))
    text = jnp.concatenate([first.hidden_states[-2], second.hidden_states[-2]], axis=-1)
    assert parity.relative(text, states) <= 1e-5
    assert parity.relative(second.text_embeds, pooled) <= 1e-5


def test_importing_and_loading_need_no_torch(folders: dict[str, Path]):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['diffusers'] = sys.modules['transformers'] = None\n"
        "import maxdiff; p = maxdiff.Pipeline.load(sys.argv[1]); print(p.unet.network.num_parameters())"
    )
    result = subprocess.run([sys.executable, "-c", code, str(folders["sd1"])], capture_output=True, text=True, check=True)
    assert int(result.stdout) == maxdiff.Pipeline.load(folders["sd1"]).unet.network.num_parameters()
    assert result.stderr == ""
