"""How benchmarks of several cases report: a line of progress after each."""

import sys
import time


def progress(number: int, total: int, name: str, started: float) -> None:
    """Say on stderr that so many of all are done, the last being `name`; `started` is time.monotonic() when they began."""
    seconds = time.monotonic() - started
    left = seconds / number * (total - number)
    print(f"{number} of {total}: {name}, {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr)
