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
        """Members by user, including those that have left the queue since the last cleanup."""
        self._outside: dict[int, dict[SessionRecord, int]] = {}
        """By user, the members in order, with the client's number of the burst."""
        self._due = False
        self._word: asyncio.TimerHandle | None = None

    def request(self, member: SessionRecord, client_burst: int, *, runs: bool = False) -> None:
        """Request a place. ``runs``: it believes that it has the GPU, so it cannot wait outside."""
        outside = self._outside.get(member.uid)
        if outside is not None and member in outside:
            # The client and a call at its gate may both ask. Keep the client's number (the gate's
            # is 0): one burst serves both.
            outside[member] = client_burst or outside[member]
        elif member in self._inside.get(member.uid, ()):  # the usual case
            self._enqueue(member, client_burst)
        elif runs or self._has_place_for(member.uid):
            self._enter(member, client_burst)
        else:
            self._outside.setdefault(member.uid, {})[member] = client_burst
            self._say_soon()

    def withdraw(self, member: SessionRecord, client_burst: int | None = None) -> None:
        """Stop waiting outside (for the burst of that number, if given)."""
        outside = self._outside.get(member.uid, {})
        if member in outside and client_burst in (None, outside[member]):
            del outside[member]
            if not outside:
                del self._outside[member.uid]

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
        """Return whether a member of ``uid`` that is not inside may enter."""
        if len(self._inside.get(uid, ())) >= self._share.limit.per_user:
            self._look_through(uid)
        return self._share.may(uid)

    def _enter(self, member: SessionRecord, client_burst: int) -> None:
        inside = self._inside.setdefault(member.uid, set())
        if member not in inside:
            inside.add(member)
            self._share.take(member.uid)
        self._enqueue(member, client_burst)

    def _look_through(self, uid: int) -> None:
        inside = self._inside.get(uid, set())
        for member in [one for one in inside if not one.waiting]:
            inside.discard(member)
            self._share.give_back(uid)
        if not inside:
            self._inside.pop(uid, None)

    def _move_up(self) -> None:
        self._due = False
        for uid in tuple(self._outside):
            self._look_through(uid)
            while (outside := self._outside.get(uid)) and self._share.free(uid):
                member = next(iter(outside))
                burst = outside[member]
                self.withdraw(member)
                self._enter(member, burst)

    def _say_soon(self) -> None:
        if self._word is None:
            self._word = self._loop.call_soon(self._say)  # type: ignore[assignment]

    def _say(self) -> None:
        self._word = None
        for outside in self._outside.values():
            ahead = self._share.limit.per_user
            for place, (member, burst) in enumerate(outside.items(), start=1):
                if member.connection is not None and burst:
                    position = ahead + place
                    member.connection.send(
                        Waiting(
                            burst=burst, position=position, ahead=position - 1, activity=ACTIVITY
                        )
                    )
        if self._outside:
            self._word = self._loop.call_later(WORD_EVERY_S, self._say)
