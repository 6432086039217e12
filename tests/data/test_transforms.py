import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from maxdiff.data import transforms
from maxdiff.data.examples import BadExample
from maxdiff.data.transforms import make_picture, random_words

NO_WORDS = [0, 0, 0, 0]


def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """An image without symmetry, smooth enough for JPEG."""
    y, x = np.mgrid[:height, :width]
    channels = [255 * x / width, 255 * y / height, 127 * (1 + np.sin(6 * x / width + 3 * y / height)), 0 * x + 200]
    return Image.fromarray(np.stack(channels[: len(mode)], -1).astype(np.uint8), mode="RGBA" if mode == "RGBA" else None)


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(data: bytes, resolution: int | tuple[int, int] = 32, words: list[int] = NO_WORDS, **options):
    return make_picture(data, "k", words, resolution, **options)


def close(a: np.ndarray, b: np.ndarray, limit: float = 1.0) -> bool:
    return np.abs(np.asarray(a, float) - np.asarray(b, float)).max() <= limit


@pytest.mark.parametrize("resizer", ["simd", "pillow"])
@pytest.mark.parametrize("size", [(100, 60), (60, 100), (64, 64), (20, 31), (32, 32)])
def test_equals_resizing_the_whole_then_cropping(size: tuple[int, int], resizer: str):
    image = smooth(*size)
    got = picture(encode(image), resizer=resizer)
    short = min(size)
    whole = image.resize((32 * size[0] // short, 32 * size[1] // short), Image.Resampling.LANCZOS)
    top, left = round((whole.height - 32) / 2), round((whole.width - 32) / 2)
    assert close(got.image, whole.crop((left, top, left + 32, top + 32)), 2 if resizer == "simd" else 1)
    assert (got.image.shape, got.image.dtype) == ((32, 32, 3), np.uint8)
    assert (got.original_size, got.crop) == ((size[1], size[0]), (top, left))


def test_both_resizers_are_lanczos():
    """Which takes columns or rows first, and so is cut to 0 to 255 in between, is all that they differ in."""
    noise = np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8)
    # Far from black and white nothing is cut, and only rounding is left.
    for levels, limit in ((noise // 4 + 96, 2), (noise, 40)):
        data = encode(Image.fromarray(levels))
        for size in ((40, 60), (100, 90), (300, 200)):
            simd, pillow = (picture(data, size, resizer=resizer).image for resizer in ("simd", "pillow"))
            assert simd.shape == pillow.shape == (*size, 3)
            assert close(simd, pillow, limit)


def test_pixels_do_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch):
    data = encode(Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), np.uint8)))
    fast = picture(data, (100, 90)).image

    def plain():
        made = resizer()
        made.cpu_extensions = transforms.simd.CpuExtensions.none
        return made

    resizer = transforms.simd.Resizer
    monkeypatch.setattr(transforms.simd, "Resizer", plain)
    np.testing.assert_array_equal(picture(data, (100, 90)).image, fast)


def test_without_the_package_its_resizer_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transforms, "simd", None)
    transforms.check_resizer("pillow")
    with pytest.raises(
        ValueError, match=r"image_resizer=simd needs a package: pip install cykooz-resizer \(allowed without it: p"
    ):
        transforms.check_resizer("simd")


def test_crops_and_flips_as_drawn():
    image = smooth(100, 60)
    whole = image.resize((53, 32), Image.Resampling.LANCZOS)
    lefts, flips = set(), 0
    for position in range(200):
        words = random_words(3, position, 1)
        got = picture(encode(image), words=words, center_crop=False, random_flip=True)
        flip = words[2] >> 63
        flips += flip
        top, left = got.crop
        lefts.add(left)
        assert top == 0
        seen = ImageOps.mirror(whole) if flip else whole
        assert close(got.image, seen.crop((left, 0, left + 32, 32)))
    assert lefts == set(range(22))
    assert 70 < flips < 130


def test_random_numbers_depend_on_seed_position_and_purpose():
    draws = {tuple(random_words(*of)) for of in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (-1, 0, 1), (0, 2**40, 1)]}
    assert len(draws) == 6
    assert len({word for draw in draws for word in draw}) == 24
    assert random_words(0, 0, 1) == random_words(0, 0, 1)
    # A run that was begun with one version goes on with the next.
    assert random_words(7, 5, 1)[:2] == [8706885944373906910, 1385808074390444925]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB key"])
def test_transparency_is_white_whatever_colour_hides_in_it(mode: str):
    image = smooth(40, 40, "RGBA")
    alpha = np.full((40, 40), 255, np.uint8)
    alpha[:, 20:] = 0
    image.putalpha(Image.fromarray(alpha))
    options = {}
    if mode == "LA":
        image = image.convert("LA")
    elif mode == "P":
        image = image.quantize(200)
        assert image.mode == "P"
    elif mode == "RGB key":
        pixels = np.array(image)[..., :3]
        pixels[:, 20:] = (1, 2, 3)
        image, options = Image.fromarray(pixels), {"transparency": (1, 2, 3)}
    got = picture(encode(image, **options), 40).image
    assert (got[:, 20:] == 255).all()
    assert (got[:, :19] != 255).any(-1).all()


