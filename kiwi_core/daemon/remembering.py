"""When the roster is written: before anything moves, and soon after anything else changed."""

from __future__ import annotations

import asyncio
from concurrent.futures import TimeoutError as NotYet  # not the built-in one before Python 3.11
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.daemon.roster import Roster, RosterFile
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target

log = structlog.get_logger(__name__)

WITHIN_S = 5.0
"""An operation goes on even if the roster cannot be written for so long: the loop is stuck."""

DELAY_S = 0.05
"""Grants and ends reach the roster this much later; operations always find it up to date."""


class Remembering:
    """``gather`` (asked in the loop) says how things are. All but ``before_a_move`` is called in
    the loop."""

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

    def before_a_move(self, _target: Target, _footprints: Mapping[ProcessRef, int]) -> None:
        """From an operation's thread, before anything moves: the sizes must be on disk."""
        written = asyncio.run_coroutine_threadsafe(self._write_down(), self._loop)
        try:
            written.result(WITHIN_S)
        except NotYet:
            log.error("the loop did not write the roster in time")

    async def _write_down(self) -> None:
        self.save()
