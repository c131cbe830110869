"""The line below a running cell whose own thread is held in a driver call.

Either the cell was suspended in the middle of its work, or one of its calls needs the GPU and
nobody had foreseen that.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.words import share_done, suspended_line, unforeseen_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.client import Client
    from kiwi_core.wire.messages import Waiting
    from kiwi_jupyter.kernel.burst import Burst
    from kiwi_jupyter.kernel.display import CellWaitLine

LOOK_S: Final = 0.25
"""Interval of checks for a suspension and its end."""

FRESH_S: Final = 4.0
"""The daemon sends a message each second to a session that waits. An older message is out of
date.
"""


class HeldLine:
    """The line below a cell that is held. ``began`` may be called at any time, in any thread. A
    separate thread draws while ``goes_on`` returns true, because the cell's own thread is held.

    ``waiting`` returns the daemon's last message. ``line`` makes the line below the running cell;
    ``None`` if there is none. ``words`` returns the text of the line.
    """

    def __init__(
        self,
        waiting: Callable[[], Waiting | None],
        goes_on: Callable[[], bool],
        line: Callable[[], CellWaitLine | None],
        words: Callable[[Waiting, float], str],
    ) -> None:
        self._waiting = waiting
        self._goes_on = goes_on
        self._make_line = line
        self._words = words
        self._line: CellWaitLine | None = None
        self._latest: Waiting | None = None
        self._latest_s = 0.0
        self._began_s = 0.0
        self._thread: threading.Thread | None = None

    def began(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._follow, name="kiwi-held-line", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        try:
            while self._goes_on():
                self._look(time.monotonic())
                time.sleep(LOOK_S)
        finally:
            self._hide()

    def _look(self, now_s: float) -> None:
        waiting = self._waiting()
        if waiting is not self._latest:
            self._latest, self._latest_s = waiting, now_s
        if waiting is None or now_s - self._latest_s > FRESH_S:
            self._hide()
            return
        if self._line is None or self._line.closed:  # closed: its cell has ended
            self._line, self._began_s = self._make_line(), now_s
        if self._line is not None:
            waited_s = now_s - self._began_s
            self._line.say(self._words(waiting, waited_s), share_done(waiting, waited_s))

    def _hide(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def line_of_suspension(burst: Burst, line: Callable[[], CellWaitLine | None]) -> HeldLine:
    """Watch a suspended burst until it ends, also between two of its cells, because it is usually
    suspended more than once.
    """
    return HeldLine(
        lambda: burst.suspended,
        lambda: burst.granted,
        line,
        lambda waiting, _waited_s: suspended_line(waiting),
    )


def line_of_unforeseen(
    client: Callable[[], Client | None], line: Callable[[], CellWaitLine | None]
) -> HeldLine:
    """Follow the wait of a call whose cell had not requested the GPU beforehand."""

    def waiting() -> Waiting | None:
        connected = client()
        return None if connected is None else connected.unforeseen

    return HeldLine(waiting, lambda: waiting() is not None, line, unforeseen_line)
