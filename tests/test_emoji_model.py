"""The small pipeline that the repository ships, and the configuration that draws with it and trains it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.emoji_model import PROMPTS, agreement, drawn_by_both
from maxdiff import Pipeline, generate, train

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "data/emoji_model"
# The last three are in no caption of its training.
COLOUR = {"a red heart": "red", "a purple cat face": "purple", "a blue dog face": "blue", "a green heart with a bow": "green"}
ALONE = "skip_jax_distributed_system=true"


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray]:
    return drawn_by_both(FOLDER, Pipeline.load(FOLDER))


def test_its_folder_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 20e6


def test_diffusers_draws_the_same_pictures(drawn: tuple[np.ndarray, np.ndarray]):
    figures = agreement(*drawn)
    assert figures["most_levels"] <= 2
    assert figures["equal"] > 0.99
    assert drawn[0].std(axis=(1, 2, 3)).min() > 30  # there is something to see


def test_it_draws_what_it_is_told(drawn: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "data")
    from emoji_captions import COLOURS, names_of

    images = dict(zip(PROMPTS, drawn[0], strict=True))
    for prompt, colour in COLOUR.items():
        pixels = images[prompt].reshape(-1, 3)
        names = names_of(pixels[pixels.min(1) < 200] / np.float32(255))
        assert COLOURS[np.bincount(names).argmax()] == colour, prompt
    bow = images["a green heart with a bow"][:48].astype(int)  # red, at the top
    assert ((bow[..., 0] > bow[..., 1] + 80) & (bow[..., 0] > bow[..., 2] + 80)).sum() > 100


def test_it_draws_without_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    keys = [f"output_dir={tmp_path}", "prompt=a red heart", "num_inference_steps=4", ALONE]
    assert generate.main(["configs/emoji.yml", *keys]) == 0
    image = np.asarray(Image.open(tmp_path / "a-red-heart-0.png")).astype(int)
    red, green = image[64, 64, :2]
    assert image.shape == (128, 128, 3)
    assert red > green + 100


def test_the_demo_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    keys = ["max_train_steps=2", "per_device_batch_size=2", "validation_prompts=[]", "log_period=1", ALONE]
    assert train.main(["configs/emoji.yml", "run_name=demo", f"output_dir={tmp_path}", *keys]) == 0
    lines = [json.loads(line) for line in (tmp_path / "demo/metrics/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert max(losses) < 0.6  # random weights begin at 1
