"""python -m maxdiff.evaluate: what is measured, kept, shown and followed; the feature network here is a small one."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxdiff import build, evaluate, features, generate, measure, train
from maxdiff.config import Config, load_config
from maxdiff.diffusion.objective import Objective, noisy_batch
from maxdiff.diffusion.schedule import add_noise, noise_schedule

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data" / "emoji" / "heldout-000000.tar"


def keys(folder: Path, *overrides: str) -> list[str]:
    return [f"output_dir={folder}", "resolution=16", "num_inference_steps=2", "activations_dtype=float32", "attention=dot_product",
            "skip_jax_distributed_system=true", f"eval_data_dir={DATA}", "eval_examples=6", "eval_timesteps=3",
            f"dataset_save_location={folder}/indexes", "per_device_batch_size=1", *overrides]  # fmt: skip


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each look of the network was at: it sees the mean colours of quarters."""
    seen: list[int] = []

    def extract(images: np.ndarray) -> np.ndarray:
        seen.append(len(images))
        b, h, w, _ = images.shape
        return images.reshape(b, 2, h // 2, 2, w // 2, 3).mean((2, 4)).reshape(b, 12).astype(np.float32) / 255

    network = features.FeatureNetwork("quarters", extract, 12, is_inception=False, fingerprint="quarters")
    monkeypatch.setattr(features, "efficientnet", lambda: network)
    return seen


def config_of(pipeline: Path, folder: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "base.yml", [f"pretrained_model_name_or_path={pipeline}", *keys(folder, *overrides)])


def test_a_model_is_measured_once(one_level: Path, tmp_path: Path, looks: list[int], capsys: pytest.CaptureFixture):
    config = config_of(one_level, tmp_path, "eval_guidance_scales=[1, 3]", "eval_images=9")
    found = evaluate.evaluate(config)
    assert [row["guidance_scale"] for row in found["drawn"]] == [1, 3]
    for row in found["drawn"]:
        assert row["images"] == 9
        assert row["frechet_distance"] > 0
        assert 0 <= row["precision"] <= 1 >= row["recall"] >= 0
        assert "clip_score" not in row
    assert list(map(int, found["losses"])) == measure.timesteps(1000, 3) == [166, 500, 833]
    assert all(0.1 < loss < 10 for loss in found["losses"].values())
    assert looks.count(1) + sum(n for n in looks if n > 1) >= 6 + 2 * 9
    (kept,) = (tmp_path / "evaluation").glob("*.json")
    assert json.loads(kept.read_text()) == found
    assert len(list((tmp_path / "evaluation").glob("*-guidance-*.png"))) == 2
    told = capsys.readouterr().out
    assert "distances are no FID" in told
    assert "| guidance scale | images | frechet distance | kernel distance |" in told
    assert "| held-out loss at timestep | 166 | 500 | 833 |" in told
    # What stands there is not measured again; with other settings it is, but for the real pictures.
    del looks[:]
    assert evaluate.evaluate(config) == found
    assert not looks
    assert "is there already" in capsys.readouterr().out
    other = evaluate.evaluate(config_of(one_level, tmp_path, "eval_guidance_scales=[1]", "eval_images=9"))
    assert other["drawn"][0] == found["drawn"][0]
    assert sum(looks) == 9


def test_drawings_are_those_of_generate(one_level: Path, tmp_path: Path):
    """The i-th of the captions in turn, with seed + i."""
    config = config_of(one_level, tmp_path, "seed=5", "guidance_scale=2.0")
    layout = build.layout_of(config)
    pipeline, _ = generate.load(config, layout, None)
    captions = ["a red heart", "a cat", "a dog"]
    drawn = list(measure.make_drawings(config, layout, pipeline, captions, 2.0))
    assert [some for _, some in drawn] == [captions]
    paths = generate.generate(
        dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, prompts=tuple(captions)))
    )
    for image, path in zip(drawn[0][0], paths, strict=True):
        with Image.open(path) as other:
            np.testing.assert_array_equal(image, np.asarray(other))


