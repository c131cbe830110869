"""Handlers for what notebooks and their processes do: they come and go, bursts begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import bursts, growth, kept_out, orders
from kiwi_core.sched.rules.outcomes import mark_lost
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Notice, Priority, Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId


def joined(st: State, event: ev.SessionJoined) -> None:
    """Add a session, or update a known one (the driver's report replaces what was remembered)."""
    session = st.sessions.get(event.session)
    if session is None:
        owner = event.owner if st.config.turns_by_owner else ""
        session = st.join(event.session, owner or event.session)
        st.tell(session, "joined ({})", event.residency.value)
    elif session.gone:
        st.ignore()
        return
    elif session.leaving:
        session.leaving = False
        if session.want is Want.QUEUED:
            bursts.to_rest(st, session)
    if event.guarded is not None:
        session.gate_found(event.guarded)
    if session.op is None:
        _believe(st, session, event)
    if event.priority is not None:
        _prioritise(st, session, event.priority)
    if event.kept_out:
        kept_out.keep_out(st, session, event.kept_out)
    if event.mid_burst and session.want is Want.NONE and session.residency is not Residency.LOST:
        bursts.enqueue(st, session, event.burst, mid_burst=True)
    session.note_burst(event.burst)
    st.refresh(session)


def _prioritise(st: State, session: Session, priority: Priority) -> None:
    if priority is session.priority:
        return
    wants = session.counted_active_bytes
    if wants:
        st.usage.rests(session)
    session.join_class(priority, st.config)
    if wants:
        st.usage.wants(session)
    st.policy.adopt(st)


def priority_changed(st: State, event: ev.PriorityChanged) -> None:
    session = st.known(event.session)
    if session is not None:
        _prioritise(st, session, event.priority)
        st.tell(session, "priority is now {0.value}", event.priority)


def _believe(st: State, session: Session, event: ev.SessionJoined) -> None:
    """Take over the state of ``session`` that the driver reports."""
    was = session.residency
    resident_bytes = event.resident_bytes
    if event.residency is Residency.RESIDENT and not resident_bytes:
        resident_bytes = session.resident_bytes  # 0: not read yet
    session.found(event.residency, resident_bytes, event.paged_out_bytes)
    if session.residency is Residency.LOST:
        if session.want is not Want.NONE:
            bursts.to_rest(st, session)
        bursts.lose(st, session)
        if was is not Residency.LOST:
            mark_lost(st, session, "")
    elif session.want is Want.RUNNING and session.residency is not Residency.RESIDENT:
        # The session cannot be running: another party suspended it. Bring it back in its turn.
        burst = session.burst
        bursts.to_rest(st, session)
        bursts.enqueue(st, session, burst, mid_burst=True)


def lost(st: State, event: ev.SessionLost) -> None:
    session = st.known(event.session)
    if session is None:
        return
    growth.drop_all(st, session)
    kept_out.admit_again(st, session)
    bursts.to_rest(st, session)
    st.tell(session, "its process ended")
    st.process_died(session)


def detached(st: State, event: ev.SessionDetached) -> None:
    session = st.known(event.session)
    if session is None or session.leaving:
        return
    kept_out.admit_again(st, session)
    if session.want is not Want.NONE:
        bursts.end(st, session, "left Kiwi", st.now_ns)
    session.leaving = True
    growth.drop_all(st, session)
    if session.op is not None or session.residency is Residency.SUSPENDED:
        st.refresh(session)
    elif session.residency is Residency.PAGED_OUT:
        bursts.enqueue_return(st, session)
    else:
        st.forget_leaver(session)


def requested(st: State, event: ev.LeaseRequested) -> None:
    session = st.known(event.session)
    if session is None:
        return
    if session.leaving or event.burst < session.burst:
        st.ignore()
    elif session.residency is Residency.LOST:
        session.note_burst(event.burst)
        st.notify(session, Notice.LOST, session.problem_detail)
        orders.grant_lost(st, session)
    elif session.want is not Want.NONE and event.burst == session.burst:
        if session.want is Want.RUNNING:
            orders.grant_again(st, session)
    else:
        if session.want is not Want.NONE:
            bursts.end(st, session, "the next one begins", st.now_ns)
        bursts.enqueue(st, session, event.burst)


def _in_burst(st: State, session_id: SessionId, burst: int) -> Session | None:
    """Return the session if it is in, or waits for, exactly this burst."""
    session = st.known(session_id)
    if session is None:
        return None
    if session.want is Want.NONE or session.leaving or session.burst != burst:
        st.ignore()
        return None
    return session


def withdrawn(st: State, event: ev.LeaseWithdrawn) -> None:
    if (session := _in_burst(st, event.session, event.burst)) is not None:
        bursts.end(st, session, "withdrawn", st.now_ns)


def burst_ended(st: State, event: ev.BurstEnded) -> None:
    if (session := _in_burst(st, event.session, event.burst)) is not None:
        bursts.end(st, session, "done", event.ended_ns)


def burst_lingered(st: State, event: ev.BurstLingered) -> None:
    session = _in_burst(st, event.session, event.burst)
    if session is None:
        return
    if session.want is Want.QUEUED and not session.mid_burst:
        bursts.end(st, session, "over before it began")
        return
    st.lingers(session)
    st.tell(session, "cell over, something it started goes on")


def may_release(session: Session) -> bool:
    """Return whether ``session`` is at rest and free to move, or already being paged out."""
    if session.want is not Want.NONE or session.leaving or session.gone:
        return False
    if session.op is not None:
        return session.op.doing is Doing.PAGING_OUT
    return not must_stay(session)


def release_requested(st: State, event: ev.ReleaseRequested) -> None:
    """Page the session out now if it is in the GPU and at rest, and system RAM can take it."""
    session = st.known(event.session)
    if session is None or not may_release(session) or session.op is not None:
        return
    if session.residency not in (Residency.RESIDENT, Residency.SUSPENDED):
        return
    left_bytes = st.host_budget_bytes - st.host_claimed_bytes
    if session.resident_bytes > left_bytes:
        st.notify(
            session,
            Notice.BLOCKED_HOST_MEMORY,
            f"it holds {format_bytes(session.resident_bytes)}; system RAM can take "
            f"{format_bytes(max(0, left_bytes))} more",
        )
        return
    orders.page_out(st, session, "somebody asked for it")


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.SessionJoined: joined,
    ev.PriorityChanged: priority_changed,
    ev.SessionLost: lost,
    ev.SessionDetached: detached,
    ev.LeaseRequested: requested,
    ev.LeaseWithdrawn: withdrawn,
    ev.BurstEnded: burst_ended,
    ev.BurstLingered: burst_lingered,
    ev.ReleaseRequested: release_requested,
    ev.RoomWanted: growth.wanted,
    ev.RoomNoLongerWanted: growth.no_longer_wanted,
}
