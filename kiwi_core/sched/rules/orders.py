"""The orders: each function issues one action and brings the records in line with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.sched.actions import BringResidueBack, Grant, PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.model.history import MOVES
from kiwi_core.sched.model.operations import Doing, OngoingOperation
from kiwi_core.sched.rules import tenancy
from kiwi_core.sched.rules.bursts import turn_ended
from kiwi_core.states import HistoryKind, Notice
from kiwi_core.units import NS_PER_S, OpId

if TYPE_CHECKING:
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State

_ACTIONS: Final[dict[Doing, type[Suspend | Resume | PageOut]]] = {
    Doing.SUSPENDING: Suspend,
    Doing.RESUMING: Resume,
    Doing.PAGING_OUT: PageOut,
}
"""The actions that take no more than all operations do."""


def grant(st: State, session: Session, cause: str) -> None:
    """Give ``session`` the lease and a fresh quantum."""
    session.comes_back(tenancy.comes_back(st, session))
    st.leave_line(session)
    goes_on, now_ns = session.mid_burst, st.now_ns
    session.turn_goes_on(HistoryKind.HELD, now_ns, st.history)
    session.granted(now_ns, st.usage.clock_ns(now_ns))
    session.turn_begins(now_ns)
    st.now_runs(session)
    st.recount(session)
    quantum_ns = st.policy.quantum_ns(st, session)
    if goes_on:
        st.notify(session, Notice.RESUMED, cause=cause)
    st.actions.append(
        Grant(session=session.id, burst=session.burst, quantum_ns=quantum_ns, cause=cause)
    )
    st.tell(session, "has the GPU for burst {} ({})", session.burst, cause)


def grant_again(st: State, session: Session) -> None:
    """Grant the rest of its quantum to a runner that asks again after reconnecting."""
    left_ns = max(0, session.granted_ns + st.quantum_ns(session) - st.now_ns)
    st.actions.append(
        Grant(session=session.id, burst=session.burst, quantum_ns=left_ns, cause="asked again")
    )


def grant_lost(st: State, session: Session) -> None:
    """Answer the request of a session whose memory is lost, without giving it the lease: its cell
    goes on, and its CUDA calls fail."""
    st.actions.append(
        Grant(
            session=session.id,
            burst=session.burst,
            quantum_ns=st.turn_settings.tq_ns,
            cause="its GPU memory is lost: nothing to wait for",
        )
    )


def end_turn(st: State, session: Session, doing: Doing, cause: str) -> None:
    """End the turn of a runner: it joins the queue now, but counts as a holder until the operation
    reports. The session is notified now, because it may not be able to show anything once it is
    suspended."""
    st.runs_no_more(session)
    session.makes_way(st.now_ns)
    if not session.kept_out:  # else ``line_up`` notifies it
        st.notify(session, Notice.SUSPENDED, cause=cause)
    _start(st, session, doing, cause, ends_turn=True)
    st.line_up(session)


def leave_where_it_is(st: State, session: Session, cause: str) -> None:
    """End the turn of a runner without an operation: its process does not run anyway."""
    st.runs_no_more(session)
    session.makes_way(st.now_ns)
    turn_ended(st, session)
    st.notify(session, Notice.SUSPENDED, cause=cause)
    st.refresh(session)
    st.line_up(session)
    st.tell(session, "its turn is over ({})", cause)


def suspend(st: State, session: Session, cause: str) -> None:
    _start(st, session, Doing.SUSPENDING, cause)


def resume(st: State, session: Session, cause: str) -> None:
    _start(st, session, Doing.RESUMING, cause)


def page_out(st: State, session: Session, cause: str, *, hinted: bool = False) -> None:
    _start(st, session, Doing.PAGING_OUT, cause, hinted=hinted)


def page_in(st: State, session: Session, cause: str, *, hinted: bool = False) -> None:
    _start(st, session, Doing.PAGING_IN, cause, hinted=hinted)


def bring_residue_back(st: State, session: Session, cause: str) -> None:
    _start(st, session, Doing.RESIDUE_IN, cause)


def _start(
    st: State,
    session: Session,
    doing: Doing,
    cause: str,
    *,
    ends_turn: bool = False,
    hinted: bool = False,
) -> None:
    op, id_, now_ns = OpId(st.next_op), session.id, st.now_ns
    st.next_op += 1
    moved_bytes = move_id = 0
    if doing in MOVES:
        moved_bytes = session.resident_bytes
        if doing is Doing.PAGING_IN:  # all but what an interrupted page-out left in the GPU
            moved_bytes = session.footprint_bytes - moved_bytes
        move_id = st.history.next()
    elif doing is Doing.RESIDUE_IN:
        moved_bytes = session.taken_bytes
    st.op_begins(session, OngoingOperation(op, doing, now_ns, ends_turn, hinted, move_id))
    until_ns = now_ns + _allowed_ns(st, moved_bytes)
    action: Action
    if doing is Doing.PAGING_IN or doing is Doing.RESIDUE_IN:
        kind = PageIn if doing is Doing.PAGING_IN else BringResidueBack
        action = kind(session=id_, op=op, deadline_ns=until_ns, need_bytes=moved_bytes, cause=cause)
    else:
        action = _ACTIONS[doing](session=id_, op=op, deadline_ns=until_ns, cause=cause)
    st.actions.append(action)
    st.tell(session, "{0.value} begins ({1})", doing, cause)


def _allowed_ns(st: State, moved_bytes: int) -> int:
    """Return how long an operation may take before it counts as overdue: generous, since a late
    operation is only marked."""
    config = st.config
    return (
        config.operation_deadline_min_ns
        + config.lock_timeout_ns
        + moved_bytes * NS_PER_S // config.operation_deadline_bytes_per_s
    )
