"""Holds, waits and stops of sessions, read strictly from the entries of a journal.

A hold ends when its burst ends or when the process *is* held, not when that is ordered, so two
holds that overlap here mean that two processes were free to work at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.sched import actions as ac
from kiwi_core.sched import events as ev
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.replay import JournalEntry


@dataclass(frozen=True)
class Span:
    session: str
    from_ns: int
    to_ns: int

    @property
    def seconds(self) -> float:
        return (self.to_ns - self.from_ns) / NS_PER_S

    def overlaps(self, other: Span) -> bool:
        return self.from_ns < other.to_ns and other.from_ns < self.to_ns


@dataclass(frozen=True)
class Wait(Span):
    """A wait, from the request, or from a stop in the middle of a burst, to the grant."""

    ahead: int
    """Number of sessions that held the GPU or were in the queue when the wait began."""


@dataclass
class Ledger:
    holds: list[Span] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    """Sessions stopped in the middle of a burst, and when they were held."""
    moved: list[tuple[str, str, int]] = field(default_factory=list)
    """``session, "out" or "in", bytes``."""

    def of(self, session: str) -> list[Span]:
        return [hold for hold in self.holds if hold.session == session]

    def overlaps(self) -> list[tuple[Span, Span]]:
        """Return pairs of holds of two sessions at the same time."""
        spans = sorted(self.holds, key=lambda span: (span.from_ns, span.to_ns))
        found = []
        for index, one in enumerate(spans):
            for other in spans[index + 1 :]:
                if other.from_ns >= one.to_ns:
                    break
                if other.session != one.session and one.overlaps(other):
                    found.append((one, other))
        return found

    def stops(self, session: str) -> int:
        return sum(who == session for who, _ in self.stopped)


def read(entries: Iterable[JournalEntry]) -> Ledger:
    reader = _Reader()
    for entry in entries:
        reader.take(entry)
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self._held_since: dict[str, int] = {}
        self._waits_since: dict[str, tuple[int, int]] = {}
        self._target_by_op: dict[int, str] = {}
        self._bursts: dict[str, int] = {}
        self._now_ns = 0

    def take(self, entry: JournalEntry) -> None:
        self._now_ns = entry.now_ns
        self._event(entry.event)
        for action in entry.actions:
            self._action(action)

    def finish(self) -> Ledger:
        for session in list(self._held_since):
            self._release(session)
        return self.ledger

    def _event(self, event: ev.Event) -> None:
        if isinstance(event, ev.LeaseRequested):
            if self._bursts.get(event.session) != event.burst:  # else the session reconnected
                self._bursts[event.session] = event.burst
                self._release(event.session)
                self._waits_since.pop(event.session, None)
            self._wait(event.session)
        elif isinstance(event, (ev.BurstEnded, ev.LeaseWithdrawn, ev.SessionLost)):
            self._release(event.session)
            self._waits_since.pop(event.session, None)
        elif isinstance(event, (ev.Suspended, ev.PagedOut)):
            self._stopped(self._target_by_op.get(event.op, ""))
        if isinstance(event, (ev.PagedOut, ev.PagedIn)):
            way = "out" if isinstance(event, ev.PagedOut) else "in"
            target = self._target_by_op.get(event.op, "")
            self.ledger.moved.append((target, way, event.moved_bytes))

    def _action(self, action: ac.Action) -> None:
        session = action.session
        if isinstance(action, ac.Grant):
            since = self._waits_since.pop(session, None)
            if since is not None:
                wait = Wait(session, since[0], self._now_ns, ahead=since[1])
                self.ledger.waits.append(wait)
            self._held_since.setdefault(session, self._now_ns)
        elif isinstance(action, ac.Operation):
            self._target_by_op[action.op] = session

    def _stopped(self, session: str) -> None:
        if session in self._held_since:
            self._release(session)
            self._wait(session)
            self.ledger.stopped.append((session, self._now_ns))

    def _wait(self, session: str) -> None:
        if session not in self._held_since and session not in self._waits_since:
            ahead = len(self._waits_since) + len(self._held_since)
            self._waits_since[session] = (self._now_ns, ahead)

    def _release(self, session: str) -> None:
        since_ns = self._held_since.pop(session, None)
        if since_ns is not None:
            self.ledger.holds.append(Span(session, since_ns, self._now_ns))
