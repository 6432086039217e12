"""Processes that load batches.

These are plain subprocesses with a pipe each, not multiprocessing's: that would run the training script
again in each worker, import jax there, and leave workers behind when the parent is killed. Worker w of W
makes steps w, w + W, w + 2 W, ... and writes each to its pipe, which blocks it until the batch is read. So
W batches are made ahead, the order never depends on speed, and a worker whose parent is gone finds its
pipe broken and ends.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The package's own __init__ imports jax, which costs a second and 200 MB and which a worker has no use for:
# a bare module of its name and folder stands for it.
START = """
import pickle, sys, types
sys.path[:] = pickle.load(sys.stdin.buffer)
package = types.ModuleType("maxdiff")
package.__path__ = pickle.load(sys.stdin.buffer)
sys.modules["maxdiff"] = package
from maxdiff.data.workers import serve
serve()
"""


def worker_batches(source: Any, tokenizers: Any, plan: Any, step: int, workers: int) -> Iterator[Any]:
    """What `load_batch` returns for each step from `step` on, endlessly, by this many processes.

    Raises:
        ChildProcessError: if a worker dies. An exception in a worker is raised here, with a note of where it was.
    """
    job = pickle.dumps((source, tokenizers, plan), protocol=5)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(workers):  # all start at once; the job is longer than a pipe, so sending it waits for each
            running.append(_start())
        for number, process in enumerate(running):
            _send(process, job, step + number, workers)
        while True:
            for number, process in enumerate(running):
                yield _receive(process, number, step)
                step += 1
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # what was not sent yet
                    pipe.close()


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # The worker has one core's work; tokenizers would start a thread for every core.
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )


def _send(process: "subprocess.Popen[bytes]", job: bytes, first_step: int, stride: int) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died; _receive says so
        for message in (sys.path, [str(Path(__file__).parent.parent)], (first_step, stride, len(job))):
            process.stdin.write(pickle.dumps(message))
        process.stdin.write(job)
        process.stdin.flush()


def _receive(process: "subprocess.Popen[bytes]", number: int, step: int) -> Any:
    try:
        assert process.stdout is not None
        result, error = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        code = process.wait()
        how = f"by {signal.Signals(-code).name}, perhaps for lack of memory" if code < 0 else f"with exit code {code}"
        raise ChildProcessError(f"data worker {number} of step {step} ended {how}") from None
    if error is not None:
        raise error
    return result


def serve() -> None:
    """A worker's whole life: read the job from stdin, write batches to stdout until nobody reads them."""
    # Ctrl-C and a scheduler's signals reach every process of a job. The parent decides what to save first;
    # workers end with it, by their pipes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Pillow's remarks about single images; what cannot be used is reported as a bad example.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not write between the batches
    try:
        step, stride, size = pickle.load(sys.stdin.buffer)
        job = sys.stdin.buffer.read(size)  # whole, before it imports anything: the next worker waits for its own
        source, tokenizers, plan = pickle.loads(job)
        from maxdiff.data.pipeline import load_batch

        while True:
            pickle.dump((load_batch(source, tokenizers, plan, step), None), pipe, protocol=5)
            pipe.flush()
            step += stride
    except BrokenPipeError:
        return
    except Exception as error:
        error.add_note(f"in a data worker:\n{traceback.format_exc()}")
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((None, error), pipe, protocol=5)
            pipe.flush()
