"""The view of one GPU's scheduler that users see, made by ``Scheduler.view``.

The daemon fills the wire's ``GpuStatus`` from it, by the names of the fields. Times are durations
in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import tenancy
from kiwi_core.states import AntiThrash, HistoryKind, Residency, SessionState
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kiwi_core.sched.forecast.shown_forecast import Forecast, ShownForecast
    from kiwi_core.sched.model.happenings import MoveEnded
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.states import Direction, Notice
    from kiwi_core.units import SessionId

_WHILE = {Doing.PAGING_OUT: SessionState.PAGING_OUT, Doing.PAGING_IN: SessionState.PAGING_IN}
_STRETCHES = {
    HistoryKind.HELD: SessionState.RUNNING,
    HistoryKind.WAITED: SessionState.WAITING,
    HistoryKind.SUSPENDED: SessionState.SUSPENDED,
}
_ACTIVITY = {
    Doing.SUSPENDING: "being suspended",
    Doing.RESUMING: "being resumed",
    Doing.PAGING_OUT: "its memory is paging out to make room",
    Doing.PAGING_IN: "its memory is paging in",
    Doing.RESIDUE_IN: "its contexts are paging in",
}


@dataclass(frozen=True)
class SessionView:
    """What follows from the record of a session at the time of the view. Facts that users see as
    they are have no field here: read them in the record."""

    record: Session
    """The scheduler's own. It is no copy: read it before the next event."""
    state: SessionState
    held_ns: int
    """How long it has held the lease until now, all bursts together."""
    waited_ns: int
    """How long it has waited for the lease until now, all bursts together."""
    peak_bytes: int | None
    """The most GPU memory it held in its last bursts; ``None`` while its needs are unknown."""
    time_left_ns: int | None
    """The longest time until it makes way for the first waiter (without one, until its quantum
    ends); ``None`` unless it holds the lease and can be suspended. 0: it runs until another
    asks."""
    keeps_ns: int | None
    """How long at most it keeps its place from a waiter in case its next cell comes; ``None``: it
    keeps none, or nobody needs it."""
    detail: str
    """More about its problem."""

    @property
    def id(self) -> SessionId:
        return self.record.id


@dataclass(frozen=True)
class QueueView:
    session: SessionId
    position: int
    """Place in the queue; 1 is next."""
    expected_wait_ns: int | None
    """``None`` where the wait cannot be estimated (blocked, or a driver call hangs), and in a view
    made without a forecast."""
    expected_low_ns: int | None
    """The wait is likely between this and ``expected_high_ns``. All three are equal where one
    figure is exact enough; ``None`` where ``expected_wait_ns`` is."""
    expected_high_ns: int | None
    expected_why: str
    """Why the forecast is longer than the one shown before; mostly ""."""
    waited_ns: int
    activity: str
    """The operation in progress on the session, in words; "" while it waits for its turn."""
    blocked: Notice | None
    detail: str
    kept_out: str
    """The user who keeps it out of the GPU, or "". Such sessions follow those that wait."""


@dataclass(frozen=True)
class SwapView:
    session: SessionId
    direction: Direction
    bytes_moved: int
    elapsed_ns: int
    at_ns: int
    """When the move ended, on the clock of ``now_ns``."""


@dataclass(frozen=True)
class GpuView:
    total_bytes: int
    free_bytes: int
    """As recorded: the total less the memory of sessions and of programs outside; at least 0."""
    outside_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    tq_ns: int
    anti_thrash: AntiThrash
    policy: str
    serialised: bool
    why: str
    """Why the scheduler serialises, or does not, in plain words."""
    swap_round_trip_ns: int | None
    """Time to page the largest session out and in, as measured; ``None`` before any swap."""
    floor_ns: int
    """How long the largest session runs before it may be suspended; smaller ones may be sooner."""
    holders: tuple[SessionId, ...]
    queue: tuple[QueueView, ...]
    sessions: tuple[SessionView, ...]
    foretold: int
    """Number of recent waits (at most 100) whose first forecast is known; in ``foretold_well`` of
    them the forecast was right within two seconds or a quarter of the wait."""
    foretold_well: int
    swaps: tuple[SwapView, ...]
    """The last swaps, oldest first; bounded."""
    ignored_events: int
    """Number of dropped events: of unknown sessions, stale bursts or unknown operations."""

    def session(self, session: SessionId) -> SessionView | None:
        return next((view for view in self.sessions if view.id == session), None)

    def queued(self, session: SessionId) -> QueueView | None:
        return next((entry for entry in self.queue if entry.session == session), None)


def snapshot(
    st: State, now_ns: int, forecast: Forecast, told: Mapping[SessionId, ShownForecast]
) -> GpuView:
    """Return the view. ``told`` has the forecasts of the waiters."""
    present = [session for session in st.sessions.values() if not session.gone]
    free_bytes = st.total_bytes - st.outside_bytes
    free_bytes -= sum(session.resident_bytes for session in st.sessions.values())
    round_trip_ns = None
    if st.speed.known:
        round_trip_ns = st.speed.round_trip_ns(max((s.footprint_bytes for s in present), default=0))
    floor_ns = round(st.turn_settings.swap_floor_factor * (round_trip_ns or 0))
    return GpuView(
        total_bytes=st.total_bytes,
        free_bytes=max(0, free_bytes),
        outside_bytes=st.outside_bytes,
        paged_out_bytes=sum(session.paged_out_bytes for session in st.sessions.values()),
        host_budget_bytes=st.host_budget_bytes,
        tq_ns=st.turn_settings.tq_ns,
        anti_thrash=st.anti_thrash,
        policy=st.policy.name,
        serialised=st.serialised,
        why=_why(st),
        swap_round_trip_ns=round_trip_ns,
        floor_ns=max(floor_ns, st.turn_settings.least_ns),
        holders=shown_holders(st),
        queue=shown_queue(st, told, now_ns),
        foretold=len(forecast.kept),
        foretold_well=forecast.right,
        sessions=tuple(_session(st, session, now_ns) for session in present),
        swaps=tuple(map(_swap, st.history.swaps)),
        ignored_events=st.ignored_events,
    )


