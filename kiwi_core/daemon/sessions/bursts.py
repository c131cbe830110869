"""The bursts of sessions: their places in the queue for the GPU, their numbers, and their ends.

Each user has a share of the places in the queue, so a client waits for at most that many bursts of
another user. (Suspended bursts queue again and take no place, so these may come in addition.) A
burst beyond its user's share waits outside the queue, in order, and gets the next place that the
user's own bursts leave. It loses nothing: those bursts would be ahead of it anyway.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.wire.messages import Waiting

if TYPE_CHECKING:
    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRecord
    from kiwi_core.wire.messages import Hello

WORD_EVERY_S: Final = 1.0
"""Interval of reports to those outside, as in the queue: a silent daemon would seem to hang."""

ACTIVITY: Final = "your other notebooks are ahead"


@dataclass(eq=False, repr=False)
class Bursts:
    """A subscriber (``steps``). ``places`` counts the places in the queue."""

    _core: Core
    _places: Share
    _inside: dict[int, set[SessionRecord]] = field(default_factory=dict)
    """Sessions by user, including those that have left the queue since the last cleanup."""
    _outside: dict[int, dict[SessionRecord, int]] = field(default_factory=dict)
    """Sessions by user, in order, with the client's number of the burst."""
    _moves_up: bool = False
    """True while those outside are about to move up."""
    _word: asyncio.TimerHandle | asyncio.Handle | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    # --- beginning ------------------------------------------------------------------------------

    def request(self, record: SessionRecord, client_burst: int, *, runs: bool = False) -> None:
        """Request the lease; ``client_burst`` is 0 for a call at a gate. ``runs``: the program
        believes that it has the GPU, so it cannot wait outside the queue."""
        uid, outside = record.uid, self._outside.get(record.uid, {})
        if record in outside:
            # The client and a call at its gate may both ask. Keep the client's number (the gate's
            # is 0): one burst serves both.
            outside[record] = client_burst or outside[record]
            return
        if not runs and record not in self._inside.get(uid, ()):
            if len(self._inside.get(uid, ())) >= self._places.limit.per_user:
                self._look_through(uid)
            if not self._places.may(uid):
                self._outside.setdefault(uid, {})[record] = client_burst
                if self._word is None:
                    self._word = self._loop.call_soon(self._say)
                return
        self._enter(record, client_burst)

    def _enter(self, record: SessionRecord, client_burst: int) -> None:
        """Put a burst into the queue. It gets a new number, unless the client repeats its request
        for the burst that waits or runs."""
        inside = self._inside.setdefault(record.uid, set())
        if record not in inside:
            inside.add(record)
            self._places.take(record.uid)
        known = self._core.scheduler.session(record.id)
        burst = known.burst if known is not None else 0
        wanted = known is not None and (known.waits or self._core.in_burst(record))
        if not wanted or client_burst != record.client_burst:
            burst, record.client_burst = burst + 1, client_burst
        self._core.feed(ev.LeaseRequested(session=record.id, burst=burst))

    def resume(self, record: SessionRecord, hello: Hello) -> None:
        """Restore the burst that a reconnected client is in: a restarted daemon may know it from
        its roster (it stays), or has to line it up again."""
        in_burst = self._core.in_burst(record) and not record.own_burst
        if hello.in_burst and not in_burst:
            # One that was granted here is at rest: what the cell left behind is idle, or its memory
            # is lost. Whoever is told nothing new asks for nothing.
            if hello.burst != record.granted_burst:
                self.request(record, hello.burst, runs=True)
        elif in_burst and not hello.in_burst and record.client_burst <= hello.burst:
            self._core.end_burst(record)  # it ended while there was no connection

    # --- ending ---------------------------------------------------------------------------------

    def end(self, record: SessionRecord, client_burst: int, *, lingering: bool) -> None:
        """End the client's burst. ``lingering``: something that it has started goes on."""
        self.drop(record, client_burst)
        known = self._core.scheduler.session(record.id)
        if known is None or record.client_burst != client_burst:
            return  # the burst in progress, if any, is the daemon's, made for a call at the gate
        if lingering:
            self._core.feed(ev.BurstLingered(session=record.id, burst=known.burst))
        else:
            self._core.end_burst(record)

    def withdraw(self, record: SessionRecord, client_burst: int) -> None:
        """Take back the client's request, or end the burst that it has led to."""
        self.drop(record, client_burst)
        # Another burst in progress is not the client's, as in ``end``.
        if record.client_burst == client_burst:
            self._withdraw(record)

    def withdraw_own(self, record: SessionRecord) -> None:
        """Take back what only a call at the gate has asked for: a place, the lease, or its next
        turn."""
        self.drop(record, 0)
        if record.own_burst and self._waits(record):
            self._withdraw(record)
        elif record.own_burst and self._core.in_burst(record):
            self._core.end_burst(record)

    def client_lost(self, record: SessionRecord) -> None:
        """Take back what the client waits for: its connection has ended."""
        self.drop(record)
        if self._waits(record) and not record.own_burst:
            self._withdraw(record)

    def drop(self, record: SessionRecord, client_burst: int | None = None) -> None:
        """Stop waiting outside the queue (for the burst of that number, if given)."""
        outside = self._outside.get(record.uid, {})
        if record in outside and client_burst in (None, outside[record]):
            del outside[record]
            if not outside:
                del self._outside[record.uid]

    def left(self, record: SessionRecord) -> None:
        """Forget a session that is gone. Its process may be a session again, with the same id."""
        self.drop(record)
        if record in (inside := self._inside.get(record.uid, set())):
            inside.discard(record)
            self._places.give_back(record.uid)

    def _withdraw(self, record: SessionRecord) -> None:
        if (known := self._core.scheduler.session(record.id)) is not None:
            self._core.feed(ev.LeaseWithdrawn(session=record.id, burst=known.burst))

    def _waits(self, record: SessionRecord) -> bool:
        known = self._core.scheduler.session(record.id)
        return known is not None and known.waits

    # --- places ---------------------------------------------------------------------------------

    def after(self, _step: Step) -> None:
        """Let those outside move up, once the present event has been handled."""
        if not self._outside or self._moves_up:
            return

        def move_up() -> None:
            self._moves_up = False
            for uid in tuple(self._outside):
                self._look_through(uid)
                while (outside := self._outside.get(uid)) and self._places.free(uid):
                    record, client_burst = next(iter(outside.items()))
                    self.drop(record)
                    self._enter(record, client_burst)

        self._moves_up = True
        self._loop.call_soon(move_up)

    def recount(self) -> None:
        """Clean up all places, so that their number is exact."""
        for uid in tuple(self._inside):
            self._look_through(uid)

    def _look_through(self, uid: int) -> None:
        inside = self._inside.get(uid, set())
        for record in [one for one in inside if not self._waits(one)]:
            inside.discard(record)
            self._places.give_back(uid)
        if not inside:
            self._inside.pop(uid, None)

    def _say(self) -> None:
        """Tell the clients outside their positions, again and again."""
        for outside in self._outside.values():
            for position, (record, burst) in enumerate(
                outside.items(), start=self._places.limit.per_user + 1
            ):
                if record.connection is not None and burst:
                    word = Waiting(
                        burst=burst, position=position, ahead=position - 1, activity=ACTIVITY
                    )
                    record.connection.send(word)
        self._word = self._loop.call_later(WORD_EVERY_S, self._say) if self._outside else None
