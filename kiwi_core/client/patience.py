"""Time limits that count only the time in which this process could run.

The daemon may freeze a whole process for minutes, in the middle of any wait. Nothing that the
process waited for is late because of that: the answer may lie in its socket since long.
"""

from __future__ import annotations

import time
from math import inf

SLICE_S = 0.25
"""Longest single wait; an interrupt is noticed and time is counted at least this often."""

FULL_AGAIN_S = 1.0
"""Between attempts to connect to a daemon that is full: places get free when somebody leaves."""

_STEP_MAX_S = 2 * SLICE_S
"""What one slice may count for. A loaded machine takes longer for some, and then limits are
generous; a frozen minute is no more than this."""


class Patience:
    """A limit in seconds of running time (``None``: none). Call ``tick`` after each slice."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = inf if limit_s is None else limit_s
        self._last_s = time.monotonic()
        self.spent_s = 0.0

    def tick(self) -> bool:
        """Count the time since the last tick; true while the limit has not been reached."""
        now_s = time.monotonic()
        self.spent_s += min(now_s - self._last_s, _STEP_MAX_S)
        self._last_s = now_s
        return self.spent_s < self._limit_s

    def slice_s(self, at_most_s: float = SLICE_S) -> float:
        """How long the next single wait may be."""
        return max(0.0, min(at_most_s, self._limit_s - self.spent_s))

    def restart(self) -> None:
        self._last_s = time.monotonic()
        self.spent_s = 0.0
