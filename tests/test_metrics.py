"""A run's records: lines, metrics.jsonl over restarts, event files read back, and the bar on a real terminal."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from maxdiff import metrics as module
from maxdiff.metrics import Metrics, read_metrics

SCALARS = {"loss": 0.125, "grad_norm": 0.5, "learning_rate": 1e-5}


def make(folder: Path | None, first: int = 0, **kwargs: Any) -> Metrics:
    return Metrics(folder, **{"global_batch": 32, "devices": 4, "flops": 1e12, "first": first, "last": 1000, **kwargs})


def events(folder: Path) -> list[Any]:
    """All events of a run in the order in which TensorBoard reads them: file after file, by name."""
    found = []
    for path in sorted((folder / "tensorboard").glob("*tfevents*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            checks = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length : 16 + length])
            assert checks == (masked_crc32c(data[:8]), masked_crc32c(data[12 : 12 + length]))
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def drawn(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve, by TensorBoard's rule: a start purges its step and later ones."""
    points: list[tuple[int, float]] = []
    for event in events(folder):
        if event.session_log.status == event_pb2.SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return points


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_line_and_its_rates(tmp_path: Path, capsys: pytest.CaptureFixture, clock: SimpleNamespace):
    with make(tmp_path, peak_flops=1e14) as metrics:
        clock.now += 20
        with metrics.untimed():
            clock.now += 1000
        values = metrics.log(10, {**SCALARS, "psnr": np.float32(23.456)}, 1.5)
        clock.now += 1.0
        metrics.log(11, {**SCALARS, "text_encoder_learning_rate": 2e-6}, 0.0)
    assert values == {
        "loss": 0.125, "grad_norm": 0.5, "learning_rate": 1e-5, "psnr": float(np.float32(23.456)), "seconds": 2.0,
        "images_per_second": 16.0, "images_per_second_per_device": 4.0, "tflops_per_device": 4.0, "mfu": 0.04,
        "seconds_waited_for_input": 1.5,
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "step 10/1000  loss 0.125  grad norm 0.5  lr 1.00e-05  psnr 23.46  2.000 s  16.0 images/s  4.0 images/s/device  "
        "4.00 TFLOP/s/device  MFU 4.0%  waited 1.5 s  left 0:33:00",
        "step 11/1000  loss 0.125  grad norm 0.5  lr 1.00e-05  text encoder lr 2.00e-06  1.000 s  32.0 images/s  "
        "8.0 images/s/device  8.00 TFLOP/s/device  MFU 8.0%  waited 0.0 s  left 0:16:29",
    ]
    assert read_metrics(tmp_path)[0] == {"step": 10, **values}


def test_without_a_known_peak_there_is_no_utilisation(tmp_path: Path, capsys: pytest.CaptureFixture):
    with make(tmp_path) as metrics:
        assert "mfu" not in metrics.log(1, SCALARS, 0.0)
    assert "MFU" not in capsys.readouterr().out
    assert "mfu" not in read_metrics(tmp_path)[0]


def test_other_processes_print_nothing(capsys: pytest.CaptureFixture):
    with make(None) as metrics:
        assert metrics.log(1, SCALARS, 0.0)["loss"] == 0.125
        metrics.log_held_out(1, {"loss": 0.5})
        metrics.image(1, "a", np.zeros((2, 2, 3), np.uint8))
        metrics.text("configuration", "seed: 0")
    assert capsys.readouterr() == ("", "")


def test_other_processes_do_not_import_tensorboard():
    code = "import sys, maxdiff.metrics as m; m.Metrics(None, global_batch=1, devices=1, flops=1, first=0, last=1)"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; print([n for n in ('tensorboardX', 'tqdm') if n in sys.modules])"],
        env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parent.parent)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "[]\n"


def test_held_out_values_are_compared_with_the_runs_first(tmp_path: Path, capsys: pytest.CaptureFixture):
    with make(tmp_path) as metrics:
        metrics.log_held_out(50, {"loss": 0.9876})
        metrics.log(60, SCALARS, 0.0)
        metrics.log_held_out(100, {"loss": 0.1234})
    with make(tmp_path, first=60) as metrics:
        metrics.log_held_out(100, {"loss": 1.9752, "psnr": 20.0})
    with make(tmp_path, first=0) as metrics:  # no checkpoint was left: what stands in the file for step 50 is no first value
        metrics.log_held_out(50, {"loss": 0.5})
    assert [line for line in capsys.readouterr().out.splitlines() if "held-out" in line] == [
        "step 50  held-out loss 0.9876",
        "step 100  held-out loss 0.1234 (first 0.9876, -88%)",
        "step 100  held-out loss 1.975 (first 0.9876, +100%)  held-out psnr 20",
        "step 50  held-out loss 0.5",
    ]
    assert {"step": 100, "held_out_loss": 1.9752, "held_out_psnr": 20.0} in map(
        json.loads, (tmp_path / "metrics/metrics.jsonl").read_text().splitlines()
    )


