"""Turns a daemon's journal into a trace: the same work, to run under another policy or setting.

The trace omits the waits. Of each session it keeps the think times between cells, how long each
cell computed, and the memory held. It does not show who worked or when: sessions are numbered in
order of appearance, times count from the first event, and neither the GPU nor the date is kept.
The real waits are returned apart from the trace, as the measures of a simulation.

GPU time is the time in which a session held the lease and was not stopped, divided by the slowdown
by the sessions beside it (by the simulator's own rule). A cell that was interrupted while it waited
never began and is omitted; a cell whose threads lingered counts until its own end; a cell that
still ran at the end of the journal counts as far as it got.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import (
    Grant,
    Notify,
    PageOut,
    RoomDenied,
    RoomMade,
    Suspend,
)
from kiwi_core.sched.replay import JournalHeader, MovedBytes
from kiwi_core.simulate.lives import Done, Life, as_trace, fill_measures, joined_ns, rounded_ns
from kiwi_core.simulate.measure import Measures
from kiwi_core.units import seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.replay import JournalEntry
    from kiwi_core.simulate.trace import Trace
    from kiwi_core.units import OpId, SessionId


def read(
    records: Iterable[JournalHeader | JournalEntry],
    *,
    contention: float = 1.0,
    name: str = "recorded",
    since_unix_s: float = 0.0,
) -> tuple[Trace, Measures]:
    """Return the trace and the real measures of the cells requested at ``since_unix_s`` or later.
    Raise ``CallerError("bad-journal")`` if there is no header or no cell."""
    reader = _Reader(contention, since_unix_s)
    for record in records:
        if isinstance(record, JournalHeader):
            reader.header(record)
        else:
            reader.entry(record)
    return reader.result(name)


class _Reader:
    def __init__(self, contention: float, since_unix_s: float) -> None:
        self._contention = contention
        self._since_unix_s = since_unix_s
        self._since_ns = 0
        self._first: JournalHeader | None = None
        self._origin_s = 0.0
        """Wall time of the journal's first event."""
        self._header_s = 0.0
        self._clock_base_ns: int | None = None
        """Reading of the entries' clock when the trace's clock began."""
        self._now_ns = 0
        self._lives: dict[SessionId, Life] = {}
        self._over: list[Life] = []
        self._computing: set[SessionId] = set()
        self._operations: dict[OpId, tuple[SessionId, bool]] = {}
        """The session, and whether it computed when the operation was ordered."""
        self._moved_bytes = MovedBytes()
        self._moves: dict[type, list[tuple[int, int]]] = {ev.PagedOut: [], ev.PagedIn: []}
        self._measures = Measures([])
        self._policy = ""
        """The policy in force now."""
        self._in_force_ns: Counter[str] = Counter()
        """How long each policy was in force since ``since_unix_s``."""

    def header(self, header: JournalHeader) -> None:
        if self._first is None:
            self._first = header
            self._origin_s = header.wall_time_s
            self._since_ns = seconds_to_ns(max(0.0, self._since_unix_s - self._origin_s))
        elif header.continued:
            return  # the same clock, the same scheduler
        self._header_s = header.wall_time_s
        self._policy = header.policy
        self._clock_base_ns = None
        self._computing.clear()
        self._operations.clear()
        self._moved_bytes = MovedBytes()
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

    def result(self, name: str) -> tuple[Trace, Measures]:
        for life in self._lives.values():
            self._close(life)
        everybody = sorted([*self._over, *self._lives.values()], key=joined_ns)
        for life in everybody:
            life.add_last_cell()
            life.cells = [cell for cell in life.cells if cell.asked_ns >= self._since_ns]
        everybody = [life for life in everybody if life.cells]
        if self._first is None or not everybody:
            since = " since then" if self._since_ns else ""
            raise CallerError(
                "bad-journal",
                f"Nobody used the GPU in this journal{since}: there is nothing to simulate.",
                "Give a journal of a time with work in it, or use --mix.",
            )
        policy = max(self._in_force_ns, key=self._in_force_ns.__getitem__, default=self._policy)
        trace = as_trace(name, self._first, policy, everybody, self._since_ns, self._moves)
        fill_measures(self._measures, everybody, self._since_ns)
        return trace, self._measures

    # --- time -----------------------------------------------------------------------------------

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self._now_ns
        self._in_force_ns[self._policy] += max(0, now_ns - max(self._now_ns, self._since_ns))
        self._now_ns = now_ns
        if passed_ns and self._computing:
            speed = 1.0 / (1.0 + self._contention * (len(self._computing) - 1))
            for session in self._computing:
                self._lives[session].attained_ns += passed_ns * speed

    # --- events ---------------------------------------------------------------------------------

    def _life(self, session: SessionId) -> Life:
        """Return the life of ``session``; a new one if it joined before the journal begins."""
        return self._lives.setdefault(session, Life(self._now_ns, self._now_ns))

    def joined(self, event: ev.SessionJoined) -> None:
        life = self._life(event.session)
        life.out = event.paged_out_bytes > 0
        if event.resident_bytes or event.paged_out_bytes:
            life.held_bytes = event.resident_bytes + event.paged_out_bytes
        if event.mid_burst and life.asked_ns is None:
            self._open(life, event.burst)
            life.granted_ns = self._now_ns

    def left(self, event: ev.SessionLost | ev.SessionDetached) -> None:
        life = self._lives.pop(event.session, None)
        if life is not None:
            self._computing.discard(event.session)
            self._close(life)
            life.left_ns = self._now_ns
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
        self._stopped(event.op)
        life = self._reported(event.op)
        if life is not None and event.resident_bytes is not None:
            life.seen(event.resident_bytes)

    def moved(self, event: ev.PagedOut | ev.PagedIn) -> None:
        if isinstance(event, ev.PagedOut):
            self._stopped(event.op)
        session, _ = self._operations.get(event.op, (None, False))
        life = self._reported(event.op)
        moved_bytes = event.moved_bytes
        if session is not None:
            moved_bytes = self._moved_bytes.of(session, event)
        self._moves[type(event)].append((moved_bytes, event.elapsed_ns))
        if self._now_ns >= self._since_ns and moved_bytes:
            self._measures.moved(moved_bytes, event.elapsed_ns)
        if life is not None:
            life.moved(event)

    def _stopped(self, op: OpId) -> None:
        _, computed = self._operations.get(op, (None, False))
        self._measures.suspensions += computed and self._now_ns >= self._since_ns

    def refused(self, event: ev.SuspendRefused | ev.PageOutRefused) -> None:
        self._measures.operations["refused"] += self._now_ns >= self._since_ns
        session, computed = self._operations.get(event.op, (None, False))
        life = self._reported(event.op)
        if session is not None and computed and life is not None and life.asked_ns is not None:
            self._computing.add(session)

    def residue_back(self, event: ev.ResidueBack) -> None:
        session, _ = self._operations.get(event.op, (None, False))
        if session is not None:
            self._moved_bytes.of(session, event)
        self._reported(event.op)

    def reported(self, event: ev.Outcome) -> None:
        self._reported(event.op)

    def lost(self, event: ev.PageOutLost | ev.PageInLost) -> None:
        life = self._reported(event.op)
        if life is not None:
            life.out, life.held_bytes = False, 0

    def _reported(self, op: OpId) -> Life | None:
        session, _ = self._operations.pop(op, (None, False))
        life = self._lives.get(session) if session is not None else None
        if life is not None:
            life.moving = False
        return life

    def settings(self, event: ev.SettingsChanged) -> None:
        self._policy = event.policy or self._policy

    # --- cells ----------------------------------------------------------------------------------

    def _open(self, life: Life, burst: int) -> None:
        life.add_last_cell()
        life.burst = burst
        life.asked_ns = self._now_ns
        life.granted_ns = None
        life.attained_ns = 0.0

    def _close(self, life: Life) -> None:
        if life.asked_ns is not None and life.granted_ns is not None:
            life.closed = Done(
                free_ns=life.free_since_ns,
                asked_ns=life.asked_ns,
                granted_ns=life.granted_ns,
                ended_ns=self._now_ns,
                gpu_ns=rounded_ns(life.attained_ns),
            )
            life.free_since_ns = self._now_ns
        life.asked_ns = None

    def _ordered(self, action: Action) -> None:
        if isinstance(action, (Notify, RoomMade, RoomDenied)):
            return
        life = self._life(action.session)
        if isinstance(action, Grant):
            if life.asked_ns is not None and life.burst == action.burst:
                if life.granted_ns is None:
                    life.granted_ns = self._now_ns
                self._computing.add(action.session)
            return
        life.moving = True
        computed = action.session in self._computing
        self._operations[action.op] = (action.session, computed)
        if isinstance(action, (Suspend, PageOut)):
            self._computing.discard(action.session)


_HANDLERS: Final[dict[type, Callable[..., None]]] = {
    ev.SettingsChanged: _Reader.settings,
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
    ev.ResidueBack: _Reader.residue_back,
    ev.ResidueRefused: _Reader.reported,
    ev.Resumed: _Reader.reported,
    ev.ResumeFailed: _Reader.reported,
}
