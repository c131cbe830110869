"""What Kiwi tells the user of a kernel: sentences, each once, and notices of the daemon."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.words import SHOWN_NOTICES, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.wire.messages import UserNotice

NOTICES_MAX: Final = 32


class Notices:
    """``say`` shows one line to the user. Any thread may call the methods."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.kept: deque[UserNotice] = deque(maxlen=NOTICES_MAX)
        """The last ones, for ``%kiwi status``."""
        self._said: set[str] = set()
        self._unshown: deque[UserNotice] = deque(maxlen=NOTICES_MAX)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def keep(self, notice: UserNotice, *, show: bool) -> None:
        """Keep a notice for a cell to show, or ``show`` it at once."""
        self.kept.append(notice)
        if notice.notice in SHOWN_NOTICES:
            self._unshown.append(notice)
            if show:
                self.show()

    def show(self) -> None:
        """Print the notices into the output of this thread's cell, or of the last cell."""
        with suppress(IndexError):  # two threads may do this at once
            while True:
                self.say(told(self._unshown.popleft()))
