import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff.images import GAP, grid, write_png

IMAGES = np.random.default_rng(0).integers(0, 255, (5, 6, 8, 3), np.uint8)


def test_a_grid_is_nearly_square_row_by_row_with_white_gaps():
    sheet = grid(IMAGES)
    assert sheet.shape == (2 * 6 + GAP, 3 * 8 + 2 * GAP, 3)
    np.testing.assert_array_equal(sheet[:6, 8 + GAP : 16 + GAP], IMAGES[1])
    np.testing.assert_array_equal(sheet[6 + GAP :, :8], IMAGES[3])
    assert (sheet[6 : 6 + GAP] == 255).all()
    assert (sheet[:, 8 : 8 + GAP] == 255).all()
    assert (sheet[6 + GAP :, 16 + 2 * GAP :] == 255).all()  # the sixth cell has no image


@pytest.mark.parametrize(("columns", "shape"), [(1, (5, 1)), (2, (3, 2)), (5, (1, 5)), (9, (1, 5))])
def test_columns(columns: int, shape: tuple[int, int]):
    assert grid(IMAGES, columns).shape == (shape[0] * (6 + GAP) - GAP, shape[1] * (8 + GAP) - GAP, 3)


def test_one_image_has_no_gaps():
    np.testing.assert_array_equal(grid(IMAGES[:1]), IMAGES[0])


def test_a_png_holds_the_pixels_and_the_texts(tmp_path: Path):
    texts = {"prompt": "a café\nin the rain", "negative": "雨", "seed": "7"}
    write_png(tmp_path / "new" / "a.png", IMAGES[0], texts)
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.text == texts
        np.testing.assert_array_equal(np.asarray(image), IMAGES[0])
    assert b"tEXtseed\x007" in (tmp_path / "new" / "a.png").read_bytes()


def test_a_png_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_png(tmp_path / "a.png", IMAGES[0])
    before = (tmp_path / "a.png").read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_png(tmp_path / "a.png", IMAGES[1])
    assert (tmp_path / "a.png").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.png"]


def test_other_arrays_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"images is uint8 \[6, 8, 3\], but must be uint8 \[n h w 3\]"):
        grid(IMAGES[0])
    with pytest.raises(ValueError, match=r"images is float32 "):
        grid(IMAGES.astype(np.float32))
    with pytest.raises(ValueError, match=r"images is uint8 \[0, 6, 8, 3\]"):
        grid(IMAGES[:0])
    with pytest.raises(ValueError, match="columns=0 must be at least 1"):
        grid(IMAGES, 0)
    with pytest.raises(ValueError, match=r"image is uint8 \[5, 6, 8, 3\], but must be uint8 \[h w 3\]"):
        write_png(tmp_path / "a.png", IMAGES)