def test_half_transparent_is_halfway_to_white():
    image = Image.new("RGBA", (8, 8), (100, 0, 200, 128))
    assert close(picture(encode(image), 8).image, np.broadcast_to([177, 127, 227], (8, 8, 3)))


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "I;16", "P"])
def test_other_modes_become_rgb(mode: str):
    grey = ImageOps.grayscale(smooth(40, 40))
    image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    data = encode(image, "JPEG", quality=100) if kind == "TIFF" else encode(image)
    expected = image.convert("RGB") if mode in ("1", "CMYK") else grey.convert("RGB")
    assert close(picture(data, 40).image, expected, 4)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(smooth(90, 60), "JPEG", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    got = picture(data)
    assert got.original_size == (upright.height, upright.width)
    assert close(got.image, picture(encode(upright)).image, 3)
    assert got.crop == picture(encode(upright)).crop
    for position in range(8):
        options = {"words": random_words(0, position, 1), "center_crop": False, "random_flip": True}
        assert close(picture(data, **options).image, picture(encode(upright), **options).image, 3)


def test_a_large_jpeg_is_decoded_at_reduced_scale(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    resize = transforms.RESIZERS["simd"]
    monkeypatch.setitem(transforms.RESIZERS, "simd", lambda image, *a: sizes.append(image.size) or resize(image, *a))
    image = smooth(1600, 1200)
    got = picture(encode(image, "JPEG", quality=95), 128)
    assert sizes[-1] == (400, 300)
    for resolution, size in ((375, (800, 600)), (376, (1600, 1200))):  # 1.6 times 375 are 600 pixels
        assert picture(encode(image, "JPEG"), resolution).image.shape == (resolution, resolution, 3)
        assert sizes[-1] == size
    assert got.original_size == (1200, 1600)
    assert close(got.image, picture(encode(image), 128).image, 6)


@pytest.mark.parametrize("size", [(129, 129), (135, 131), (257, 263)])
def test_a_reduced_jpeg_is_not_moved(size: tuple[int, int]):
    # Steep enough that half a pixel of the reduced image is 8 levels at its edge.
    y, x = np.mgrid[: size[1], : size[0]]
    wave = 127 + 100 * np.sin(x / 12.5) * np.cos(y / 12.5)
    image = Image.fromarray(wave.astype(np.uint8)).convert("RGB")
    got = picture(encode(image, "JPEG", quality=100, subsampling=0), 32).image
    assert close(got, picture(encode(image), 32).image, 3)


def test_opaque_alpha_changes_nothing():
    image = smooth(50, 40)
    opaque = image.copy()
    opaque.putalpha(255)
    np.testing.assert_array_equal(picture(encode(opaque)).image, picture(encode(image)).image)


def test_a_long_strip_takes_no_memory():
    got = picture(encode(Image.new("RGB", (20_000, 1), "red")), 256)
    assert got.crop == (0, (256 * 20_000 - 256) // 2)
    assert (got.image == (255, 0, 0)).all()


PNG = encode(smooth(50, 50))


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", PNG[:-200], PNG[:60] + bytes(40) + PNG[100:], encode(smooth(50, 50), "JPEG")[:300], encode(smooth(50, 50), "TIFF")],
    ids=["empty", "text", "truncated", "overwritten", "truncated jpeg", "format"],
)  # fmt: skip
def test_an_undecodable_image_names_its_key(data: bytes):
    with pytest.raises(BadExample, match=r"k: its image cannot be decoded \(\w+: ") as caught:
        picture(data)
    assert caught.value.key == "k"


@pytest.mark.parametrize("size", [(24, 40), (40, 24), (16, 48), (33, 32)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_rectangle_is_covered_and_its_middle_kept(size: tuple[int, int], orientation: int):
    """As resizing the whole by the least that covers it, then cropping."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)).resize((320, 180))
    file = io.BytesIO()
    picture.save(file, "PNG", exif=exif)
    upright = picture.transpose(Image.Transpose.ROTATE_270) if orientation == 6 else picture
    h, w = size
    scale = max(h / upright.height, w / upright.width)
    wide, high = max(w, int(upright.width * scale + 1e-6)), max(h, int(upright.height * scale + 1e-6))
    whole = np.asarray(upright.resize((wide, high), Image.Resampling.LANCZOS)).astype(int)
    top, left = round((high - h) / 2), round((wide - w) / 2)
    made = make_picture(file.getvalue(), "k", [0] * 4, size)
    assert made.image.shape == (h, w, 3)
    assert (made.original_size, made.crop) == ((upright.height, upright.width), (top, left))
    # Rounding between the passes over columns and rows, whose order turning exchanges.
    error = np.abs(made.image - whole[top : top + h, left : left + w])
    assert error.max() <= 5
    assert error.mean() < 0.3
