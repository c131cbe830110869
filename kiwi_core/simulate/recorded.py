"""A daemon's journal as a trace: the same work, to be run under another policy or setting.

What was waited for is left out; what remains of each session is how long it thought between cells,
how long each cell computed, and what it held. Nothing that tells who or when: sessions are numbered
in order of appearance, times count from the first event, and neither the GPU nor the date is kept.

GPU time is the time in which a session held the lease and was not stopped, divided by how much
those beside it slowed it down (the same rule that the simulator runs them by). A cell that was
interrupted while it waited never began and is left out; one whose threads lingered counts until it
was over; one that still ran at the journal's end counts as far as it got.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Notify, PageOut, RoomDenied, RoomMade, Suspend
from kiwi_core.sched.replay import JournalHeader
from kiwi_core.simulate.model import GB
from kiwi_core.simulate.trace import Cell, Recorded, SessionTrace, Trace
from kiwi_core.units import MIB, NS_PER_MS, NS_PER_S, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.replay import JournalEntry
    from kiwi_core.units import OpId, SessionId

ROUND_NS: Final = NS_PER_MS
ROUND_BYTES: Final = MIB
"""Times and sizes are rounded to these: finer ones could be used to recognise something."""


def trace_of(
    records: Iterable[JournalHeader | JournalEntry],
    *,
    contention: float = 1.0,
    name: str = "recorded",
) -> Trace:
    """Raises ``CallerError("bad-journal")`` where there is no header or not one cell."""
    reader = _Reader(contention)
    for record in records:
        if isinstance(record, JournalHeader):
            reader.header(record)
        else:
            reader.entry(record)
    return reader.trace(name)


@dataclass(eq=False)
class _Life:
    """One session as the journal has it so far."""

    joined_ns: int
    free_since_ns: int
    """When its last cell was over, or it joined."""
    burst: int = 0
    asked_ns: int | None = None
    """Of the cell that is open; ``None``: none is."""
    begun: bool = False
    attained_ns: float = 0.0
    held_bytes: int = 0
    """By the last word, wherever the memory is."""
    out: bool = False
    moving: bool = False
    cells: list[Cell] = field(default_factory=list)
    closed: tuple[int, int] | None = None
    """Think and GPU time of the last cell, until it is known what memory it left."""

    def seen(self, resident_bytes: int) -> None:
        if not self.out and not self.moving:
            self.held_bytes = resident_bytes

    def settle(self) -> None:
        """Nothing more will be learned of the last cell."""
        if self.closed is not None:
            think_ns, gpu_ns = self.closed
            held_bytes = -(-self.held_bytes // ROUND_BYTES) * ROUND_BYTES
            self.cells.append(
                Cell(think_ns=think_ns, cpu_ns=0, gpu_ns=gpu_ns, peak_bytes=held_bytes)
            )
            self.closed = None


class _Reader:
    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._first: JournalHeader | None = None
        self._origin_s = 0.0
        """Wall time of the journal's first event."""
        self._header_s = 0.0
        self._clock_base_ns: int | None = None
        """What the entries' clock showed when the trace's began."""
        self._now_ns = 0
        self._lives: dict[SessionId, _Life] = {}
        self._over: list[_Life] = []
        self._computing: set[SessionId] = set()
        self._operations: dict[OpId, tuple[SessionId, bool]] = {}
        """Session, and whether it computed when the operation was ordered."""
        self._moves: dict[type, list[tuple[int, int]]] = {ev.PagedOut: [], ev.PagedIn: []}

    def header(self, header: JournalHeader) -> None:
        if self._first is None:
            self._first = header
            self._origin_s = header.wall_time_s
        elif header.continued:
            return  # the same clock, the same scheduler
        self._header_s = header.wall_time_s
        self._clock_base_ns = None
        self._computing.clear()
        self._operations.clear()
        for life in self._lives.values():
            life.moving = False

    def entry(self, entry: JournalEntry) -> None:
        if self._first is None:
            raise CallerError(
                "bad-journal",
                "The journal does not begin with a header.",
                "Give the whole file, from its first line.",
            )
        if self._clock_base_ns is None:
            elapsed_ns = seconds_to_ns(max(0.0, self._header_s - self._origin_s))
            self._clock_base_ns = entry.now_ns - max(elapsed_ns, self._now_ns)
        self._advance(max(self._now_ns, entry.now_ns - self._clock_base_ns))
        handler = _HANDLERS.get(type(entry.event))
        if handler is not None:
            handler(self, entry.event)
        for action in entry.actions:
            self._ordered(action)

    def trace(self, name: str) -> Trace:
        for life in self._lives.values():
            self._close(life)
        everybody = [*self._over, *self._lives.values()]
        for life in everybody:
            life.settle()
        everybody = sorted((life for life in everybody if life.cells), key=_joined)
        if self._first is None or not everybody:
            raise CallerError(
                "bad-journal",
                "Nobody used the GPU in this journal: there is nothing to simulate.",
                "Give a journal of a time with work in it, or use --mix.",
            )
        sessions = tuple(
            SessionTrace(
                id=f"s{number}", user=f"s{number}", starts_ns=_rounded(life.joined_ns),
                cells=tuple(life.cells),
            )
            for number, life in enumerate(everybody, start=1)
        )  # fmt: skip
        return Trace(
            name=name,
            total_bytes=self._first.total_bytes,
            sessions=sessions,
            recorded=Recorded(
                tq_s=self._first.tq_ns / NS_PER_S,
                anti_thrash=self._first.anti_thrash.value,
                host_budget_bytes=self._first.host_budget_bytes,
                out_gbps=_gbps(self._moves[ev.PagedOut]),
                in_gbps=_gbps(self._moves[ev.PagedIn]),
            ),
        )

    # --- time -----------------------------------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self._now_ns
        self._now_ns = now_ns
        if passed_ns and self._computing:
            speed = 1.0 / (1.0 + self._contention * (len(self._computing) - 1))
            for session in self._computing:
                self._lives[session].attained_ns += passed_ns * speed

    # --- events ---------------------------------------------------------------------------------

    def _life(self, session: SessionId) -> _Life:
        """Also of one that joined before the journal begins."""
        return self._lives.setdefault(session, _Life(self._now_ns, self._now_ns))

    def joined(self, event: ev.SessionJoined) -> None:
        life = self._life(event.session)
        life.out = event.paged_out_bytes > 0
        if event.resident_bytes or event.paged_out_bytes:
            life.held_bytes = event.resident_bytes + event.paged_out_bytes
        if event.mid_burst and life.asked_ns is None:
            self._open(life, event.burst)
            life.begun = True

    def left(self, event: ev.SessionLost | ev.SessionDetached) -> None:
        life = self._lives.pop(event.session, None)
        if life is not None:
            self._computing.discard(event.session)
            self._close(life)
            self._over.append(life)

    def requested(self, event: ev.LeaseRequested) -> None:
        life = self._life(event.session)
        if life.asked_ns is None or life.burst != event.burst:
            self._computing.discard(event.session)
            self._close(life)
            self._open(life, event.burst)

    def ended(self, event: ev.BurstEnded | ev.BurstLingered | ev.LeaseWithdrawn) -> None:
        life = self._life(event.session)
        if life.burst == event.burst:
            self._computing.discard(event.session)
            self._close(life)

    def memory(self, event: ev.MemoryObserved) -> None:
        for session, resident_bytes in event.resident_bytes.items():
            if session in self._lives:
                self._lives[session].seen(resident_bytes)

    def suspended(self, event: ev.Suspended) -> None:
        life = self._reported(event.op)
        if life is not None and event.resident_bytes is not None:
            life.seen(event.resident_bytes)

    def moved(self, event: ev.PagedOut | ev.PagedIn) -> None:
        life = self._reported(event.op)
        self._moves[type(event)].append((event.moved_bytes, event.elapsed_ns))
        if life is not None:
            life.out = isinstance(event, ev.PagedOut)
            if event.moved_bytes:
                life.held_bytes = event.moved_bytes

    def refused(self, event: ev.SuspendRefused | ev.PageOutRefused) -> None:
        session, computed = self._operations.get(event.op, (None, False))
        life = self._reported(event.op)
        if session is not None and computed and life is not None and life.asked_ns is not None:
            self._computing.add(session)

    def reported(self, event: ev.Resumed | ev.ResumeFailed | ev.PageInRefused) -> None:
        self._reported(event.op)

    def lost(self, event: ev.PageOutLost | ev.PageInLost) -> None:
        life = self._reported(event.op)
        if life is not None:
            life.out, life.held_bytes = False, 0

    def _reported(self, op: OpId) -> _Life | None:
        session, _ = self._operations.pop(op, (None, False))
        life = self._lives.get(session) if session is not None else None
        if life is not None:
            life.moving = False
        return life

    # --- cells ----------------------------------------------------------------------------------

    def _open(self, life: _Life, burst: int) -> None:
        life.settle()
        life.burst = burst
        life.asked_ns = self._now_ns
        life.begun = False
        life.attained_ns = 0.0

    def _close(self, life: _Life) -> None:
        if life.asked_ns is not None and life.begun:
            think_ns = life.asked_ns - life.free_since_ns
            life.closed = (_rounded(think_ns), _rounded(life.attained_ns))
            life.free_since_ns = self._now_ns
        life.asked_ns = None

    def _ordered(self, action: Action) -> None:
        if isinstance(action, (Notify, RoomMade, RoomDenied)):
            return
        life = self._life(action.session)
        if isinstance(action, Grant):
            if life.asked_ns is not None and life.burst == action.burst:
                life.begun = True
                self._computing.add(action.session)
            return
        life.moving = True
        computed = action.session in self._computing
        self._operations[action.op] = (action.session, computed)
        if isinstance(action, (Suspend, PageOut)):
            self._computing.discard(action.session)


