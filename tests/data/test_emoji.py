"""The shards that the repository holds, and the script that made them."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from test_sources import write_tar

from maxdiff.data.sources import open_source
from maxdiff.data.transforms import make_picture

ROOT = Path(__file__).parents[2]
TONES = {f"1f3f{digit}" for digit in "bcdef"}


def families(source) -> set[str]:
    names = [source[i].key.rpartition(":")[2] for i in range(len(source))]
    return {"-".join(part for part in name.split("-") if part not in TONES) for name in names}


def test_the_shards_are_whole_and_hold_out_families(tmp_path: Path):
    train = open_source(str(ROOT / "data/emoji/train-{000000..000002}.tar"), cache_dir=tmp_path)
    heldout = open_source(str(ROOT / "data/emoji/heldout-*.tar"), cache_dir=tmp_path)
    assert (len(train), len(heldout)) == (3209, 165)
    assert not families(train) & families(heldout)
    for source in (train, heldout):
        for i in range(0, len(source), 7):
            example = source[i]
            picture = make_picture(example.image, example.key, [0] * 4, 128)
            assert picture.original_size == (128, 128)
            assert (picture.image[0, 0] > 200).any()
            assert example.texts[0]


def test_the_script_makes_the_same_bytes_twice(tmp_path: Path):
    file = io.BytesIO()
    pixels = np.zeros((256, 256, 4), np.uint8)
    pixels[64:192, 64:192] = (255, 0, 0, 255)
    Image.fromarray(pixels).save(file, "WEBP", lossless=True)
    (tmp_path / "in").mkdir()
    keys = [f"1f{i:03x}{tone}" for i in range(60) for tone in ("", "-1f3fb", "-1f3ff")]
    write_tar(tmp_path / "in" / "a.tar", {f"{key}.{kind}": file.getvalue() if kind == "webp" else key.encode() for key in keys for kind in ("webp", "txt", "json")})  # fmt: skip
    made = []
    for folder in ("a", "b"):
        subprocess.run(
            [sys.executable, ROOT / "data/make_emoji.py", tmp_path / "in", tmp_path / folder], check=True, capture_output=True
        )
        made.append({path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())})
    assert made[0] == made[1]
    assert list(made[0]) == ["heldout-000000.tar", "train-000000.tar"]
    heldout, train = (open_source(tmp_path / "a" / name) for name in made[0])
    assert len(heldout) + len(train) == len(keys)
    assert len(heldout) % 3 == 0
    image = make_picture(train[0].image, "", [0] * 4, 128).image.astype(int)
    assert np.abs(image[0, 0] - 255).max() < 6
    assert np.abs(image[64, 64] - (255, 0, 0)).max() < 6
    failed = subprocess.run(
        [sys.executable, ROOT / "data/make_emoji.py", tmp_path / "none", tmp_path / "c"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "holds no tars of .webp and .txt" in failed.stderr
