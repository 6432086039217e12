"""Several processes of one job on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_together(commands: Sequence[Sequence[str]], env: Mapping[str, str], folder: Path, timeout: float) -> list[str]:
    """What each printed. All end when one fails or time (seconds) is up, with whatever they have started.

    Args:
        folder: gets N.out and N.err, what command N prints.

    Raises:
        RuntimeError: with what each had to complain of, if one did not end well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        try:
            for number, command in enumerate(commands):
                out, err = (stack.enter_context((folder / f"{number}.{kind}").open("wb")) for kind in ("out", "err"))
                running.append(subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True))
            end = time.monotonic() + timeout
            while any(p.poll() is None for p in running) and not any(p.poll() for p in running) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            codes = [p.poll() for p in running]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if codes != [0] * len(commands):
        complaints = [(folder / f"{number}.err").read_text()[-3000:] for number in range(len(commands))]
        raise RuntimeError(f"processes ended with {codes}:\n" + "\n".join(complaints))
    return [(folder / f"{number}.out").read_text() for number in range(len(commands))]


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
