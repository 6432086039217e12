"""benchmarks/input_pipeline.py and decode.py: lines of figures from a tiny tar, without their peers' packages."""

import io
import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import input_pipeline

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.tar"
    with tarfile.open(path, "w") as file:
        for i in range(6):
            image = io.BytesIO()
            Image.new("RGB", (40, 30), (40 * i, 0, 0)).save(image, "PNG")
            for suffix, content in (("png", image.getvalue()), ("txt", f"number {i}".encode()), ("json", b"{}")):
                info = tarfile.TarInfo(f"{i}.{suffix}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return path


def lines_of(script: str, *arguments: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("system", "options"), [("maxdiff_threads", []), ("maxdiff", ["--jpeg", "64", "--examples", "9"])], ids=["threads", "jpeg"]
)
def test_our_systems_print_a_line_each(tar: Path, system: str, options: list[str]):
    (line,) = lines_of(
        "input_pipeline.py", "--data", str(tar), "--systems", system, "--resolution", "16", "--batch", "4",
        "--batches", "2", "--repeats", "1", "--workers", "2", *options,
    )  # fmt: skip
    assert (line["system"], line["resolution"], line["workers"]) == (system, 16, 2)
    assert math.isfinite(line["images_per_s"])
    assert line["images_per_s_min"] <= line["images_per_s"] <= line["images_per_s_max"]
    assert "times_best_peer" not in line


def test_a_missing_package_is_said_and_skipped(tar: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def missing(*_: object):
        raise ModuleNotFoundError("No module named 'webdataset'", name="webdataset")

    monkeypatch.setattr(input_pipeline, "measure", missing)
    input_pipeline.main(["--one", "webdataset", "--data", str(tar)])
    skipped = json.loads(capsys.readouterr().out)
    assert skipped == {"skipped": "the package webdataset is not installed"}
    lines = {"maxdiff": {"images_per_s": 30.0, "images_per_core_s": None}, "webdataset": skipped,
             "datasets": {"images_per_s": 20.0, "images_per_core_s": None}}  # fmt: skip
    input_pipeline.compare(lines)
    assert lines["maxdiff"]["times_best_peer"] == 1.5
    assert "times_best_peer_per_core" not in lines["maxdiff"]


def test_large_jpegs_repeat_the_images(tar: Path, tmp_path: Path):
    (tmp_path / "made").mkdir()
    data = input_pipeline.write_tars(tmp_path / "made", str(tar), 60, 20)
    found = input_pipeline.read_tars(data, 100)
    assert len(found) == 20
    assert {caption.decode() for _, caption in found} == {f"number {i}" for i in range(6)}
    assert {Image.open(io.BytesIO(image)).size for image, _ in found} == {(80, 60)}


def test_decoding_prints_times_and_differences(tar: Path):
    lines = lines_of("decode.py", "--data", str(tar), "--jpeg", "64", "--resolution", "16", "--repeats", "1")
    full, ours, stages = lines[0], lines[-2], lines[-1]
    assert (full["psnr"], full["max_error"]) == (99, 0)
    assert ours["way"] == "maxdiff"
    assert ours["psnr"] > 30
    assert all(math.isfinite(stages[key]) for key in ("pictures_ms", "order_ms", "tokens_ms", "stack_ms", "pipe_ms"))
