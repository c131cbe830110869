"""The history of holders, waits and moves, worked out while a journal is replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from kiwi_core.sched.actions import EndSession, PageIn, PageOut
from kiwi_core.sched.events import DeadlinePassed, HostBudgetObserved, MemoryObserved
from kiwi_core.sched.events import PagedIn as PagedInEvent
from kiwi_core.sched.events import PagedOut as PagedOutEvent
from kiwi_core.sched.replay import MovedBytes
from kiwi_core.units import SessionId, ns_to_seconds

if TYPE_CHECKING:
    from kiwi_core.sched.replay import JournalEntry, JournalHeader
    from kiwi_core.sched.scheduler import Scheduler

_LOOKS = (MemoryObserved, DeadlinePassed, HostBudgetObserved)
"""Events that change no holder unless they cause an action, or a cell has left something behind."""


class HistorySpan(Struct, frozen=True, kw_only=True):
    """A time span in seconds since the journal's first event. ``to_s`` is the time of the last
    event if the span was still open at the end."""

    session: str
    from_s: float
    to_s: float


class Move(Struct, frozen=True, kw_only=True):
    session: str
    direction: str
    bytes_moved: int
    seconds: float
    at_s: float


class HistoryEnd(Struct, frozen=True, kw_only=True):
    """A program that the scheduler had ended, and why."""

    session: str
    at_s: float
    cause: str


class HistoryRun(Struct, kw_only=True):
    """One daemon's run, as far as its journal records it."""

    gpu_uuid: str
    began_at_unix_s: float
    events: int = 0
    seconds: float = 0.0
    checked: bool = True
    """False if the journal's beginning is missing: then only ``moves`` are known, and no decision
    was checked."""
    differences: int = 0
    held: list[HistorySpan] = field(default_factory=list)
    waited: list[HistorySpan] = field(default_factory=list)
    ended: list[HistoryEnd] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


class Historian:
    """Builds a ``HistoryRun``. It gets each entry after the scheduler; ``finish`` closes spans."""

    def __init__(self, header: JournalHeader) -> None:
        self.run = HistoryRun(
            gpu_uuid=header.gpu_uuid,
            began_at_unix_s=header.wall_time_s,
            checked=not header.continued,
        )
        self._start_ns: int | None = None
        self._now_s = 0.0
        self._holding: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._operations: dict[int, str] = {}
        self._moved_bytes = MovedBytes()
        self._lingering = False

    def feed(self, entry: JournalEntry, scheduler: Scheduler) -> None:
        if self._start_ns is None:
            self._start_ns = entry.now_ns
        self._now_s = ns_to_seconds(entry.now_ns - self._start_ns)
        self.run.events += 1
        self._note_operations(entry)
        if entry.actions or self._lingering or not isinstance(entry.event, _LOOKS):
            view = scheduler.view(entry.now_ns)
            self._lingering = any(session.lingering for session in view.sessions)
            self._follow(self._holding, set(view.holders), self.run.held)
            self._follow(self._waiting, {one.session for one in view.queue}, self.run.waited)

    def finish(self, differences: int) -> HistoryRun:
        self._follow(self._holding, set(), self.run.held)
        self._follow(self._waiting, set(), self.run.waited)
        self.run.differences = differences
        self.run.seconds = self._now_s
        return self.run

    def _note_operations(self, entry: JournalEntry) -> None:
        for action in entry.actions:
            if isinstance(action, (PageOut, PageIn)):
                self._operations[action.op] = action.session
            elif isinstance(action, EndSession):
                end = HistoryEnd(session=action.session, at_s=self._now_s, cause=action.cause)
                self.run.ended.append(end)
        event = entry.event
        if isinstance(event, (PagedOutEvent, PagedInEvent)):
            session = self._operations.pop(event.op, "?")
            self.run.moves.append(
                Move(
                    session=session,
                    direction="out" if isinstance(event, PagedOutEvent) else "in",
                    bytes_moved=self._moved_bytes.of(SessionId(session), event),
                    seconds=ns_to_seconds(event.elapsed_ns),
                    at_s=self._now_s,
                )
            )

    def _follow(self, begun: dict[str, float], now: set[str], spans: list[HistorySpan]) -> None:
        spans.extend(
            HistorySpan(session=session, from_s=begun.pop(session), to_s=self._now_s)
            for session in sorted(begun.keys() - now)
        )
        for session in sorted(now - begun.keys()):
            begun[session] = self._now_s