_HANDLERS: Final[dict[type, Callable[..., None]]] = {
    ev.SessionJoined: _Reader.joined,
    ev.SessionLost: _Reader.left,
    ev.SessionDetached: _Reader.left,
    ev.LeaseRequested: _Reader.requested,
    ev.LeaseWithdrawn: _Reader.ended,
    ev.BurstEnded: _Reader.ended,
    ev.BurstLingered: _Reader.ended,
    ev.MemoryObserved: _Reader.memory,
    ev.Suspended: _Reader.suspended,
    ev.SuspendRefused: _Reader.refused,
    ev.PagedOut: _Reader.moved,
    ev.PageOutRefused: _Reader.refused,
    ev.PageOutLost: _Reader.lost,
    ev.PagedIn: _Reader.moved,
    ev.PageInRefused: _Reader.reported,
    ev.PageInLost: _Reader.lost,
    ev.Resumed: _Reader.reported,
    ev.ResumeFailed: _Reader.reported,
}


def _joined(life: _Life) -> int:
    return life.joined_ns


def _rounded(duration_ns: float) -> int:
    return round(duration_ns / ROUND_NS) * ROUND_NS


def _gbps(moves: list[tuple[int, int]]) -> float | None:
    """All bytes over all time: what a policy has to reckon with, fixed costs included."""
    took_ns = sum(elapsed_ns for _, elapsed_ns in moves)
    moved_bytes = sum(moved for moved, _ in moves)
    return round(moved_bytes * NS_PER_S / took_ns / GB, 2) if took_ns and moved_bytes else None
