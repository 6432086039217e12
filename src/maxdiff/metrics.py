"""What a run says of itself: a line each log step on the terminal, the same in metrics.jsonl and for TensorBoard.

Each of the three hears every record: its kind ("train" or "held_out"), its step and its values by name.

metrics.jsonl is only ever added to. A run that was killed goes on from its last checkpoint and so makes some steps
twice; both times stay in the file, as what happened, and `read_metrics` leaves out what the run went back on.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Where records lie in a run's folder.
METRICS = Path("metrics", "metrics.jsonl")
# How values stand in a line; others as their name and four digits.
FORMATS = {
    "learning_rate": "lr {:.2e}",
    "text_encoder_learning_rate": "text encoder lr {:.2e}",
    "seconds": "{:.3f} s",
    "images_per_second": "{:.1f} images/s",
    "images_per_second_per_device": "{:.1f} images/s/device",
    "tflops_per_device": "{:.2f} TFLOP/s/device",
    "mfu": "MFU {:.1%}",
    "seconds_waited_for_input": "waited {:.1f} s",
}


class Metrics:
    """Turns a step's scalars and the clock into a record, and passes records on.

    Args:
        folder: of the run; None on other processes than the first, which then write and print nothing.
        global_batch: examples of a step.
        devices: of all processes.
        flops: of one example's training, over all that is trained and frozen.
        peak_flops: FLOP/s of a device at most; None leaves utilisation (MFU) out.
        first, last: the step that this start goes on from, and the run's last.

    Attributes:
        held_out_losses: step -> loss, of this start.

    Raises:
        ValueError: if an earlier start's metrics.jsonl is damaged.
    """

    def __init__(self, folder: Path | None, *, global_batch: int, devices: int, flops: float,
                 peak_flops: float | None = None, first: int, last: int):  # fmt: skip
        self._batch, self._devices, self._flops, self._peak = global_batch, devices, flops, peak_flops
        self.held_out_losses: dict[int, float] = {}
        self._tensorboard: Any = None
        self._sinks: list[Any] = []
        if folder is not None:
            from maxdiff.tensorboard import TensorBoard  # late: it imports PyTorch where that is installed

            path = _path(folder)
            earlier = [record for record in read_metrics(folder) if record["step"] <= first] if path.exists() else []
            self._tensorboard = TensorBoard(folder / "tensorboard", first)
            self._sinks = [_Terminal(last, earlier), _JsonLines(path), self._tensorboard]
        self._step, self._time = first, time.perf_counter()

    def log(self, step: int, scalars: dict[str, Any], seconds_waited: float) -> dict[str, float]:
        """Log the steps since the last call, whose number and clock it keeps.

        Args:
            step: the number of steps made.
            scalars: of this step, by name; already fetched from the device.
            seconds_waited: for input since the last call.

        Returns:
            The scalars and, of an average step since the last call: seconds, images_per_second,
            images_per_second_per_device, tflops_per_device and mfu (0 to 1).
        """
        assert step > self._step
        now = time.perf_counter()
        seconds = (now - self._time) / (step - self._step)
        self._time, self._step = now, step
        images = self._batch / seconds
        values = {key: float(value) for key, value in scalars.items()}
        values |= {
            "seconds": seconds,
            "images_per_second": images,
            "images_per_second_per_device": images / self._devices,
            "tflops_per_device": images * self._flops / self._devices / 1e12,
        }
        if self._peak is not None:
            values["mfu"] = images * self._flops / self._devices / self._peak
        values["seconds_waited_for_input"] = seconds_waited
        self._record("train", step, values)
        return values

    def log_held_out(self, step: int, values: dict[str, float]) -> None:
        """Log means over held-out examples, such as loss; the line compares each with the run's first."""
        if "loss" in values:
            self.held_out_losses[step] = float(values["loss"])
        self._record("held_out", step, {key: float(value) for key, value in values.items()})

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        """Show a picture, uint8 [h w 3], in TensorBoard."""
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise ValueError(f"the image {name!r} is {array.dtype} {array.shape}, not uint8 [h w 3]")
        if self._tensorboard:
            self._tensorboard.image(step, name, array)

    def text(self, name: str, text: str) -> None:
        """Show a text, such as the configuration, in TensorBoard."""
        if self._tensorboard:
            self._tensorboard.text(name, text)

    def age(self, step: int, seconds: float) -> None:
        """Show how long ago the last step was made, for TensorBoard alone; any thread may."""
        if self._tensorboard:
            self._tensorboard.record("watch", step, {"seconds_since_step": seconds})

    def go_back(self, step: int) -> None:
        """The steps after this one are made once more."""
        self._step, self._time = step, time.perf_counter()

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Work that is no training, such as compilation or evaluation: the steps' seconds leave it out.

        Enter it when the device has nothing left to do, as after `log`: what it does meanwhile is not counted.
        """
        started = time.perf_counter()
        yield
        self._time += time.perf_counter() - started

    def _record(self, kind: str, step: int, values: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.record(kind, step, values)

    def close(self) -> None:
        """Close the files and take the progress bar away."""
        with contextlib.ExitStack() as stack:  # all, though one may fail
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, in order of their steps; it may still be written.

    A run that went back to a checkpoint has later steps twice: where the step number falls, what was said of that step
    and later ones is forgotten. Values that are no number are NaN or infinite floats, which json.loads reads.

    Args:
        folder: of the run.

    Returns:
        One dict a record, with "step". Held-out values are records of their own, their names begin with "held_out_".

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, naming the line.
    """
    path = _path(folder)
    records: dict[tuple[int, bool], dict[str, Any]] = {}
    newest = 0
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last line's end is not yet, or was never, whole
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is damaged: line {number} is no record, {line[:80]!r}") from None
        if step < newest:
            records = {key: old for key, old in records.items() if key[0] < step}
        newest = step
        records[step, any(key.startswith("held_out_") for key in record)] = record
    return list(records.values())


