"""When the roster is written: before anything moves, and soon after anything else changed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.roster import Roster, RosterFile

DELAY_S = 0.05
"""Grants and ends reach the roster this much later; operations always find it up to date."""


class Remembering:
    """``gather`` says how things are."""

    def __init__(self, file: RosterFile, gather: Callable[[], Roster]) -> None:
        self._file = file
        self._gather = gather
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None

    @property
    def failing(self) -> bool:
        return self._file.failing

    def save(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._file.write(self._gather())

    def save_anew(self) -> None:
        """The file may be gone, so write it even if nothing has changed."""
        self._file.forget()
        self.save()

    def save_soon(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(DELAY_S, self.save)
