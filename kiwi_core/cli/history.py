"""The history of holders, waits and moves, worked out while a journal is replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from kiwi_core.sched.actions import BringResidueBack, PageIn, PageOut
from kiwi_core.sched.events import PagedIn as PagedInEvent
from kiwi_core.sched.events import PagedOut as PagedOutEvent
from kiwi_core.sched.events import ResidueBack
from kiwi_core.sched.model.happenings import StretchEnded
from kiwi_core.sched.replay import MovedBytes
from kiwi_core.states import HistoryKind
from kiwi_core.units import SessionId, ns_to_seconds

if TYPE_CHECKING:
    from kiwi_core.sched.replay import JournalEntry, JournalHeader
    from kiwi_core.sched.scheduler import Scheduler

_TURNS: Final = (HistoryKind.HELD, HistoryKind.WAITED, HistoryKind.SUSPENDED)


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
    moves: list[Move] = field(default_factory=list)


class Historian:
    """Builds a ``HistoryRun``. It gets each entry after ``scheduler`` has had it. The scheduler
    gets no entry if the beginning of the journal is missing. ``finish`` closes spans.
    """

    def __init__(self, header: JournalHeader, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.run = HistoryRun(
            gpu_uuid=header.gpu_uuid,
            began_at_unix_s=header.wall_time_s,
            checked=not header.continued,
        )
        self._start_ns: int | None = None
        self._now_ns = 0
        self._operations: dict[int, str] = {}
        self._moved_bytes = MovedBytes()

    def feed(self, entry: JournalEntry) -> None:
        if self._start_ns is None:
            self._start_ns = entry.now_ns
        self._now_ns = entry.now_ns
        self.run.events += 1
        self._note_operations(entry)
        for one in self._scheduler.happenings:
            if isinstance(one, StretchEnded) and one.ended_ns > one.began_ns:
                self._span(one.kind, one.session, one.began_ns)

    def finish(self, differences: int) -> HistoryRun:
        for one in self._scheduler.history(0, self._now_ns):
            if one.ended_ns is None and one.kind in _TURNS:
                self._span(one.kind, one.session, one.began_ns)
        self.run.differences = differences
        self.run.seconds = self._seconds(self._now_ns)
        return self.run

    def _seconds(self, at_ns: int) -> float:
        return ns_to_seconds(at_ns - (self._start_ns or 0))

    def _span(self, kind: HistoryKind, session: str, began_ns: int) -> None:
        """Add a span that ends now."""
        spans = self.run.held if kind is HistoryKind.HELD else self.run.waited
        began_s, now_s = self._seconds(began_ns), self._seconds(self._now_ns)
        spans.append(HistorySpan(session=session, from_s=began_s, to_s=now_s))

    def _note_operations(self, entry: JournalEntry) -> None:
        for action in entry.actions:
            if isinstance(action, (PageOut, PageIn, BringResidueBack)):
                self._operations[action.op] = action.session
        event = entry.event
        if isinstance(event, ResidueBack):
            self._moved_bytes.of(SessionId(self._operations.pop(event.op, "?")), event)
        elif isinstance(event, (PagedOutEvent, PagedInEvent)):
            session = self._operations.pop(event.op, "?")
            self.run.moves.append(
                Move(
                    session=session,
                    direction="out" if isinstance(event, PagedOutEvent) else "in",
                    bytes_moved=self._moved_bytes.of(SessionId(session), event),
                    seconds=ns_to_seconds(event.elapsed_ns),
                    at_s=self._seconds(self._now_ns),
                )
            )