def _path(folder: Path) -> Path:
    return folder / METRICS


class _JsonLines:
    """Adds a line of JSON a record; a line that a killed process left torn is cut off first."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        prefix = "" if kind == "train" else f"{kind}_"
        line = json.dumps({"step": step, **{prefix + key: value for key, value in values.items()}})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Terminal:
    """Prints a line a record and, where standard output is a terminal, draws a progress bar below them."""

    def __init__(self, last: int, earlier: list[dict[str, Any]]):
        self._last = last
        self._first_values: dict[str, float] = {}
        for record in reversed(earlier):
            self._first_values.update(record)
        self._bar: Any = None
        self._streams = contextlib.ExitStack()

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        if kind != "train":
            print(f"step {step}  " + "  ".join(self._compared(key, value) for key, value in values.items()), flush=True)
            return
        left = int((self._last - step) * values["seconds"])
        parts = [FORMATS.get(key, key.replace("_", " ") + " {:.4g}").format(value) for key, value in values.items()]
        parts.append(f"left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
        print(f"step {step}/{self._last}  " + "  ".join(parts), flush=True)
        if self._bar is None and sys.stdout.isatty():
            self._draw(step)
        elif self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _compared(self, key: str, value: float) -> str:
        text = f"held-out {key.replace('_', ' ')} {value:.4g}"
        if f"held_out_{key}" not in self._first_values:
            self._first_values[f"held_out_{key}"] = value
            return text
        first = self._first_values[f"held_out_{key}"]
        change = f", {(value - first) / abs(first):+.0%}" if first else ""
        return f"{text} (first {first:.4g}{change})"

    def _draw(self, step: int) -> None:
        """Begin the bar with the first steps logged: before them lies compilation, which would spoil the time left."""
        from tqdm import tqdm

        # The loop runs ahead of the device and knows where that is at log steps only: the bar moves there.
        self._bar = tqdm(total=self._last, initial=step, unit="step", file=sys.stdout, leave=False, dynamic_ncols=True,
                         mininterval=0, miniters=1)  # fmt: skip
        terminal = sys.stdout
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if stream.isatty():
                above = _AboveBar(terminal, tqdm.write)  # both on one terminal: tqdm clears the bar for its own stream only
                self._streams.callback(above.release)
                self._streams.enter_context(redirect(above))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._streams.close()


class _AboveBar:
    """A terminal whose lines, whoever prints them, appear above the bar; a line is held back until its end."""

    def __init__(self, terminal: Any, write_line: Any):
        self._terminal, self._write_line, self._held = terminal, write_line, ""

    def write(self, text: str) -> int:
        if "\r" in text:  # another bar's redrawing, which has no line's end
            return self._terminal.write(text)
        *lines, self._held = (self._held + text).split("\n")
        for line in lines:
            self._write_line(line, file=self._terminal)
        return len(text)

    def release(self) -> None:
        self._terminal.write(self._held)
        self.flush()

    def flush(self) -> None:
        self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
