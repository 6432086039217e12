"""Signals that end a run: it saves first, on all processes at the same step.

SIGTERM (maintenance of a TPU, Slurm's preemption, Kubernetes) and SIGUSR1 (Slurm's --signal) end with exit status
STOPPED: start the same command again. Ctrl-C ends with 130; a second one ends at once, and nothing is saved.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED = 128 + signal.SIGINT


class Stopped(BaseException):
    """A signal ended the run; no Exception, so that nothing takes it for a failure.

    Attributes:
        status: the exit status.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Signals:
    """Hears the signals, as a context manager; of several processes one that hears them is enough.

    Before `defer` there is nothing to save, and a process that is alone ends at once. Of several processes JAX hears
    SIGTERM, and the others are told at their next step.
    """

    def __init__(self):
        self._heard: signal.Signals | None = None
        self._deferred = self._agreed = self._held = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # others may not say what a signal does
            alone = (signal.SIGTERM,) if jax.process_count() == 1 else ()
            self._before = {number: signal.signal(number, self._hear) for number in (*alone, signal.SIGUSR1, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work that no signal may break into, such as Orbax's, which takes what is raised in it for a damaged checkpoint.

        Leaving it raises Stopped, if a signal came that ends the run at once.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._heard and not self._deferred and jax.process_count() == 1:
            raise self._stopped_early()

    def defer(self, made: int) -> None:
        """From here on signals wait for `requested`, or for the end of the run.

        Args:
            made: the number of the last batch before, 0 if there was none; the same on every process.
        """
        if jax.process_count() > 1 and not self._deferred:
            # All agree on the number after the greatest that any has asked for. Of a signal before they asked for one, that
            # is 1, which a run that goes on must not step over: no later signal would be heard either.
            for number in range(1, made + 1):
                self._agreed |= multihost_utils.reached_preemption_sync_point(number)
        self._deferred = True

    def requested(self, number: int) -> bool:
        """Whether to save and stop now: the same on every process.

        Args:
            number: of the batch; every process asks after every batch.
        """
        if jax.process_count() > 1:
            # True for the one number that all agreed on; a run that goes back after it stops a step later.
            self._agreed |= multihost_utils.reached_preemption_sync_point(number)
            return self._agreed
        return self._heard is not None

    def stopped(self, what: str) -> Stopped:
        """What to raise when all is saved."""
        heard = self._heard or signal.SIGTERM
        return Stopped(f"{heard.name}: {what}", INTERRUPTED if heard == signal.SIGINT else STOPPED)

    def _stopped_early(self) -> Stopped:
        return self.stopped("stopped before the first step, nothing was to be saved")

    def _hear(self, number: int, _: Any) -> None:
        heard = signal.Signals(number)
        if heard == self._heard == signal.SIGINT:
            print("SIGINT again: stopped at once, nothing was saved", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        self._heard = heard
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX listens to, and tells the others
        elif not self._deferred:
            if self._held:
                print(f"{heard.name}: stopping when the checkpoint is read", file=sys.stderr, flush=True)
                return
            raise self._stopped_early()
        print(f"{heard.name}: saving after this step, then stopping", file=sys.stderr, flush=True)
