"""Event files that TensorBoard reads.

tensorboardX gives the format; its SummaryWriter is not used: it hands events to a thread through a queue of ten, and
where that thread dies of a full disk the training would wait for ever. An event here is written when the call returns.
"""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2, summary_pb2

_EVENTS: Any = event_pb2  # protobuf makes its classes at run time
_SUMMARIES: Any = summary_pb2


class TensorBoard:
    """A new event file in a folder; a run that goes on adds one to those of its earlier starts.

    Args:
        folder: of all of the run's event files.
        first: the step that this start goes on from. TensorBoard forgets what earlier starts said of later steps, which
            would be drawn as a zigzag.
    """

    def __init__(self, folder: Path, first: int):
        folder.mkdir(parents=True, exist_ok=True)
        # The name's clock counts seconds: the step tells two starts within one apart.
        self._writer = event_file_writer.EventsWriter(str(folder / "events"), f".{first}")
        self._first, self._one_at_a_time = first, threading.Lock()
        start = _EVENTS.SessionLog(status=_EVENTS.SessionLog.START)
        self._write(_EVENTS.Event(step=first + 1, session_log=start))  # purges this step and all after it

    def record(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Scalars, under kind/name."""
        scalars = [_SUMMARIES.Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        self._write(_EVENTS.Event(step=step, summary=_SUMMARIES.Summary(value=scalars)))

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        """A picture, uint8 [h w 3], under samples/name."""
        self._write(_EVENTS.Event(step=step, summary=summary.image(f"samples/{name}", array, dataformats="HWC")))

    def text(self, name: str, text: str) -> None:
        """A text, shown as it is, line by line."""
        verbatim = f"```\n{text}\n```"  # TensorBoard reads Markdown
        self._write(_EVENTS.Event(step=self._first, summary=summary.text(name, verbatim)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with self._one_at_a_time:
            self._writer.write_event(event)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()
