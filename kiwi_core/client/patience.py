"""Waits of the client: interruptible sleeps, and limits of running time.

``threading.Condition`` is Python code: a ``KeyboardInterrupt`` inside it can leave its lock taken
forever. In ``Changes`` every step that matters is one call into C, where no interrupt is raised.

The daemon may freeze a whole process for minutes, in the middle of any wait. An answer is not late
then, because it may already be in the socket. So ``Patience`` counts only the time in which this
process could run.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE_S = 0.25
"""Longest single wait: the client notices an interrupt and counts time at least this often."""

FULL_AGAIN_S = 1.0
"""Time between attempts to connect to a full daemon: a place becomes free when another process
leaves.
"""

_STEP_MAX_S = 2 * SLICE_S
"""Most that one slice counts. A frozen minute counts no more than this. On a loaded machine a slice
may take longer; limits are generous then."""


class Changes:
    """Any thread may ``sleep`` until another one calls ``tell``. A sleeper holds no lock."""

    def __init__(self) -> None:
        self._sleepers: dict[threading.Lock, None] = {}

    def tell(self) -> None:
        """Wake all sleepers, so that they check again. Costs nothing when there are none."""
        while self._sleepers:
            with suppress(KeyError):  # another thread took the last one
                self._sleepers.popitem()[0].release()

    def sleep(self, done: Callable[[], bool], seconds: float) -> None:
        """Sleep until the next change, at most ``seconds``; return at once if ``done()`` is true.

        The caller looks again afterwards. Sleeps are short (``SLICE_S``), so a wake-up that an
        interrupt swallowed does no harm.
        """
        gate = threading.Lock()
        gate.acquire()
        self._sleepers[gate] = None  # before looking, so that no change is missed
        try:
            if not done():
                gate.acquire(True, seconds)
        finally:
            self._sleepers.pop(gate, None)


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
