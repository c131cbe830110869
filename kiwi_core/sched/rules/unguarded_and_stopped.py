"""Sessions whose memory must stay where it is: programs without a gate, and stopped processes.

The driver alone cannot suspend a program safely. A program that has Kiwi's gate in front of the
driver is *guarded*; any other one is *unguarded*. An unguarded session shares the GPU like others,
and its memory moves while it idles, but it is never suspended in the middle of its work: its turn
lasts until its burst ends. A *stopped* process (Ctrl-Z, a frozen control group, a debugger) does
nothing at all and does not answer driver calls. It takes no turn and keeps its place in the queue.
The pager can continue a process that Ctrl-Z has stopped while it moves the memory. A process that
a debugger or a freezer has stopped cannot be moved and stays where it is until it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.sched.rules import orders
from kiwi_core.states import Notice, Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


CANNOT_BE_HELD: Final = "it goes on, and cannot be held"


def must_stay(session: Session) -> bool:
    """Return whether the memory of ``session``, which does not hold the lease, must not move."""
    if session.guarded:
        return session.fixed
    return session.mid_burst or session.at_work or bool(session.stopped)


def why_it_stays(session: Session) -> tuple[Notice, str]:
    """Return why its room cannot be freed for others, in words that all users may read."""
    if session.stopped:
        return Notice.BLOCKED_REFUSED, f"another session is {session.stopped}"
    return Notice.BLOCKED_UNGUARDED, ""


def guard_changed(st: State, event: ev.GuardChanged) -> None:
    session = st.known(event.session)
    if session is None or session.guarded is event.guarded:
        return
    session.gate_found(event.guarded)
    st.refresh(session)
    st.tell(session, "has the gate now" if event.guarded else "uses the GPU without a gate")


def stopped(st: State, event: ev.SessionStopped) -> None:
    session = st.known(event.session)
    if session is None:
        return
    st.process_stops(session, event.why or "stopped")
    st.refresh(session)
    st.tell(session, "its process is {}", session.stopped)


def continued(st: State, event: ev.SessionContinued) -> None:
    """Record that the process runs again. If its turn ended meanwhile, the settle pass suspends it
    at once. A session without a gate cannot be suspended: it gets the GPU again, beside its present
    holders."""
    session = st.known(event.session)
    if session is None or not session.stopped:
        return
    st.process_continues(session)
    if session.blocked is Notice.STOPPED:
        session.unblock()
    st.tell(session, "its process goes on")
    left = session.mid_burst and session.residency is Residency.RESIDENT and session.op is None
    if left and not session.guarded:
        orders.grant(st, session, CANNOT_BE_HELD)
    st.refresh(session)


def leave_those_that_stand(st: State) -> None:
    """End the turn of each stopped runner without a gate: the waiters go on, as far as they fit
    beside it. A stopped runner with a gate is suspended at the end of its quantum, like any
    other."""
    for runner in tuple(st.runners.values()):
        if runner.stopped and not runner.guarded:
            orders.leave_where_it_is(st, runner, f"it is {runner.stopped}, and others wait")


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.GuardChanged: guard_changed,
    ev.SessionStopped: stopped,
    ev.SessionContinued: continued,
}
