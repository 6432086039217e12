"""Buckets of aspect ratios: shapes, who belongs where, and which batch stands at a step."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff import audit, inputs
from maxdiff.config import Config, load_config
from maxdiff.data.buckets import Buckets, assign, bucket_shapes, image_sizes, large_enough, make_buckets
from maxdiff.data.pipeline import load_batch
from maxdiff.data.sources import open_source
from maxdiff.metrics import read_metrics
from maxdiff.train import train
from tests.data.test_sources import image, write_tar
from tests.test_keys import BLOCK

ROOT = Path(__file__).parent.parent.parent


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
        shape, _, rows = buckets.at(7, step, 16)
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
        drawn = np.concatenate([buckets.at(1, step, 8)[2] for step in range(12 * epoch, 12 * epoch + 12)])
        assert sorted(drawn) == list(range(96))
    first, again = ([buckets.at(1, step, 8)[2].tolist() for step in range(12)] for _ in range(2))
    assert first == again
    assert first != [buckets.at(2, step, 8)[2].tolist() for step in range(12)]


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
    assert len(buckets.describe(8)) == len(buckets.shapes)


def tar_of_shapes(path: Path, count: int = 48) -> Path:
    """Wide, square and tall images by turns."""
    members = {}
    for i in range(count):
        file = io.BytesIO()
        w, h = [(32, 20), (24, 24), (20, 32)][i % 3]
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (h, w, 3), np.uint8)).save(file, "PNG")
        members |= {f"k{i:02d}.png": file.getvalue(), f"k{i:02d}.txt": f"caption {i}".encode()}
    return write_tar(path, members)


def bucketed(tar: Path, output: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "base.yml", [
        "run_name=r", f"output_dir={output}", f"train_data_dir={tar}", f"dataset_save_location={output}", "resolution=16",
        "activations_dtype=float32", "attention=dot_product", "data_workers=0", "max_train_steps=6", "log_period=1",
        "learning_rate=1e-3", "per_device_batch_size=1", "aspect_ratio_buckets=true", "bucket_step=4", "bucket_max_ratio=1.7",
        "use_ema=false", f"vae={json.dumps(BLOCK)}", "train_vae=true", *overrides,
    ])  # fmt: skip


def test_training_in_buckets_and_a_restart_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Each step has one shape, and a run that goes on makes the steps of one that was never stopped."""
    tar = tar_of_shapes(tmp_path / "a.tar")
    train(bucketed(tar, tmp_path / "whole"))
    said = capsys.readouterr().out
    assert re.search(r"bucket 12x20 \(height x width\): 16 examples, 2 batches an epoch\nbucket 16x16 ", said)
    train(bucketed(tar, tmp_path / "parts", "max_train_steps=3"))
    train(bucketed(tar, tmp_path / "parts"))
    assert "data have changed" not in capsys.readouterr().out
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name / "r") if "loss" in record] for name in ("whole", "parts")
    ]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    shapes, indexes = set(), []
    config = load_config(tmp_path / "whole" / "r" / "config.yml")
    source = inputs.open_training(config)
    plan = inputs.with_buckets(config, inputs.make_plan(config), source)
    for step in range(6):
        made, _ = load_batch(source, [], plan, step)
        shapes.add(made["image"].shape[1:3])
        indexes += made["index"].tolist()
        lines = list(audit.audit(config, step + 1))[2:]
        assert [int(line.split("\t")[2]) for line in lines] == made["index"].tolist()
    assert shapes == {(12, 20), (16, 16), (20, 12)}
    assert sorted(indexes) == list(range(48))  # an epoch: 16 of each, in batches of 8
    for count in (2, 4):
        parts = [dataclasses.replace(plan, process_index=i, process_count=count) for i in range(count)]
        again = [load_batch(source, [], part, step)[0]["index"] for step in range(6) for part in parts]
        assert np.concatenate(again).tolist() == indexes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bucket_step=10"], "bucket_step=10 does not divide resolution=16"),
        (["bucket_step=8", "resolution=20"], "bucket_step=8 does not divide resolution=20"),
        (["shuffle_block=8"], "aspect_ratio_buckets=True is not supported with data_mix or shuffle_block"),
        (
            ["cache_latents_text_encoder_outputs=true"],
            "aspect_ratio_buckets=True cannot be encoded: what is encoded are squares",
        ),
        (["minimum_size=40"], "minimum_size=40 keeps no image of "),
    ],
)
def test_mistakes_are_told(tmp_path: Path, overrides: list[str], message: str):
    tar = tar_of_shapes(tmp_path / "a.tar", 9)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(bucketed(tar, tmp_path, *overrides))


def test_small_images_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture):
    config = bucketed(tar_of_shapes(tmp_path / "a.tar"), tmp_path, "minimum_size=21")
    source = inputs.open_training(config)
    assert len(source) == 16
    assert "minimum_size=21 keeps 16 of 48 images of " in capsys.readouterr().out
