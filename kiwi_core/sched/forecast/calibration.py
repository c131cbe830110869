"""How waits of one kind turned out, compared with their simulated futures and first forecasts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.sched.forecast.ranges import Estimate, likely
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.forecast.promise import Promise

COUNTED: Final = 100
"""Number of recent waits whose forecasts are compared with the outcome: about an afternoon."""

FACTORS: Final = 9
"""The number of waits needed to calibrate, and the most factors that one range uses."""

FACTOR_MAX: Final = 20.0

POINTS: Final = 27
"""The most points that one range is made of: futures times factors."""

HOLDS: Final = 0.98
"""The share of earlier waits that an upper bound would have covered; 95 % are promised."""

BOUND_FACTOR: Final = 4.0
"""The factor of an upper bound while too few waits are known."""

GOOD: Final = 0.92
"""If a smaller share of forecasts was right lately, ranges are chosen carefully; more than the 85 %
that are promised."""


class Past(NamedTuple):
    """A wait that has ended."""

    factor: float
    """The length of the wait divided by the nearest future's; 1 if it lay among them."""
    took_ns: int


class Calibration:
    """The outcomes of waits of one kind, compared with their futures and forecasts."""

    def __init__(self) -> None:
        self._waits: deque[Past] = deque(maxlen=COUNTED)
        self._ordered: list[Past] = []
        self._right: deque[bool] = deque(maxlen=COUNTED)

    def learn(self, promise: Promise, took_ns: int) -> None:
        nearest_ns = min(max(took_ns, promise.shortest_ns), promise.longest_ns)
        factor = (took_ns + NS_PER_S) / (nearest_ns + NS_PER_S)  # tiny waits say little
        factor = min(FACTOR_MAX, max(1 / FACTOR_MAX, factor))
        self._waits.append(Past(factor, took_ns))
        self._ordered = sorted(self._waits)
        self._right.append(promise.first.is_right(took_ns))

    def likely(self, futures_ns: list[int], waited_ns: int) -> Estimate:
        """Return the estimate for a wait of this kind that has lasted for ``waited_ns``."""
        if len(self._ordered) < FACTORS:
            return likely(futures_ns)
        # A factor below 1 counts only if its own wait lasted longer than this one has.
        factors = [
            past.factor for past in self._ordered if past.factor >= 1 or past.took_ns > waited_ns
        ]
        factors = factors or [1.0]
        known = len(factors)
        count = min(FACTORS, POINTS // len(futures_ns))
        some = [factors[(2 * n + 1) * known // (2 * count)] for n in range(count)]
        careful = sum(self._right) < GOOD * len(self._right)
        return likely([round(ns * by) for ns in futures_ns for by in some], careful=careful)

    def bound(self, futures_ns: list[int]) -> Estimate:
        """Return a range whose high end is an upper bound for almost all waits of this kind."""
        known = len(self._ordered)
        factor = self._ordered[int(HOLDS * known)].factor if known >= FACTORS else BOUND_FACTOR
        low_ns, high_ns = min(futures_ns), max(futures_ns)
        high_ns = round((high_ns + NS_PER_S) * max(1.0, factor))
        return Estimate(low_ns, sorted(futures_ns)[len(futures_ns) // 2], high_ns)
