"""What benchmarks have in common: a line of progress after each case, and key=value arguments beside options."""

import argparse
import sys
import time
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(what the parser makes of the rest, key=value arguments)."""
    overrides = [argument for argument in argv if "=" in argument and not argument.startswith("-")]
    return parser.parse_args([argument for argument in argv if argument not in overrides]), overrides


def progress(number: int, total: int, name: str, started: float) -> None:
    """Say on stderr that so many of all are done, the last being `name`; `started` is time.monotonic() when they began."""
    seconds = time.monotonic() - started
    left = seconds / number * (total - number)
    print(f"{number} of {total}: {name}, {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr)
