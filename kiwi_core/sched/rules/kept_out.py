"""Sessions that are kept out of the GPU: from ``kiwi suspend`` until ``kiwi resume``.

Such a session takes no turn. If it holds the lease, its turn ends now, as at the end of its
quantum. Its memory is paged out. A burst that it asks for meanwhile waits beside the queue: there
it counts neither as a waiter nor with its need, and its memory is paged out before that of
waiters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import bursts, orders
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


def keep_out(st: State, session: Session, by: str) -> None:
    """Keep ``session`` out from now on, or change who keeps it out."""
    queued = session.want is Want.QUEUED
    if queued:
        st.leave_line(session)
    session.kept_out = by
    st.kept_out[session.id] = session
    st.refresh(session)
    if queued:
        st.line_up(session)
    st.tell(session, "kept out of the GPU by {}", by)


def admit_again(st: State, session: Session) -> None:
    """Stop keeping ``session`` out; it joins the tail of the queue if it wants the GPU. Do nothing
    if it is not kept out."""
    if not session.kept_out:
        return
    aside = session.aside
    session.kept_out = ""
    del st.kept_out[session.id]
    session.unblock()
    if aside:
        bursts.wait_anew(st, session)
    st.refresh(session)
    if session.want is Want.QUEUED:
        st.line_up(session)
    st.tell(session, "not kept out any more")


def tend(st: State) -> None:
    """End the turns of kept-out sessions that hold the lease, and page out their memory."""
    for session in tuple(st.kept_out.values()):
        if session.op is not None or session.residency not in (
            Residency.RESIDENT,
            Residency.SUSPENDED,
        ):
            continue
        runs = session.want is Want.RUNNING
        if must_stay(session) if not runs else not session.guarded:
            continue  # a session without a gate goes on until its burst ends
        fits = st.host_claimed_bytes + session.resident_bytes <= st.host_budget_bytes
        moves = bool(session.resident_bytes) and fits and not session.unmovable
        if not runs and not moves:
            continue
        if session.backoff_until_ns > st.now_ns:
            st.wake_at(session.backoff_until_ns)
            continue
        cause = f"{session.kept_out} suspends it"
        if runs:
            orders.end_turn(st, session, Doing.PAGING_OUT if moves else Doing.SUSPENDING, cause)
        else:
            orders.page_out(st, session, cause)


def suspension_requested(st: State, event: ev.SuspensionRequested) -> None:
    session = st.known(event.session)
    if session is None or session.leaving or session.kept_out == event.by:
        return
    keep_out(st, session, event.by)


def resumption_requested(st: State, event: ev.ResumptionRequested) -> None:
    session = st.known(event.session)
    if session is not None:
        admit_again(st, session)


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.SuspensionRequested: suspension_requested,
    ev.ResumptionRequested: resumption_requested,
}
