"""The trace holds the steps of its window, and is written whenever the run ends."""

import gzip
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxdiff.profiler import Profiler


def run(profiler: Profiler, first: int, last: int) -> None:
    """Steps whose programs bear their number."""
    x = jnp.ones((64, 64))
    for number in range(first + 1, last + 1):
        profiler.step(number, x)

        def step(x):
            return x @ x / 64

        step.__name__ = f"step_{number}"
        x = jax.jit(step)(x)
    jax.block_until_ready(x)
    profiler.close()


def traced(folder: Path) -> set[int]:
    """The steps of the one trace."""
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    (whole,) = folder.glob("plugins/profile/*/*.xplane.pb")
    assert whole.stat().st_size > 0
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    return {int(found[1]) for name in names if (found := re.fullmatch(r"PjitFunction\(step_(\d+)\)", name))}


@pytest.mark.parametrize(("last", "steps"), [(16, {13, 14}), (13, {13})])
def test_the_window_is_traced_counted_from_the_start(tmp_path: Path, capsys: pytest.CaptureFixture, last: int, steps: set[int]):
    run(Profiler(tmp_path, first=10, skip=2, steps=2), 10, last)
    assert traced(tmp_path) == steps
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"wrote a profile of steps 13 to {max(steps)}: {tmp_path / 'plugins/profile'}")
    assert Path(line.split(": ")[1]).is_dir()


def test_a_run_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    run(Profiler(tmp_path, first=0, skip=5, steps=2), 0, 5)
    assert capsys.readouterr().out == "no profile: the run ended before step 6\n"
    assert not list(tmp_path.iterdir())


def test_no_folder_no_trace(capsys: pytest.CaptureFixture):
    run(Profiler(None, first=0, skip=1, steps=1), 0, 3)
    assert capsys.readouterr().out == ""


def test_it_waits_for_the_device_at_both_ends_of_the_window_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    profiler = Profiler(tmp_path, first=10, skip=1, steps=2)
    for number in range(11, 17):
        profiler.step(number, f"what step {number - 1} made")
    profiler.close()
    assert waited == ["what step 11 made", "what step 13 made"]
