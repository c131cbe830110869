"""Turn simulated waits into the estimate that users see: "about 12 s", or "10-25 s".

An estimate is right if the wait differs from the figure or the range by at most two seconds, or by
a quarter of the wait if that is more. ``range_max_ns`` limits a range: a wider one would tell
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

FALL: Final = 3
FALL_SHARE: Final = 20
"""A figure that turns out too long falls faster than the clock, by three seconds and a twentieth of
itself in each second: a jump would look like an error."""

TOLERANCE_NS: Final = 2 * NS_PER_S
TOLERANCE_SHARE: Final = 4

WIDTH_FACTOR: Final = 2.5
WIDTH_NS: Final = 5 * NS_PER_S

SURE: Final = 0.85
SURE_CAREFUL: Final = 0.95
"""A range is right for this share of the futures, unless it would be too wide. The second one
applies where estimates were wrong lately."""

CAREFUL: Final = 2
"""The tolerance is divided by this where too few estimates were right lately."""


class Estimate(NamedTuple):
    """The estimate of a wait from now on, in nanoseconds. All three equal: "about"."""

    low_ns: int
    expected_ns: int
    high_ns: int

    def is_right(self, took_ns: int) -> bool:
        slack_ns = tolerance_ns(took_ns)
        return self.low_ns - slack_ns <= took_ns <= self.high_ns + slack_ns

    def later(self, passed_ns: int) -> Estimate:
        """Return the same estimate as seen ``passed_ns`` later."""
        low_ns, expected_ns, high_ns = self
        low_ns = low_ns - passed_ns if low_ns > passed_ns else 0
        expected_ns = expected_ns - passed_ns if expected_ns > passed_ns else 0
        return Estimate(low_ns, expected_ns, high_ns - passed_ns if high_ns > passed_ns else 0)

    def fallen(self, passed_ns: int) -> Estimate:
        """Return the lowest figures that may be shown ``passed_ns`` after these were shown."""
        by_ns = [FALL * passed_ns + ns * passed_ns // (FALL_SHARE * NS_PER_S) for ns in self]
        return Estimate(*(max(0, ns - less_ns) for ns, less_ns in zip(self, by_ns, strict=True)))

    def times(self, factor: float) -> Estimate:
        low_ns = round(self.low_ns * factor)
        high_ns = max(low_ns, min(round(self.high_ns * factor), range_max_ns(low_ns)))
        expected_ns = min(max(low_ns, round(self.expected_ns * factor)), high_ns)
        return Estimate(low_ns, expected_ns, high_ns)

    def contradicts(self, shown: Estimate) -> bool:
        """Return whether all of it is longer than ``shown``, by more than "about" allows."""
        return self.low_ns > shown.high_ns + tolerance_ns(self.low_ns)

    def no_longer_than(self, shown: Estimate) -> Estimate:
        """Return the shorter one of each figure."""
        return Estimate(*map(min, self, shown))

    def no_shorter_than(self, least: Estimate) -> Estimate:
        """Return the longer one of each figure."""
        return Estimate(*map(max, self, least))


def tolerance_ns(took_ns: int) -> int:
    return max(TOLERANCE_NS, took_ns // TOLERANCE_SHARE)


def range_max_ns(low_ns: int) -> int:
    """Return the longest high end of a range that begins at ``low_ns``."""
    return round(WIDTH_FACTOR * low_ns) + WIDTH_NS


def likely(futures_ns: Sequence[int], *, careful: bool = False) -> Estimate:
    """Return the narrowest range that is right for almost all futures (``SURE``). If every such
    range is wider than ``range_max_ns`` allows, return the one that is right for most futures. A
    narrow range becomes one figure."""
    futures = sorted(futures_ns)
    part = CAREFUL if careful else 1
    lows = [ns + tolerance_ns(ns) // part for ns in futures]
    """A range is right for future i if its low end is at most ``lows[i]`` and its high end is at
    least ``highs[i]``."""
    highs = [ns - tolerance_ns(ns) // part for ns in futures]
    sure = SURE_CAREFUL if careful else SURE
    enough = min(len(futures), int(sure * len(futures)) + 1)
    middle_ns = futures[len(futures) // 2]
    best = (0, 0, 0, 0, 0)
    for low_ns in futures:
        first = bisect_left(lows, low_ns)
        most_ns = range_max_ns(low_ns)
        right = min(enough, max(1, bisect_right(highs, most_ns) - first))
        high_ns = min(max(low_ns, highs[min(first + right, len(futures)) - 1]), most_ns)
        narrow = -(high_ns - low_ns) * NS_PER_S // (low_ns + TOLERANCE_NS)
        best = max(best, (right, narrow, -abs(low_ns - middle_ns), low_ns, high_ns))
    low_ns, high_ns = best[3:]
    middle_ns = min(max(middle_ns, low_ns), high_ns)
    if high_ns - low_ns <= tolerance_ns(high_ns) // 2:
        return Estimate(middle_ns, middle_ns, middle_ns)
    return Estimate(low_ns, middle_ns, high_ns)
