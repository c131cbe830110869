"""How much each move moved, for those who add up what journals and events tell.

Where the driver takes what a library had left, the page-out reports all that is out by then (that
is what has to come back), so the sum would count the first page-out twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.events import PagedOut

if TYPE_CHECKING:
    from kiwi_core.sched.events import PagedIn
    from kiwi_core.units import SessionId


class MovedBytes:
    """Told of every move of every session, in order."""

    def __init__(self) -> None:
        self._out: dict[SessionId, int] = {}
        """Of those that are out."""

    def of(self, session: SessionId, event: PagedOut | PagedIn) -> int:
        """What this one moved."""
        before_bytes = self._out.pop(session, 0)
        if not isinstance(event, PagedOut):
            return event.moved_bytes
        self._out[session] = max(before_bytes, event.moved_bytes)
        return max(0, event.moved_bytes - before_bytes)

    def forget(self, session: SessionId) -> None:
        """It is gone."""
        self._out.pop(session, None)
