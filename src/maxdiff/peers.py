"""The other processes of a run: when one is lost or fails, the others name it and end too.

Left to itself JAX ends them by abort() with a C++ stack for last words, some only when their heartbeats time out, and
whoever waits in a collective may wait for ever. So each process gives signs of life in the store of JAX's coordination
service, process 0 reads them, and its verdict ends all. Process 0 holds that store: when it is lost JAX aborts the
others within a second, and a small process that each has beside it says so.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed  # where JAX keeps its client of the coordination service

from maxdiff.command import LOST, MISTAKES, tell_mistake

BEAT_SECONDS = 2.0  # between two signs of life
SIGNS, VERDICT = "maxdiff/sign/", "maxdiff/verdict/"  # in the coordination service's store
LAST_WORDS = Path(__file__).with_name("last_words.py")


class Peers:
    """Watches the other processes, as a context manager, for one use; a process that is alone has nothing to watch.

    An error that leaves it ends this process, and with a word of it the others: their exit status is this one's.

    Args:
        place: says where the run is, for last words.
        lost_process_seconds: without a sign of life, a process is taken for lost.
        program: what a mistake is told in the name of.
    """

    def __init__(self, place: Callable[[], str], lost_process_seconds: float, program: str = "train.py"):
        self._place, self._seconds, self._program = place, lost_process_seconds, program
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._client: Any = None
        self._beside: subprocess.Popen[bytes] | None = None
        self._signs: dict[int, tuple[dict[str, Any], float]] = {}  # process -> its last sign, and when that came

    def __enter__(self) -> "Peers":
        if jax.process_count() > 1:
            self._client, self._me = distributed.global_state.client, jax.process_index()
            self._sign = {"host": socket.gethostname(), "beat": 0, "ended": False}
            address = distributed.global_state.coordinator_address
            # No module of ours, which would import jax. In a session of its own: Ctrl-C is not for it.
            command = [sys.executable, "-S", "-E", str(LAST_WORDS), str(address)]
            self._beside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
            self._give_sign()
            self._thread.start()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if self._client is None:
            return
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            # It may be what a collective says whose other end is lost: the verdict, if one comes, ends this process.
            seconds = self._seconds + 2 * BEAT_SECONDS
            print(
                f"{_first_line(error)}\nlooking up to {seconds:.0f} s whether another process was lost",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(seconds)
        self._ends.set()
        self._thread.join()
        if isinstance(error, Exception):
            self._fail(error)
        self._sign["ended"] = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 may have ended already
            self._give_sign()
        self._say_goodbye()

    def _fail(self, error: Exception) -> None:
        """End here, and tell the others why; this process's last words are those of its error."""
        if isinstance(error, MISTAKES):
            status = tell_mistake(self._program, error)
        else:
            status = 1
            traceback.print_exception(error)
        verdict = {"process": self._me, "host": self._sign["host"], "status": status, "what": f"failed: {_first_line(error)}"}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{VERDICT}{self._me}", json.dumps(verdict), allow_overwrite=True)
        self._leave(status)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ends.wait(BEAT_SECONDS):
            self._sign["beat"] += 1
            try:
                self._give_sign()
                verdicts = [json.loads(value) for _, value in self._client.key_value_dir_get(VERDICT)]
                if self._me == 0 and not verdicts:
                    # What was stopped itself, or waited for the machine, knows nothing of the others.
                    blind = time.monotonic() - looked > 3 * BEAT_SECONDS
                    verdicts = self._lost(blind)
            except Exception:  # of JAX's kinds; a thread that ended would be taken for a lost process
                continue  # process 0 does not answer: JAX ends this process if that lasts
            finally:
                looked = time.monotonic()
            if verdicts:
                self._end(verdicts[0])

    def _give_sign(self) -> None:
        self._client.key_value_set(f"{SIGNS}{self._me}", json.dumps(self._sign), allow_overwrite=True)
        self._tell(self._place())

    def _lost(self, blind: bool) -> list[dict[str, Any]]:
        """The verdict on a process that gave no sign for so long, in a list; empty if there is none."""
        now, found = time.monotonic(), dict(self._client.key_value_dir_get(SIGNS))
        for number in range(jax.process_count()):
            sign = json.loads(found.get(f"{SIGNS}{number}", '{"host": "unknown", "ended": false}'))
            last, since = self._signs.get(number, (None, now))
            self._signs[number] = (sign, now if blind or sign != last else since)
        for number, (sign, since) in self._signs.items():
            if now - since > self._seconds and not sign["ended"]:
                what = f"was lost: it gave no sign of life for {now - since:.0f} s"
                verdict = {"process": number, "host": sign["host"], "status": LOST, "what": what}
                self._client.key_value_set(f"{VERDICT}{number}", json.dumps(verdict), allow_overwrite=True)
                return [verdict]
        return []

    def _end(self, verdict: dict[str, Any]) -> None:
        who = f"process {verdict['process']} of {jax.process_count()} on host {verdict['host']}"
        print(f"{who} {verdict['what']}\nthis one ends too: {self._place()}", file=sys.stderr, flush=True)
        self._leave(verdict["status"])

    def _leave(self, status: int) -> None:
        """End this process at once: JAX would wait for the others, and then abort."""
        self._say_goodbye()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._me == 0:
            time.sleep(2 * BEAT_SECONDS)  # the others read the verdict here
        os._exit(status)

    def _tell(self, line: str) -> None:
        """To the process beside this one: what to say if this one ends without a word."""
        assert self._beside is not None
        assert self._beside.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: JAX's words will be the last
            self._beside.stdin.write(line.encode() + b"\n")
            self._beside.stdin.flush()

    def _say_goodbye(self) -> None:
        assert self._beside is not None
        assert self._beside.stdin is not None
        self._tell("")
        with contextlib.suppress(OSError):
            self._beside.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._beside.wait(5)


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
