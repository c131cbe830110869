"""Begin and end bursts and take them out of the queue; used by events, outcomes and settle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.model.turn import Want
from kiwi_core.states import HistoryKind

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


def enqueue(st: State, session: Session, burst: int, mid_burst: bool = False) -> None:
    """Put ``session`` at the tail of the queue for ``burst``."""
    if session.rested_ns is not None and not mid_burst:
        session.paused_for(st.now_ns - session.rested_ns)
    session.asks(burst, mid_burst, st.now_ns)
    session.turn_goes_on(
        HistoryKind.SUSPENDED if mid_burst else HistoryKind.WAITED, st.now_ns, st.history
    )
    session.may_move_again()
    st.uncramp(session)
    session.learn_from_start(session.footprint_bytes)
    st.refresh(session)
    st.line_up(session)


def enqueue_return(st: State, session: Session) -> None:
    """Queue a session that leaves, without a burst, until its memory is paged in."""
    session.asks_to_leave(st.now_ns)
    st.refresh(session)
    st.line_up(session)


def stop_holding(st: State, session: Session, then: HistoryKind | None = None) -> None:
    """Count the time of a quantum that is over, however it ended."""
    had_ns = st.now_ns - session.granted_ns
    counts_ns = st.usage.clock_ns(st.now_ns) - session.began_ns
    if counts_ns:
        favoured_ns = st.policy.favoured_ns(st, session, had_ns)
        if favoured_ns > counts_ns:
            favoured_ns = counts_ns
        st.usage.add(session, counts_ns, favoured_ns, st.now_ns, st.sessions.values())
    session.held_for(had_ns)
    session.turn_goes_on(then, st.now_ns, st.history)


def turn_ended(st: State, session: Session) -> None:
    """Record that a session that held the lease is suspended and waits for its next turn."""
    stop_holding(st, session, then=HistoryKind.SUSPENDED)
    session.queues_again(st.now_ns)
    session.learn_from_suspension(session.attained_ns)


def to_rest(st: State, session: Session) -> None:
    """Take ``session`` out of the queue or the lease: it wants nothing now."""
    _rest(st, session)
    st.refresh(session)


def _rest(st: State, session: Session) -> None:
    if session.want is Want.RUNNING:
        stop_holding(st, session)
        st.runs_no_more(session)
    elif session.want is Want.QUEUED:
        st.leave_line(session)
        if session.turn_ending:
            stop_holding(st, session)
        else:
            session.turn_goes_on(None, st.now_ns, st.history)
    if session.op is not None:
        session.op.ends_turn = False
    session.rests(st.now_ns)
    session.lingers_no_more()
    st.used_now(session)


def wait_anew(st: State, session: Session) -> None:
    """End the session's present wait and begin a new one, for its turn."""
    session.queues_again(st.now_ns)
    session.turn_goes_on(
        HistoryKind.SUSPENDED if session.mid_burst else HistoryKind.WAITED, st.now_ns, st.history
    )


def end(st: State, session: Session, why: str, left_ns: int | None = None) -> None:
    """End the burst, whether it runs, was suspended, or has not begun. ``left_ns`` is when its
    program stopped using the GPU, if its memory must still be read; otherwise ``None``."""
    begun = session.want is Want.RUNNING or session.mid_burst
    if left_ns is not None and (session.want is Want.RUNNING or session.turn_ending):
        st.left_gpu(session, left_ns)
    _rest(st, session)
    session.burst_ends()
    if begun:
        session.learn_from_end(session.attained_ns, st.total_bytes, st.now_ns)
    st.refresh(session)
    if begun:
        st.tell(session, "burst {} ended ({})", session.burst, why)
    else:
        st.tell(session, "burst {} left the queue ({})", session.burst, why)


def lose(st: State, session: Session) -> None:
    """Record that, as the driver reports, the contents of the session's memory are gone."""
    session.contents_lost()
    st.uncramp(session)
    st.refresh(session)
