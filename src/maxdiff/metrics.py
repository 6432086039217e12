"""What a run says of itself: one line a log step on the terminal, the same in metrics.jsonl."""

import json
import time
from pathlib import Path
from typing import Any


class Metrics:
    """Turns a step's scalars and the clock into a line.

    Args:
        folder: metrics.jsonl is appended there; None writes none (other processes than the first).
        global_batch: examples of a step.
        devices: of all processes.
        flops: of one example's training, over all that is trained and frozen.
        first, last: steps of this start, for the time left.
    """

    def __init__(self, folder: Path | None, *, global_batch: int, devices: int, flops: float, first: int, last: int):
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._batch, self._devices, self._flops = global_batch, devices, flops
        self._step, self._last = first, last
        self._time = time.perf_counter()

    def log(self, step: int, scalars: dict[str, Any], seconds_waited: float) -> dict[str, Any]:
        """Log the steps since the last call, whose number and clock it keeps; returns what was logged."""
        now = time.perf_counter()
        seconds = (now - self._time) / (step - self._step)
        self._time, self._step = now, step
        images = self._batch / seconds
        line: dict[str, Any] = {"step": step, **{key: float(value) for key, value in scalars.items()}}
        line |= {
            "seconds": seconds,
            "images_per_second": images,
            "images_per_second_per_device": images / self._devices,
            "tflops_per_device": images * self._flops / self._devices / 1e12,
            "seconds_waited_for_input": seconds_waited,
        }
        left = int((self._last - step) * seconds)
        print(
            f"step {step}/{self._last}  loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  "
            f"grad norm {line['grad_norm']:.3f}  {seconds:.3f} s  {images:.1f} images/s  "
            f"{line['tflops_per_device']:.2f} TFLOP/s/device  waited {seconds_waited:.1f} s  "
            f"left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}",
            flush=True,
        )
        if self._file:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
