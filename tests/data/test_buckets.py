"""Buckets of aspect ratios: shapes, who belongs where, and which batch stands at a step."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff.data.buckets import Buckets, assign, bucket_shapes, image_sizes, large_enough, make_buckets, ratio_error
from maxdiff.data.sources import open_source
from tests.data.test_sources import image, write_tar


def test_shapes_hold_as_many_pixels_as_the_square():
    shapes = bucket_shapes(512, 64, 2.0)
    assert shapes[0] == (320, 640) or shapes[0][1] / shapes[0][0] <= 2
    assert (512, 512) in shapes
    for h, w in shapes:
        assert h % 64 == w % 64 == 0
        assert h * w <= 512 * 512 < max((h + 64) * w, h * (w + 64))
        assert (w, h) in shapes
    assert bucket_shapes(512, 64, 1.0) == [(512, 512)]
    with pytest.raises(ValueError, match="bucket_step=64 does not divide resolution=500"):
        bucket_shapes(500, 64, 2.0)


def test_an_image_goes_where_its_shape_is_nearest():
    shapes = bucket_shapes(512, 64, 2.0)
    sizes = np.random.default_rng(0).integers(1, 4000, (500, 2))
    logs = np.log([h / w for h, w in shapes])
    expected = [int(np.abs(logs - math.log(h / w)).argmin()) for h, w in sizes]
    assert assign(sizes, shapes).tolist() == expected
    assert [shapes[i] for i in assign(np.array([[0, 0], [700, 701]]), shapes)] == [(512, 512)] * 2
    assert assign(sizes, [(8, 8)]).tolist() == [0] * 500


def plan() -> Buckets:
    return Buckets(((8, 16), (8, 8), (16, 8)), np.random.default_rng(0).choice(3, 1000, p=[0.3, 0.68, 0.02]))


def test_within_a_bucket_nothing_is_lost_or_repeated():
    """Wherever batches and epochs of batches end; and a batch has one bucket."""
    buckets, seen = plan(), {}
    for step in range(200):
        shape, rows = buckets.at(7, step, 16)
        assert len(rows) == 16
        assert {buckets.shapes[b] for b in buckets.bucket[rows]} == {shape}
        seen.setdefault(shape, []).append((step, rows))
    for shape, batches in seen.items():
        members = np.flatnonzero(buckets.bucket == buckets.shapes.index(shape))
        drawn = np.concatenate([rows for _, rows in batches])
        # Batches of a bucket come in any order within an epoch of batches: over whole ones all is even.
        counts = np.bincount(drawn, minlength=1000)[members]
        assert counts.max() - counts.min() <= 2
    shares = [len(seen[shape]) / 200 for shape in buckets.shapes]
    np.testing.assert_allclose(shares, np.bincount(buckets.bucket) / 1000, atol=0.02)


def test_an_epoch_of_a_bucket_is_a_permutation():
    buckets = Buckets(((8, 8), (16, 4)), np.repeat([0, 1], [64, 32]))
    for epoch in range(2):
        drawn = np.concatenate([buckets.at(1, step, 8)[1] for step in range(12 * epoch, 12 * epoch + 12)])
        assert sorted(drawn) == list(range(96))
    first, again = ([buckets.at(1, step, 8)[1].tolist() for step in range(12)] for _ in range(2))
    assert first == again
    assert first != [buckets.at(2, step, 8)[1].tolist() for step in range(12)]


def test_sizes_are_read_once_and_upright(tmp_path: Path):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 24)).save(file, "JPEG", exif=exif)
    members = {"a.png": image(0), "a.txt": b"", "b.jpg": file.getvalue(), "b.txt": b"", "c.png": b"no", "c.txt": b""}
    source = open_source(write_tar(tmp_path / "a.tar", members), cache_dir=tmp_path)
    sizes = image_sizes(source, tmp_path)
    assert sizes.tolist() == [[8, 9], [40, 24], [0, 0]]
    assert image_sizes(source).tolist() == sizes.tolist()
    (tmp_path / "a.tar").unlink()
    assert image_sizes(source, tmp_path).tolist() == sizes.tolist()
    assert large_enough(sizes, 9).tolist() == [1]


def test_only_buckets_with_images_are_made():
    sizes = np.array([[100, 100], [100, 200], [90, 110]])
    buckets = make_buckets(sizes, bucket_shapes(64, 8, 2.0))
    assert len(buckets.shapes) == len(set(buckets.bucket.tolist())) == 3 or len(buckets.shapes) == 2
    assert 0 <= ratio_error(sizes, buckets) < 0.1
    assert len(buckets.describe(8)) == len(buckets.shapes)
