"""generate.py: many prompts over devices, finished files skipped, what PNGs say of themselves, and mistakes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from maxdiff import generate
from maxdiff.config import load_config
from maxdiff.images import write_png
from maxdiff.pipeline import Pipeline

ROOT = Path(__file__).parent.parent
PROMPTS = ["a red heart", "a cat", "a dog in the rain"]


def keys(pipeline: Path, output: Path, *overrides: str) -> list[str]:
    return [f"pretrained_model_name_or_path={pipeline}", f"output_dir={output}", "resolution=16", "num_inference_steps=2",
            "activations_dtype=float32", "attention=dot_product", "skip_jax_distributed_system=true", *overrides]  # fmt: skip


def draw(pipeline: Path, output: Path, *overrides: str) -> list[Path]:
    return generate.generate(load_config(ROOT / "configs" / "base.yml", keys(pipeline, output, *overrides)))


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def drawn(one_level: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six images on eight devices."""
    return draw(
        one_level, tmp_path_factory.mktemp("drawn"), f"prompts_file={prompts_file}", "num_images_per_prompt=2", "seed=5"
    )


def test_a_file_of_prompts_becomes_pngs_that_say_what_they_are(drawn: list[Path], one_level: Path):
    assert [path.name for path in drawn] == [
        "00000-a-red-heart-5.png", "00000-a-red-heart-6.png", "00001-a-cat-7.png", "00001-a-cat-8.png",
        "00002-a-dog-in-the-rain-9.png", "00002-a-dog-in-the-rain-10.png",
    ]  # fmt: skip
    with Image.open(drawn[2]) as image:
        assert image.size == (16, 16)
        assert image.info["prompt"] == "a cat"
        assert image.info["parameters"] == (
            f"a cat\nSteps: 2, Sampler: DDIM, CFG scale: 7.5, Seed: 7, Size: 16x16, Model: {one_level.stem}"
        )
    with Image.open(drawn[0].parent / "sheet.png") as sheet:
        assert sheet.size == (3 * 16 + 2 * 4, 2 * 16 + 4)


def test_one_device_draws_the_same_and_so_does_each_prompt_alone(
    drawn: list[Path], one_level: Path, prompts_file: Path, tmp_path: Path
):
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "generate.py"), str(ROOT / "configs" / "base.yml"),
               *keys(one_level, tmp_path, f"prompts_file={prompts_file}", "num_images_per_prompt=2", "seed=5", "per_device_batch_size=4")]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"the first 4 images after [\d.]+ s\n6 images drawn, [\d.]+ images/s after the first\n", done.stdout)
    for path in drawn:
        assert np.abs(pixels(tmp_path / path.name) - pixels(path)).max() <= 1
    (alone,) = draw(one_level, tmp_path / "alone", "prompt=a cat", "seed=8")
    assert np.abs(pixels(alone) - pixels(drawn[3])).max() <= 1
    assert np.abs(pixels(alone) - pixels(drawn[2])).max() > 1


def test_finished_files_are_skipped_and_others_drawn(
    drawn: list[Path], one_level: Path, prompts_file: Path, tmp_path: Path, capsys
):
    for path in drawn:
        shutil.copy(path, tmp_path)
    before = (tmp_path / drawn[1].name).stat().st_mtime_ns
    (tmp_path / drawn[0].name).unlink()
    damaged = tmp_path / drawn[2].name
    damaged.write_bytes(damaged.read_bytes()[:-200])
    draw(one_level, tmp_path, f"prompts_file={prompts_file}", "num_images_per_prompt=2", "seed=5")
    assert "2 images drawn, 4 images there already" in capsys.readouterr().out
    for path in drawn:
        np.testing.assert_array_equal(pixels(tmp_path / path.name), pixels(path))
    assert (tmp_path / drawn[1].name).stat().st_mtime_ns == before


def test_an_image_of_another_way_is_kept(one_level: Path, tmp_path: Path):
    (path,) = draw(one_level, tmp_path, "prompt=a cat")
    before = path.read_bytes()
    for changed, differs in (
        ("sampler=euler", "sampler"),
        ("prediction_type=v_prediction", "scheduler"),
        ("weights_dtype=bfloat16", "weights_dtype"),
    ):
        with pytest.raises(ValueError, match=f"a-cat-0.png was made in another way .differs in {differs}.; allowed: another"):
            draw(one_level, tmp_path, "prompt=a cat", changed)
    assert path.read_bytes() == before
    draw(one_level, tmp_path, "prompt=a cat", "sampler=euler", "overwrite=true")
    assert path.read_bytes() != before
    write_png(tmp_path / "sheet.png", np.zeros((4, 4, 3), np.uint8))
    foreign = (tmp_path / "sheet.png").read_bytes()
    draw(one_level, tmp_path, "prompts=[a dog, a horse]")
    assert (tmp_path / "sheet.png").read_bytes() == foreign