def test_a_torn_line_is_cut_off_and_steps_made_twice_count_once(tmp_path: Path):
    with make(tmp_path) as metrics:
        for step in (1, 5, 10, 15):
            metrics.log(step, {**SCALARS, "loss": step}, 0.0)
        metrics.log_held_out(15, {"loss": 15})
    path = tmp_path / "metrics/metrics.jsonl"
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[:40])  # killed within a write
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 5, 10, 15, 15]  # a run still writing can be read

    with make(tmp_path, first=8) as metrics:
        metrics.log(9, {**SCALARS, "loss": 90}, 0.0)
        metrics.log(10, {**SCALARS, "loss": 100}, 0.0)
        metrics.log_held_out(10, {"loss": 0.5})
    assert path.read_bytes().startswith(whole + b'{"step": 9')
    records = read_metrics(tmp_path)
    assert [(r["step"], r.get("loss", r.get("held_out_loss"))) for r in records] == [
        (1, 1), (5, 5), (9, 90), (10, 100), (10, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize("line", ["\0\0\0\0", "[1]", "3", '{"loss": 1}'])
def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path: Path, line: str):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/metrics.jsonl").write_text('{"step": 1, "loss": 1}\n' + line + '\n{"step": 2, "loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2"):
        make(tmp_path)


def test_event_files_hold_all_and_a_restart_draws_no_zigzag(tmp_path: Path):
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    with make(tmp_path, peak_flops=1e15) as metrics:
        metrics.text("configuration", "seed: 0\nrun_name: r")
        for step in (1, 10, 12, 13, 30):
            values = metrics.log(step, {**SCALARS, "loss": step}, 0.0)
        metrics.log_held_out(10, {"loss": 0.5})
        metrics.image(10, "a cat", image)
    with make(tmp_path, first=12) as metrics:
        for step in (13, 20):
            metrics.log(step, {**SCALARS, "loss": -step}, 0.0)

    assert drawn(tmp_path, "train/loss") == [(1, 1.0), (10, 10.0), (12, 12.0), (13, -13.0), (20, -20.0)]
    assert drawn(tmp_path, "held_out/loss") == [(10, 0.5)]
    for name, value in values.items():
        assert (30, np.float32(value)) in {
            (e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value if v.tag == f"train/{name}"
        }
    by_tag = {value.tag: (event.step, value) for event in events(tmp_path) for value in event.summary.value}
    step, text = by_tag["configuration/text_summary"]
    assert (step, text.tensor.string_val[0].decode()) == (0, "```\nseed: 0\nrun_name: r\n```")
    step, shown = by_tag["samples/a_cat"]
    assert step == 10
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(shown.image.encoded_image_string))), image)


def test_records_can_be_read_from_event_files_while_the_run_goes_on(tmp_path: Path):
    with make(tmp_path) as metrics:
        metrics.log(1, SCALARS, 0.0)
        assert drawn(tmp_path, "train/loss") == [(1, 0.125)]


def test_values_that_are_no_number_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture):
    with make(tmp_path) as metrics:
        metrics.log(1, {**SCALARS, "loss": float("nan")}, 0.0)
        metrics.log_held_out(1, {"loss": float("inf")})
    assert np.isnan(read_metrics(tmp_path)[0]["loss"])
    assert read_metrics(tmp_path)[1] == {"step": 1, "held_out_loss": float("inf")}
    assert "loss nan" in capsys.readouterr().out


@pytest.mark.parametrize("array", [np.zeros((2, 2, 3)), np.zeros((2, 2), np.uint8), np.zeros((2, 2, 4), np.uint8)])
def test_images_of_other_kinds_are_refused(tmp_path: Path, array: np.ndarray):
    with make(tmp_path) as metrics, pytest.raises(ValueError, match=r"the image 'a' is .*, not uint8 \[h w 3\]"):
        metrics.image(1, "a", array)


def on_a_terminal(code: str, folder: Path) -> tuple[str, list[str]]:
    """What a program writes to a terminal of 100 columns, and the lines that stand there when it has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, folder], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    chunks: list[bytes] = []

    def read():
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join(60)
    os.close(ours)
    text = b"".join(chunks).decode()
    lines = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            part = re.sub(r"\x1b\[[A-Z]", "", part)
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return text, lines


PROGRAM = """
import sys, warnings
from maxdiff.metrics import Metrics
from pathlib import Path
out, err = sys.stdout, sys.stderr
print("before")
with Metrics(Path(sys.argv[1]), global_batch=1, devices=1, flops=1e9, first=0, last=40) as metrics:
    for step in (1, 20, 30):
        print("a line of", "another", flush=True)
        print("an error", file=sys.stderr)
        metrics.log(step, {"loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0}, 0.0)
    metrics.log_held_out(30, {"loss": 2.0})
    print("no end", end="")
assert (sys.stdout, sys.stderr) == (out, err)
print(" of it yet")
print("after")
"""


def test_the_bar_on_a_terminal_leaves_whole_lines_and_nothing_else(tmp_path: Path):
    text, lines = on_a_terminal(PROGRAM, tmp_path)
    assert re.search(r"20/40 \[\d\d:\d\d<\d\d:\d\d, .*step", text)
    assert re.search(r"75%\|.*30/40", text)
    lines = [re.sub(r"(step \d+/40)  loss 1 .*left 0:00:\d\d$", r"\1 ...", line) for line in lines]
    said = ["a line of another", "an error"]
    assert lines == [
        "before", *said, "step 1/40 ...", *said, "step 20/40 ...", *said, "step 30/40 ...",
        "step 30  held-out loss 2", "no end of it yet", "after", "",
    ]  # fmt: skip