def test_all_examples_are_noised_at_the_timestep_that_is_given():
    schedule = noise_schedule({"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000,
                               "prediction_type": "epsilon"})  # fmt: skip
    key, positions = jax.random.key(0), jnp.arange(3)
    x0 = jax.random.normal(jax.random.key(1), (3, 4, 4, 4))
    free, fixed = (noisy_batch(Objective(), schedule, x0, key, positions, t) for t in (None, jnp.int32(700)))
    assert fixed.t.tolist() == [700] * 3 != free.t.tolist()
    np.testing.assert_array_equal(fixed.target, free.target)  # the same noise
    np.testing.assert_array_equal(fixed.noisy, add_noise(schedule, x0, free.target, fixed.t))


def test_a_run_is_followed_to_its_end(one_level: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Checkpoints that come while it waits are judged too."""
    run = ["run_name=r", *keys(tmp_path / "done", "max_train_steps=3", "global_batch_size=8", "checkpoint_every=8",
                               "checkpoints_to_keep=9", f"train_data_dir={DATA}", "center_crop=true", "data_workers=0",
                               f"pretrained_model_name_or_path={one_level}")]  # fmt: skip
    assert train.main([str(ROOT / "configs" / "base.yml"), *run]) == 0
    # As it was after its first save.
    now, whole = tmp_path / "now" / "r", tmp_path / "done" / "r"
    shutil.copytree(
        whole, now, ignore=lambda folder, names: [n for n in names if Path(folder).name == "checkpoints" and n in "23"]
    )
    argv = [str(ROOT / "configs" / "base.yml"), *keys(tmp_path / "now"), "run_name=r", f"output_dir={tmp_path / 'now'}"]
    config = generate.of_run(load_config(argv[0], argv[1:]), argv)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        step = str(1 + len(waits))
        shutil.copytree(whole / "checkpoints" / step, now / "checkpoints" / step)

    evaluate.follow(config, wait)
    assert len(waits) == 2
    assert [one["step"] for one in evaluate.results(now / "evaluation")] == [1, 2, 3]
    assert "waiting for another checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(("overrides", "message"), [
    (["eval_data_dir="], "eval_data_dir is required"),
    (["inception_path=/nowhere/inception.pth"], "/nowhere/inception.pth"),
    (["clip_path=/nowhere/clip"], "/nowhere/clip"),
    (["eval_guidance_scales=[-1]"], "eval_guidance_scales=[-1] (allowed: numbers of 0 or more)"),
    (["eval_timesteps=0"], "eval_timesteps=0"),
    (["--follow"], "--follow is for all checkpoints of a run"),
])  # fmt: skip
def test_mistakes_are_told_in_a_line(
    one_level: Path, tmp_path: Path, capsys: pytest.CaptureFixture, overrides: list[str], message: str
):
    argv = [str(ROOT / "configs" / "base.yml"), f"pretrained_model_name_or_path={one_level}", *keys(tmp_path), *overrides]
    assert evaluate.main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1


def test_the_table_calls_inceptions_distances_by_their_names(tmp_path: Path):
    row: dict[str, Any] = {"guidance_scale": 3.0, "images": 10, "frechet_distance": 12.345, "kernel_distance": 0.01, "kernel_spread": 0.001,
                           "precision": 0.5, "recall": 0.25, "clip_score": 30.0}  # fmt: skip
    one = {"model": "r-10", "step": 10, "network": "inception", "losses": {"500": 0.1}, "drawn": [row]}
    text = evaluate.table([one])
    assert "| FID | KID | KID spread | precision | recall | CLIP score |" in text
    assert "| r-10 | inception | 3 | 10 | 12.35 | 0.01 | 0.001 | 0.5 | 0.25 | 30 |" in text
    other = evaluate.table([one, {**one, "network": "efficientnet-lite0"}])
    assert "FID" not in other
    assert "| frechet distance | kernel distance |" in other
    pytest.importorskip("matplotlib")
    assert evaluate.plot([one], tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size[0] > 1000