def test_one_prompt_is_not_drawn_many_times(one_level: Path, tmp_path: Path):
    with mock.patch.object(generate, "requests", wraps=generate.requests) as asked:
        draw(one_level, tmp_path, "prompt=a cat", "per_device_batch_size=64")
    assert [len(call.args[1]) for call in asked.call_args_list] == [8]  # one for each of the tests' devices


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("word " * 75 + "and this is lost", 81), ("".join(map(chr, range(0x4E00, 0x4E00 + 40))) + "this is lost", 0)],
)
def test_a_prompt_that_is_cut_is_told(one_level: Path, tmp_path: Path, capsys, prompt: str, tokens: int):
    draw(one_level, tmp_path, f"prompt={prompt}", "guidance_scale=1")
    said = capsys.readouterr().out
    assert re.search(rf"has {tokens or '[0-9]+'} tokens, and 77 are read; this is cut off: ", said)
    assert "this is lost'" in said


def test_an_image_is_changed_by_its_strength(one_level: Path, tmp_path: Path):
    original = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    write_png(tmp_path / "given.png", original)
    common = ["prompt=a cat", f"image={tmp_path / 'given.png'}", "num_inference_steps=4"]
    little, much = (draw(one_level, tmp_path / s, *common, f"strength={s}")[0] for s in ("0.25", "1.0"))
    with Image.open(little) as image:
        assert image.info["strength"] == "0.25"
        assert "Denoising strength: 0.25" in image.info["parameters"]
    (anew,) = draw(one_level, tmp_path / "anew", "prompt=a cat", "num_inference_steps=4")
    assert np.abs(pixels(little) - pixels(much)).mean() > 1
    assert np.abs(pixels(much) - pixels(anew)).mean() < np.abs(pixels(little) - pixels(anew)).mean()


