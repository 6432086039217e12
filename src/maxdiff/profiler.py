"""A trace of a few steps, for TensorBoard's profile page or ui.perfetto.dev."""

from pathlib import Path
from typing import Any

import jax


class Profiler:
    """Traces the steps first + skip + 1 to first + skip + steps.

    Only the first process should trace. All processes run one program, and whoever waits for others shows it in its own
    trace; several processes of a host would write files of one name, and each trace of a large machine costs as much again.

    Args:
        folder: of the run's event files, where TensorBoard looks for profiles; None: nothing is traced, as on other processes.
        first: the step that this start goes on from.
        skip: steps before the trace; at least 1 keeps compilation out of it.
        steps: how many are traced.
    """

    def __init__(self, folder: Path | None, *, first: int, skip: int, steps: int):
        self._folder = folder
        self._begin, self._end = first + skip + 1, first + skip + steps
        self._traced: range | None = None

    def step(self, number: int, pending: Any) -> None:
        """To be called before step `number` is dispatched; `pending` is what the step before it made, on the device.

        Dispatch runs ahead of the device: at both ends of the window this waits until `pending` is there, so that the
        trace holds these steps and no others.
        """
        if self._folder is None:
            return
        if number == self._begin:
            jax.block_until_ready(pending)
            jax.profiler.start_trace(self._folder)
        if self._begin <= number <= self._end:
            self._traced = range(self._begin, number + 1)
        elif self._traced:
            jax.block_until_ready(pending)
            self.close()

    def close(self) -> None:
        """Write a trace that is still running, or say that the run was too short for one."""
        if self._folder is None:
            return
        if self._traced is None:
            print(f"no profile: the run ended before step {self._begin}", flush=True)
        else:
            jax.profiler.stop_trace()
            traces = self._folder / "plugins" / "profile"
            newest = max(traces.iterdir(), key=lambda path: path.stat().st_mtime)
            print(f"wrote a profile of steps {self._traced[0]} to {self._traced[-1]}: {newest}", flush=True)
        self._folder = None
