"""Says below a cell that it is suspended in mid-work, and when it goes on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.words import share_done, suspended_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.wire.messages import Waiting
    from kiwi_jupyter.kernel.burst import Burst
    from kiwi_jupyter.kernel.display import WaitingLine

LOOK_S: Final = 0.25
"""How soon a suspension, or its end, is seen."""

FRESH_S: Final = 4.0
"""The daemon speaks once a second to one who waits. What is older holds no more."""


class Suspension:
    """``began`` may be called at any time, in any thread. A thread of its own draws: the cell's own
    is held in a driver call. It lives until the burst ends, since a cell that was suspended once
    mostly is again.

    ``line`` makes the line below the cell that runs; ``None``: there is none.
    """

    def __init__(self, burst: Burst, line: Callable[[], WaitingLine | None]) -> None:
        self._burst = burst
        self._make_line = line
        self._line: WaitingLine | None = None
        self._heard: Waiting | None = None
        self._heard_s = 0.0
        self._began_s = 0.0
        self._thread: threading.Thread | None = None

    def began(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._follow, name="kiwi-suspension", daemon=True
            )
            self._thread.start()

    def _follow(self) -> None:
        try:
            while self._burst.granted:  # also between two cells of it
                self._look(time.monotonic())
                time.sleep(LOOK_S)
        finally:
            self._hide()

    def _look(self, now_s: float) -> None:
        waiting = self._burst.suspended
        if waiting is not self._heard:
            self._heard, self._heard_s = waiting, now_s
        if waiting is None or now_s - self._heard_s > FRESH_S:
            self._hide()
            return
        if self._line is None:
            self._line, self._began_s = self._make_line(), now_s
        if self._line is not None:
            self._line.say(suspended_line(waiting), share_done(waiting, now_s - self._began_s))

    def _hide(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
