"""Make the frozen view of a scheduler that users and programs see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import tenancy
from kiwi_core.sched.view import GpuView, QueueView, SessionView, SwapView
from kiwi_core.states import AntiThrash, HistoryKind, Residency, SessionState
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kiwi_core.sched.forecast.shown_forecast import Forecast, ShownForecast
    from kiwi_core.sched.model.happenings import MoveEnded
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.states import Direction
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
        return f"together they may need {need} and the GPU has {format_bytes(st.capacity_bytes)}"
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
        id=session.id,
        state=state_of(session),
        resident_bytes=session.resident_bytes,
        paged_out_bytes=session.paged_out_bytes,
        suspensions=session.suspensions,
        held_ns=account.held_ns,
        waited_ns=account.waited_ns,
        mid_burst=session.mid_burst,
        lingering=session.lingering,
        priority=session.priority,
        guarded=session.guarded,
        stopped=session.stopped,
        kept_out=session.kept_out,
        leaving=session.leaving,
        peak_bytes=None if session.is_unknown(st.total_bytes) else session.peak_bytes or None,
        time_left_ns=time_left_ns,
        keeps_ns=_keeps_ns(st, session, now_ns),
        problem=session.problem,
        detail=session.problem_detail,
    )
