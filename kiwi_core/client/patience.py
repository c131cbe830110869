"""Time limits that count only the time in which this process could run.

The daemon may freeze a whole process for minutes, in the middle of any wait. An answer is not late
because of that: it may have been in the socket for a long time.
"""

from __future__ import annotations

import time
from math import inf

SLICE_S = 0.25
"""Longest single wait: the client notices an interrupt and counts time at least this often."""

FULL_AGAIN_S = 1.0
"""Time between attempts to connect to a full daemon: a place is free when somebody leaves."""

_STEP_MAX_S = 2 * SLICE_S
"""Most that one slice counts. A frozen minute counts no more than this. On a loaded machine a slice
may take longer; limits are generous then."""


class Patience:
    """A limit in seconds of running time (``None``: no limit). Call ``tick`` after each slice."""

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
        """Return how long the next single wait may be."""
        return max(0.0, min(at_most_s, self._limit_s - self.spent_s))

    def restart(self) -> None:
        self._last_s = time.monotonic()
        self.spent_s = 0.0
