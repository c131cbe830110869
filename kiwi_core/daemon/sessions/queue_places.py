"""Places in the queue for the GPU, shared among users.

Each user has a share of the places, so a client waits for at most that many bursts of another user.
(Suspended bursts queue again and take no place, so these may come in addition.) A burst beyond its
user's share waits outside the queue, in order, and gets the next place that the user's own bursts
leave. It loses nothing: those bursts would be ahead of it anyway.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kiwi_core.wire.messages import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.roster.registry import SessionRecord

WORD_EVERY_S: Final = 1.0
"""Interval of reports to those outside, as in the queue: a silent daemon would seem to hang."""

ACTIVITY: Final = "your other notebooks are ahead"


class QueuePlaces:
    """The places of all users. ``enqueue`` puts the burst with that number into the queue.
    ``move_up_soon`` is called after each event."""

    def __init__(self, share: Share, enqueue: Callable[[SessionRecord, int], None]) -> None:
        self._share = share
        self._enqueue = enqueue
        self._loop = asyncio.get_running_loop()
        self._inside: dict[int, set[SessionRecord]] = {}
        """Records by user, including those that have left the queue since the last cleanup."""
        self._outside: dict[int, dict[SessionRecord, int]] = {}
        """Records by user, in order, with the client's number of the burst."""
        self._due = False
        self._word: asyncio.TimerHandle | None = None

    def request(self, record: SessionRecord, client_burst: int, *, runs: bool = False) -> None:
        """Request a place. ``runs``: it believes that it has the GPU, so it cannot wait outside."""
        outside = self._outside.get(record.uid)
        if outside is not None and record in outside:
            # The client and a call at its gate may both ask. Keep the client's number (the gate's
            # is 0): one burst serves both.
            outside[record] = client_burst or outside[record]
        elif record in self._inside.get(record.uid, ()):  # the usual case
            self._enqueue(record, client_burst)
        elif runs or self._has_place_for(record.uid):
            self._enter(record, client_burst)
        else:
            self._outside.setdefault(record.uid, {})[record] = client_burst
            self._say_soon()

    def withdraw(self, record: SessionRecord, client_burst: int | None = None) -> None:
        """Stop waiting outside (for the burst of that number, if given)."""
        outside = self._outside.get(record.uid, {})
        if record in outside and client_burst in (None, outside[record]):
            del outside[record]
            if not outside:
                del self._outside[record.uid]

    def move_up_soon(self) -> None:
        if self._outside and not self._due:
            self._due = True
            self._loop.call_soon(self._move_up)

    def recount(self) -> None:
        """Clean up all places, so that their number is exact."""
        for uid in tuple(self._inside):
            self._look_through(uid)

    # --- inside ---------------------------------------------------------------------------------

    def _has_place_for(self, uid: int) -> bool:
        """Return whether a session of ``uid`` that is not inside may enter."""
        if len(self._inside.get(uid, ())) >= self._share.limit.per_user:
            self._look_through(uid)
        return self._share.may(uid)

    def _enter(self, record: SessionRecord, client_burst: int) -> None:
        inside = self._inside.setdefault(record.uid, set())
        if record not in inside:
            inside.add(record)
            self._share.take(record.uid)
        self._enqueue(record, client_burst)

    def _look_through(self, uid: int) -> None:
        inside = self._inside.get(uid, set())
        for record in [one for one in inside if not one.waiting]:
            inside.discard(record)
            self._share.give_back(uid)
        if not inside:
            self._inside.pop(uid, None)

    def _move_up(self) -> None:
        self._due = False
        for uid in tuple(self._outside):
            self._look_through(uid)
            while (outside := self._outside.get(uid)) and self._share.free(uid):
                record = next(iter(outside))
                burst = outside[record]
                self.withdraw(record)
                self._enter(record, burst)

    def _say_soon(self) -> None:
        if self._word is None:
            self._word = self._loop.call_soon(self._say)  # type: ignore[assignment]

    def _say(self) -> None:
        self._word = None
        for outside in self._outside.values():
            ahead = self._share.limit.per_user
            for place, (record, burst) in enumerate(outside.items(), start=1):
                if record.connection is not None and burst:
                    position = ahead + place
                    record.connection.send(
                        Waiting(
                            burst=burst, position=position, ahead=position - 1, activity=ACTIVITY
                        )
                    )
        if self._outside:
            self._word = self._loop.call_later(WORD_EVERY_S, self._say)
