"""How fast a long piece of work goes, and how long it will take."""

import time

from maxdiff.processes import say

SECONDS = 10  # between two lines


class Pace:
    """Says a line now and then, and one at the end; the first batch, with what is compiled for it, is not in the rate.

    Args:
        total: how many there are to do.
        what: what is counted, in the plural, with an `s`.
        started: time.perf_counter() when the program began.
    """

    def __init__(self, total: int, what: str, started: float):
        self._total, self._what, self._started = total, what, started
        self._done, self._at_first, self._first, self._said = 0, 0, 0.0, 0.0

    def step(self, count: int) -> None:
        """So many more are done."""
        now = time.perf_counter()
        if not self._done:
            self._first, self._said, self._at_first = now, now, count
            say(f"the first {self.counted(count)} after {now - self._started:.1f} s")
        self._done += count
        if now - self._said > SECONDS and self._done > self._at_first:
            rate = self.rate()
            left = (self._total - self._done) / rate
            say(f"{self._done}/{self._total} {self._what}, {digits(rate)} {self._what}/s, {left:.0f} s left")
            self._said = now

    def end(self, verb: str, skipped: int) -> None:
        """All are done, and so many more were there before."""
        parts = [f"{self.counted(self._done)} {verb}"] if self._done else []
        if self._done > self._at_first:
            parts.append(f"{digits(self.rate())} {self._what}/s after the first")
        parts += [f"{self.counted(skipped)} there already"] if skipped else []
        say(", ".join(parts))

    def counted(self, count: int) -> str:
        """As `1 image` or `2 images`."""
        return f"1 {self._what.removesuffix('s')}" if count == 1 else f"{count} {self._what}"

    def rate(self) -> float:
        """So many a second, after the first batch."""
        return (self._done - self._at_first) / (time.perf_counter() - self._first)


def digits(value: float) -> str:
    """Three digits of a number, or all those before its point: 0.123, 12.3, 1234."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
