"""How benchmarks of several cases report: a line of progress after each, and a table of all."""

import sys
import time
from collections.abc import Sequence


def progress(number: int, total: int, name: str, started: float) -> None:
    """Say on stderr that so many of all are done, the last being `name`; `started` is time.monotonic() when they began."""
    seconds = time.monotonic() - started
    left = seconds / number * (total - number)
    print(f"{number} of {total}: {name}, {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))
