"""What data look like before training."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff.data import inspect
from tests.data.test_sources import image, write_tar

ROOT = Path(__file__).parent.parent.parent


def run(tar: Path, *overrides: str) -> int:
    base = str(ROOT / "configs" / "base.yml")
    return inspect.main([base, f"train_data_dir={tar}", f"output_dir={tar.parent}", "resolution=8", *overrides])


def test_what_training_will_see_is_told_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture):
    members = {}
    for i in range(20):
        caption = {3: "word " * 90, 4: ""}.get(i, f"caption {i % 7}")
        members |= {f"k{i:02d}.png": b"GIF" if i == 5 else image(i), f"k{i:02d}.txt": caption.encode()}
    tar = write_tar(tmp_path / "a.tar", members)
    assert run(tar, "seed=1") == 0
    said = capsys.readouterr().out
    assert "20 examples in " in said
    assert re.search(r"read and decoded at \d+ examples/s", said)
    assert "shorter side, pixels: 8 in the middle, 8 to 8 for 90%, 8 to 8 for all" in said
    assert "width / height: 1.12 in the middle" in said
    assert "enlarged: 0 of 20 (0.0%)" in said
    assert "cut off by the crop: 11% of the pixels" in said
    assert "captions cut at 77 tokens: 1 of 20 (5.0%)" in said
    assert "captions without a word: 1 of 20 (5.0%)" in said
    assert "bad examples, replaced by the next: 1 of 20 (5.0%)" in said
    assert "k05: its image cannot be decoded" in said
    with Image.open(tmp_path / "inspect.png") as sheet:
        assert sheet.size == (4 * inspect.SIDE + 3 * 4, 4 * (inspect.SIDE + 60) + 3 * 4)
        tile = np.asarray(sheet)[inspect.SIDE : inspect.SIDE + 60, : inspect.SIDE]
        assert tile.min() < 100  # a caption is there
    assert run(tar, "examples=3") == 0
    assert "looking at 3 of them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["examples=x"], "examples=x is not one whole number (allowed: 1 or more)"),
        (["train_data_dir="], "train_data_dir is required"),
        (["train_data_dir=@/none.tar"], "train_data_dir: nothing matches"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, overrides: list[str], message: str):
    given = [override.replace("@", str(tmp_path)) for override in overrides]
    assert run(tmp_path / "a.tar", *given) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