def test_an_inpainting_model_draws_where_the_mask_is(folders: dict[str, Path], tmp_path: Path):
    write_png(tmp_path / "given.png", np.full((16, 16, 3), 200, np.uint8))
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[:, 8:] = 255
    write_png(tmp_path / "mask.png", mask)
    common = ["prompt=a cat", f"image={tmp_path / 'given.png'}"]
    (first,) = draw(folders["inpaint"], tmp_path, *common, f"mask={tmp_path / 'mask.png'}")
    write_png(tmp_path / "all.png", np.full((16, 16, 3), 255, np.uint8))
    (second,) = draw(folders["inpaint"], tmp_path / "all", *common, f"mask={tmp_path / 'all.png'}")
    assert np.abs(pixels(first) - pixels(second)).mean() > 0.1
    for overrides, message in (
        (common, "this is an inpainting model: mask is required, and image"),
        (["prompt=a cat", f"mask={tmp_path / 'mask.png'}"], "mask is given without image"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(folders["inpaint"], tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompt=x", "sampler=eulr"], "sampler='eulr'"),
        (["prompt=x", "height=33"], "height=33 is not supported; allowed: positive multiples of 2"),
        (["prompt=x", "seeds=[1, 2]"], "seeds has 2 numbers for 1 prompts"),
        (["prompts_file=@/empty.txt"], "has no prompt"),
        (["prompt=x", "run_name=q"], "q has no checkpoint"),
        (["prompt=x", "step=3"], "step=3 is of a run (run_name and output_dir are required)"),
        (["prompt=x", "step=x"], "step=x is not one whole number (allowed: 1 or more)"),
        (["prompt=x", "mask=@/empty.txt"], "mask is for inpainting models, whose unet has in_channels=9; this one has 4"),
        (["prompt=x", "image=@/empty.txt"], "empty.txt cannot be read as an image"),
        (["prompt=x", "clip_skip=2"], "clip_skip=2 is too many for the text_encoder's 2 layers"),
        (["prompt=x", "strength=2"], "strength=2 is out of range (allowed: 0 to 1)"),
        (["prompt=x", "strength=0.5"], "strength=0.5 is of a change of an image, and none is given"),
        (
            ["prompt=x", "use_karras_sigmas=true"],
            "use_karras_sigmas=True is not for sampler=ddim, which has no such choice (allowed with: euler, ",
        ),
        (["prompt=x", "sampler=lcm", "timestep_spacing=trailing"], "timestep_spacing='trailing' is not for sampler=lcm"),
        (["prompt=x", "output_dir=@/empty.txt"], "File exists"),
        ([], "no prompt given; allowed: one of prompt, prompts and prompts_file"),
    ],
)
def test_mistakes_are_one_line(one_level: Path, tmp_path: Path, capsys, overrides: list[str], message: str):
    (tmp_path / "empty.txt").write_text("\n")
    given = [override.replace("@", str(tmp_path)) for override in overrides]
    assert generate.main([str(ROOT / "configs" / "base.yml"), *keys(one_level, tmp_path, *given)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


def test_pipeline_generate(one_level: Path, drawn: list[Path]):
    pipeline = Pipeline.load(one_level)
    images = pipeline.generate(PROMPTS[:2], steps=2, seed=[5, 7], height=16, width=16)
    assert images.shape == (2, 16, 16, 3)
    for image, path in zip(images, (drawn[0], drawn[2]), strict=True):
        assert np.abs(image.astype(int) - pixels(path)).max() <= 1
    given = {"steps": 2, "height": 16, "width": 16}
    sliced = pipeline.generate(PROMPTS[:2], seed=[5, 7], vae_slicing=True, **given)
    assert np.abs(sliced.astype(int) - images).max() <= 1
    with pytest.raises(ValueError, match="mask is for inpainting models, whose unet has in_channels=9; this one has 4"):
        pipeline.generate("x", mask=np.ones((1, 16, 16, 1)), **given)
    latents = np.random.default_rng(0).standard_normal((1, 8, 8, 4))
    same, other = (pipeline.generate("x", latents=latents, seed=seed, **given) for seed in (0, 1))
    np.testing.assert_array_equal(same, other)
    with pytest.raises(ValueError, match=re.escape("latents of shape [1, 4, 4, 4] is not supported; allowed: [1, 8, 8, 4]")):
        pipeline.generate("x", latents=latents[:, :4, :4], **given)
    karras, plain = (
        pipeline.generate("x", sampler="euler", use_karras_sigmas=k, timestep_spacing="linspace", **{**given, "steps": 3})
        for k in (True, False)
    )
    assert (karras != plain).any()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("x", {"strength": 0.5}, "strength=0.5 is of a change of an image, and none is given"),
        ([], {}, "prompts=[] has no text"),
        ([3], {}, "prompts=[3] is no text, or a list of texts"),
        ("x", {"negative_prompt": None}, "negative_prompt=None is no text, or a list of texts"),
        ("x", {"seed": [3.5]}, "seed=[3.5] is no whole number, or a list of them"),
        ("x", {"seed": [1, 2]}, "2 seeds for 1 prompts; allowed: one for each"),
        ("x", {"guidance_scale": "7"}, "guidance_scale='7' is no finite number"),
        ("x", {"guidance_scale": float("nan")}, "guidance_scale=nan is no finite number"),
        ("x", {"image": np.zeros((1, 16, 16, 3))}, "image has dtype float64; allowed: uint8, 0 to 255"),
        ("x", {"latents": np.full((1, 8, 8, 4), np.nan)}, "latents has values that are not finite"),
        ("x", {"step": 3}, "generate has no step"),
    ],
)
def test_mistakes_of_pipeline_generate_are_named(one_level: Path, prompts: Any, options: dict, message: str):
    pipeline = Pipeline.load(one_level)
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.generate(prompts, **{"steps": 2, "height": 16, "width": 16, **options})


def test_whole_numbers_of_numpy_are_seeds_and_cut_prompts_are_logged(one_level: Path, caplog):
    pipeline = Pipeline.load(one_level)
    given = {"steps": 1, "height": 16, "width": 16, "guidance_scale": 1.0}
    one, two = (pipeline.generate("word " * 80, seed=seed, **given) for seed in (np.int64(3), 3))
    np.testing.assert_array_equal(one, two)
    assert "has 82 tokens, and 77 are read" in caplog.text