def _swap(move: MoveEnded) -> SwapView:
    direction: Direction = "out" if move.kind is HistoryKind.OUT else "in"
    return SwapView(move.session, direction, move.bytes_moved, move.elapsed_ns, move.ended_ns)


def state_of(session: Session) -> SessionState:
    if session.residency is Residency.LOST:
        return SessionState.LOST
    if session.op is not None and session.op.doing in _WHILE:
        return _WHILE[session.op.doing]
    if session.stretch is not None:
        return _STRETCHES[session.stretch]
    return SessionState.PAGED_OUT if session.residency is Residency.PAGED_OUT else SessionState.IDLE


def _why(st: State) -> str:
    """Return why sessions run one at a time, or in parallel."""
    if st.anti_thrash is AntiThrash.OFF:
        return "anti-thrash is off, so that programs may run out of GPU memory"
    if st.anti_thrash is AntiThrash.ALWAYS:
        return "anti-thrash is set to always"
    if st.outgrown:
        return "those that ran together have outgrown the GPU"
    if st.serialised:
        need = format_bytes(st.active_need_bytes + st.margin_bytes)
        reserve, has = format_bytes(st.margin_bytes), format_bytes(st.capacity_bytes)
        return (
            f"together they may need {need} ({reserve} in reserve), and the GPU has {has} for them"
        )
    if st.queue:
        return "they fit together; who waits, waits for its memory or for room"
    return "they fit together" if st.active > 1 else "as long as they fit together"


def _waiters(st: State) -> Iterator[Session]:
    """Yield the waiters that no longer hold the GPU, then the sessions kept out of it. A session
    that is being suspended is in the queue already, but is shown as a holder until it is
    suspended."""
    yield from (session for session in tenancy.order(st) if not session.turn_ending)
    yield from (session for session in st.kept_out.values() if session.aside)


def shown_holders(st: State) -> tuple[SessionId, ...]:
    """Return the sessions that hold the lease or are being suspended, in the order of joining."""
    sessions = st.sessions.values()
    return tuple(s.id for s in sessions if not s.gone and (s.want is Want.RUNNING or s.turn_ending))


def shown_queue(
    st: State, told: Mapping[SessionId, ShownForecast], now_ns: int
) -> tuple[QueueView, ...]:
    """Return the waiters with their forecasts."""
    return tuple(
        _waiter(waiter, position, told.get(waiter.id), now_ns)
        for position, waiter in enumerate(_waiters(st), start=1)
    )


def _waiter(waiter: Session, position: int, told: ShownForecast | None, now_ns: int) -> QueueView:
    wait = told.likely if told is not None else None
    return QueueView(
        session=waiter.id,
        position=position,
        expected_wait_ns=wait.expected_ns if wait is not None else None,
        expected_low_ns=wait.low_ns if wait is not None else None,
        expected_high_ns=wait.high_ns if wait is not None else None,
        expected_why=told.why if told is not None else "",
        waited_ns=max(0, now_ns - waiter.queued_ns),
        activity=_activity(waiter),
        blocked=waiter.blocked,
        detail=waiter.blocked_detail,
        kept_out=waiter.kept_out,
    )


def _activity(session: Session) -> str:
    return _ACTIVITY[session.op.doing] if session.op is not None else ""


def _turn_ends_at_ns(st: State, runner: Session) -> int | None:
    """Return when ``runner`` makes way for the first waiter, or, if no session waits, when its
    quantum ends. ``None``: all waiters are being brought in beside it, or cannot have the GPU."""
    in_line = tuple(w for w in tenancy.order(st) if not w.turn_ending) if st.queue else ()
    first = next((w for w in in_line if w.id not in st.chosen and w.blocked is None), None)
    if in_line and first is None:
        return None
    if first is not None:
        return st.policy.turn_ends_at_ns(st, runner, first)
    return runner.granted_ns + st.quantum_ns(runner)


def _keeps_ns(st: State, session: Session, now_ns: int) -> int | None:
    kept = st.keeps
    if kept is None or kept.session is not session:
        return None
    return max(0, kept.until_ns - now_ns)


def _session(st: State, session: Session, now_ns: int) -> SessionView:
    account = session.account(now_ns)
    time_left_ns = None
    stoppable = st.anti_thrash is not AntiThrash.OFF and session.guarded
    if session.want is Want.RUNNING and stoppable:
        turn_ends_at_ns = _turn_ends_at_ns(st, session)
        time_left_ns = None if turn_ends_at_ns is None else max(0, turn_ends_at_ns - now_ns)
    return SessionView(
        record=session,
        state=state_of(session),
        held_ns=account.held_ns,
        waited_ns=account.waited_ns,
        peak_bytes=None if session.is_unknown(st.total_bytes) else session.peak_bytes or None,
        time_left_ns=time_left_ns,
        keeps_ns=_keeps_ns(st, session, now_ns),
        detail=session.problem_detail,
    )
