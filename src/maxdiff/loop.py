"""The loop over steps: nothing in it waits for the devices but the steps that are logged or saved."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxdiff import build
from maxdiff.checkpoint import Checkpoints, root_cause
from maxdiff.config import Config
from maxdiff.data.pipeline import Prefetch
from maxdiff.judge import Judge, is_due
from maxdiff.metrics import Metrics
from maxdiff.optim import Schedule
from maxdiff.processes import say
from maxdiff.profiler import Profiler
from maxdiff.state import TrainState
from maxdiff.stop import Signals
from maxdiff.watch import Watch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps, and all that happens between them.

    Attributes:
        program: the compiled step, (state, constants, batch, key) -> (state, scalars); it donates its state.
        constants, key: its other arguments.
        rates: the learning rate of each trained network.
        last: the run's last step.
    """

    config: Config
    program: Any
    constants: Mapping[str, Any]
    key: jax.Array
    rates: dict[str, Schedule]
    last: int
    checkpoints: Checkpoints
    metrics: Metrics
    judge: Judge
    profiler: Profiler
    signals: Signals
    watch: Watch

    def run(self, state: TrainState, batches: Prefetch[dict[str, jax.Array]]) -> tuple[TrainState, bool]:
        """Step until the last one, or until the run is to go back: (state, whether it is).

        Raises:
            Stopped: after a signal, when the state is saved.
            OSError, ValueError: if the last checkpoint cannot be written; earlier ones fail with a warning.
        """
        output, global_batch = self.config.output, self.config.batch.global_batch_size
        first, ahead = int(state.step), int(state.health.batch) - int(state.step)
        scalars, waited = None, 0.0
        for number in range(first + 1, self.last + 1):
            self.profiler.step(number, scalars)
            state, scalars = self.program(state, self.constants, next(batches), self.key)
            self.watch.step(number)
            stops = self.signals.requested(number + ahead)
            judged = is_due(self.config, number, self.last)
            saves = stops or number == self.last or due(number, global_batch, output.checkpoint_every)
            logs = stops or judged or number == first + 1 or number % output.log_period == 0
            values = jax.device_get(scalars) if logs or saves else {"bad_batch": -1}
            if values.pop("bad_batch") >= 0:
                return state, True
            if logs:
                if ahead:
                    values["batches_ahead"] = ahead
                self._log(number, values, batches.seconds_waited - waited)
                waited = batches.seconds_waited
            if stops or number == self.last:
                self._save_now(number, state)  # what is judged and exported after it may fail, and nothing is lost
            elif saves:
                self._save(number, state)
            if stops:
                raise self.signals.stopped(f"step {number} of {self.last} is saved; the same command goes on from it")
            if judged:
                with self.metrics.untimed(), self.watch.busy("evaluation"):
                    self.judge(number, state, self.metrics)
                self.checkpoints.losses |= self.metrics.held_out_losses
        return state, False

    def _log(self, number: int, values: dict[str, Any], seconds_waited: float) -> None:
        # An update that was skipped moves no schedule.
        values |= build.current_rates(self.rates, number - 1 - int(values["skipped_steps"]))
        if not values["skipped_steps"]:
            del values["skipped_steps"]
        self.metrics.log(number, values, seconds_waited)

    def _save(self, number: int, state: TrainState) -> None:
        """Begin to save. A save that fails, this one or the one before it, is told, and training goes on to the next."""
        started = time.perf_counter()
        self._try(self._saved)
        self._try(lambda: self.checkpoints.save(number, state))
        say(f"step {number} is being saved; the loop waited {time.perf_counter() - started:.3f} s for it")

    def _saved(self) -> None:
        """Wait for the save before this, and remember it."""
        with self.watch.busy("saving"):
            self.checkpoints.wait()
        if there := self.checkpoints.steps():
            self.watch.saved(there[-1])

    def _save_now(self, number: int, state: TrainState) -> None:
        self._try(self._saved)
        try:
            with self.watch.busy("saving"):
                self.checkpoints.save(number, state)
                self.checkpoints.wait()
        except Exception as error:
            raise OSError(f"step {number} could not be saved, {self._last_whole()}: {root_cause(error)}") from error

    def _try(self, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except Exception as error:  # Orbax and tensorstore raise a dozen kinds
            logger.error("A CHECKPOINT COULD NOT BE WRITTEN, %s; training goes on: %s", self._last_whole(), root_cause(error))

    def _last_whole(self) -> str:
        there = self.checkpoints.steps()
        return f"the last whole one is of step {there[-1]}" if there else "there is none yet"


def due(step: int, global_batch: int, every: int) -> bool:
    """Whether this step is the first past a multiple of `every` examples."""
    return every > 0 and step * global_batch // every > (step - 1) * global_batch // every
