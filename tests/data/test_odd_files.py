"""Files as they are found in large collections: each is either used as it should be or counted, named and replaced."""

import io
import logging
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff.data.pipeline import BatchPlan, batches, load_batch
from maxdiff.data.sources import open_source
from maxdiff.weights.tokenizer import published_tokenizer
from tests.data.test_sources import image, write_tar

SIDE = 16


def file_of(picture: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def gradient(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    """Dark on the left, light on the right."""
    return Image.fromarray(np.tile(np.linspace(0, 255, size[0]), (size[1], 1)).astype(np.uint8)).convert(mode)


def huge_png(side: int) -> bytes:
    """A PNG of side x side black pixels, which would take gigabytes."""
    chunk = lambda kind, data: len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def sixteen_bits() -> bytes:
    return file_of(Image.fromarray((np.tile(np.linspace(0, 65535, 40), (24, 1))).astype(np.uint16)), "PNG")


def turned() -> bytes:
    """Stored on its side, with EXIF saying so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(gradient().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)


GOOD = {
    "cmyk.jpg": file_of(gradient("CMYK"), "JPEG", quality=95),
    "palette.png": file_of(gradient("P"), "PNG"),
    "grey.png": file_of(gradient("L"), "PNG"),
    "grey.jpg": file_of(gradient("L"), "JPEG", quality=95),
    "sixteen.png": sixteen_bits(),
    "turned.jpg": turned(),
    "animated.webp": file_of(gradient(), "WEBP", save_all=True, append_images=[Image.new("RGB", (40, 24), "red")], lossless=True),
    "animated.png": file_of(gradient(), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 24), "red")]),
    "misnamed.jpg": file_of(gradient(), "PNG"),
}  # fmt: skip
BAD = {
    "truncated.jpg": file_of(gradient(), "JPEG", quality=95)[:-300],
    "truncated.png": file_of(gradient(), "PNG")[:-60],
    "magic.jpg": b"\x00" * 200,
    "html.jpg": b"<html><body>404 Not Found</body></html>",
    "empty.png": b"",
    "huge.png": huge_png(30000),
    "vector.png": b"<svg xmlns='http://www.w3.org/2000/svg' width='40' height='24'/>",
    "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 24\n",
}


def first(tmp_path: Path, members: dict[str, bytes]) -> tuple[np.ndarray, list]:
    """The pixels of the first of a tar's examples, and the bad ones met on the way to it."""
    source = open_source(write_tar(tmp_path / "a.tar", members))
    plan = BatchPlan(0, len(source), SIDE)
    batch, bad = load_batch(source, [published_tokenizer()], plan, 0)
    return batch["image"][int(np.flatnonzero(batch["index"] == 0)[0])] if 0 in batch["index"] else batch["image"][0], bad


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_used_is_used(tmp_path: Path, name: str):
    pixels, bad = first(tmp_path, {name: GOOD[name], f"{name.split('.')[0]}.txt": b"x"})
    assert not bad
    row = pixels.mean((0, 2))
    assert row[0] < 100 < 155 < row[-1]  # the gradient, upright, unclipped, its first frame
    assert np.ptp(pixels.astype(int), axis=2).max() < 12  # grey


def test_a_single_pixel_is_enlarged(tmp_path: Path):
    pixels, bad = first(tmp_path, {"a.png": file_of(Image.new("RGB", (1, 1), (10, 200, 30)), "PNG"), "a.txt": b"x"})
    assert not bad
    assert (pixels == (10, 200, 30)).all()


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_is_named_and_replaced(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture):
    members = {name: BAD[name], f"{name.split('.')[0]}.txt": b"x", "next.png": image(1), "next.txt": b"y"}
    source = open_source(write_tar(tmp_path / "a.tar", members))
    plan = BatchPlan(0, 2, SIDE)
    (made,) = [next(batches(source, [published_tokenizer()], plan, max_bad_fraction=1.0)) for _ in range(1)]
    assert made["index"].tolist() == [1, 1]
    np.testing.assert_array_equal(made["image"][0], made["image"][1])
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"a.tar:{name.split('.')[0]}: its image cannot be decoded" in record.getMessage()


def test_captions_that_are_no_text(tmp_path: Path):
    members = {"a.png": image(0), "a.txt": b"\xff\xfe\x00x", "b.png": image(1), "b.txt": b"fine"}
    _, (bad,) = first(tmp_path, members)
    assert "a.tar:a: its caption is not UTF-8" in str(bad)


def test_a_shard_that_is_lost_in_mid_run_is_counted_and_replaced_from_others(tmp_path: Path):
    """Also where more examples in a row are lost than are tried one by one."""
    for name, count in (("a", 300), ("b", 300)):
        write_tar(
            tmp_path / f"{name}.tar",
            {f"k{i:03d}.{s}": image(i) if s == "png" else b"x" for i in range(count) for s in ("png", "txt")},
        )
    pattern = str(tmp_path / "*.tar")
    whole, lost = open_source(pattern), open_source(pattern)
    (tmp_path / "a.tar").rename(tmp_path / "elsewhere")
    plan = BatchPlan(0, 64, SIDE)
    batch, bad = load_batch(lost, [], plan, 0)
    assert batch["index"].min() >= 300
    assert all("a.tar cannot be read" in error.reason for error in bad)
    (tmp_path / "elsewhere").rename(tmp_path / "a.tar")
    again, none = load_batch(whole, [], plan, 0)
    assert not none
    kept = again["index"] >= 300
    np.testing.assert_array_equal(batch["index"][kept], again["index"][kept])
    (tmp_path / "a.tar").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="examples are bad, more than max_bad_fraction=0.01; the last: .*a.tar cannot be read"):
        list(zip(batches(open_source_lost(whole), [], plan), range(4), strict=False))


def open_source_lost(source):
    """The source with no handle kept open."""
    import pickle

    return pickle.loads(pickle.dumps(source))
