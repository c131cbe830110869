"""A delayed call that can be cancelled; starting and cancelling are cheap."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Grace:
    """Calls ``then``, with ``lock`` held, ``after_s`` seconds after the last ``start``; at once if
    that is 0. All methods are called with ``lock`` held.

    One thread, started when first needed, serves all starts. It sleeps until the due time that it
    read last, and then reads the due time again. So a start and a stop for each cell rarely wake
    it.
    """

    def __init__(self, after_s: float, lock: threading.RLock, then: Callable[[], None]) -> None:
        self._after_s = after_s
        self._then = then
        self._changed = threading.Condition(lock)
        self._due_s: float | None = None
        """End of the grace by ``time.monotonic``; ``None``: there is nothing to call."""
        self._thread: threading.Thread | None = None
        self._asleep = False
        """The thread sleeps until it is woken."""

    def start(self) -> None:
        if self._after_s <= 0:
            self._then()
            return
        self._due_s = time.monotonic() + self._after_s
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="kiwi-grace", daemon=True)
            thread.start()
            self._thread = thread  # last: after an interrupt the next start tries again
        elif self._asleep:
            self._changed.notify()

    def stop(self) -> None:
        self._due_s = None

    def _serve(self) -> None:
        with self._changed:
            while True:
                self._sleep()
                if self._due_s is not None and time.monotonic() >= self._due_s:
                    self._due_s = None
                    self._then()

    def _sleep(self) -> None:
        """Sleep until a call may be due, or until one was started while there was none."""
        if self._due_s is None:
            self._asleep = True
            self._changed.wait()
            self._asleep = False
        else:
            self._changed.wait(max(0.0, self._due_s - time.monotonic()))
