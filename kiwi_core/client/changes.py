"""Wait for a change in a way that an interrupt cannot break.

``threading.Condition`` is Python code: a ``KeyboardInterrupt`` inside it can leave its lock taken
forever. Here every step that matters is one call into C, where no interrupt is raised.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Changes:
    """Any thread may ``sleep`` until another one calls ``tell``. A sleeper holds no lock."""

    def __init__(self) -> None:
        self._sleepers: dict[threading.Lock, None] = {}

    def tell(self) -> None:
        """Wake all sleepers, so that they look again. Costs nothing when there are none."""
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
