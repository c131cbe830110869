"""Handlers for the outcomes of operations.

An outcome counts only if its operation is in progress and is of the kind that the outcome answers;
any other outcome is dropped and counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.happenings import OperationFailed, OperationHung
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import bursts, hints, orders
from kiwi_core.states import Notice, Reason, Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.operations import OngoingOperation
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State

HOPELESS = frozenset({Reason.UNSUPPORTED, Reason.NOT_PERMITTED})
"""Reasons that hardly change within a second: they get the longest back-off at once."""


_SUCCESSES = frozenset({ev.Suspended, ev.Resumed, ev.PagedOut, ev.PagedIn, ev.ResidueBack})


def _take(
    st: State, event: ev.Outcome, doing: Doing, moved_bytes: int = 0, took_ns: int | None = None
) -> tuple[Session, OngoingOperation] | None:
    """Remove an operation that has reported from ``State.ops``; return its session and record, or
    ``None`` if the outcome is to be dropped, or if the session is dead and forgotten with it.
    ``moved_bytes`` and ``took_ns`` are given for a move that succeeded."""
    session = st.ops.get(event.op)
    if session is None or session.op is None or session.op.doing is not doing:
        st.ignore()
        return None
    running = session.op
    st.op_reports(session, running)
    if running.move_id:
        session.move_ended(running, moved_bytes, took_ns, st.now_ns, st.history)
    if type(event) not in _SUCCESSES:
        st.history.happenings.append(OperationFailed(doing, event))
    if session.gone:
        st.forget(session)
        return None
    if running.overdue:
        if session.problem is Notice.STUCK:
            st.notify(session, Notice.UNSTUCK, f"{doing.value} has come to an end after all")
        session.problem_is_over()
        if session.blocked in (Notice.STUCK, Notice.STOPPED):
            session.unblock()
    return session, running


def _succeeded(st: State, session: Session) -> None:
    session.operation_succeeded()
    st.uncramp(session)
    if session.leaving:
        _leave_or_return(st, session)
    else:
        st.refresh(session)


def _leave_or_return(st: State, session: Session) -> None:
    """Bring a session that leaves back into the GPU, free, and then forget it; refresh any other
    session."""
    if not session.leaving:
        st.refresh(session)
    elif session.residency in (Residency.RESIDENT, Residency.LOST):
        bursts.to_rest(st, session)
        st.forget_leaver(session)
    elif session.residency is Residency.PAGED_OUT and session.want is Want.NONE:
        bursts.enqueue_return(st, session)
    else:
        st.refresh(session)


def _suspended(st: State, session: Session, running: OngoingOperation) -> None:
    if running.ends_turn:
        bursts.turn_ended(st, session)


def suspended(st: State, event: ev.Suspended) -> None:
    if (taken := _take(st, event, Doing.SUSPENDING)) is not None:
        session, running = taken
        session.was_suspended(event.resident_bytes)
        if event.resident_bytes is not None:
            wants = session.want is not Want.NONE
            session.learn_from_reading(event.resident_bytes, st.total_bytes, in_burst=wants)
            st.memory_read(session, st.now_ns)
        elif session.read_ns < 0:  # else its memory was read while it ran
            st.left_gpu(session, st.now_ns)
        _suspended(st, session, running)
        st.tell(session, "held; its memory stays in the GPU")
        _succeeded(st, session)


def _all_bytes(session: Session, event: ev.PagedOut | ev.PagedIn) -> int:
    """Return the size of its memory, of which a move has moved at least a part."""
    known_bytes, moved_bytes = session.footprint_bytes, event.moved_bytes
    return known_bytes if known_bytes > moved_bytes else moved_bytes


def paged_out(st: State, event: ev.PagedOut) -> None:
    moved_bytes = event.moved_bytes
    mover = st.ops.get(event.op)
    if mover is not None and mover.paged_out_bytes:
        moved_bytes = max(0, moved_bytes - mover.paged_out_bytes)  # by this move
    if (taken := _take(st, event, Doing.PAGING_OUT, moved_bytes, event.elapsed_ns)) is not None:
        session, running = taken
        # A hang says nothing about speed. If the session was out already, the driver moved what the
        # library had left, at another speed.
        if not running.overdue and session.residency is not Residency.PAGED_OUT:
            st.speed.learn_out(moved_bytes, event.elapsed_ns)
        session.gives_up_its_place()
        session.went_out(_all_bytes(session, event), event.moved_bytes, event.stays_bytes)
        st.memory_read(session, st.now_ns)
        _suspended(st, session, running)
        st.tell(session, "paged out: {!b} in {!t}", moved_bytes, event.elapsed_ns)
        _succeeded(st, session)


def paged_in(st: State, event: ev.PagedIn) -> None:
    if (
        taken := _take(st, event, Doing.PAGING_IN, event.moved_bytes, event.elapsed_ns)
    ) is not None:
        session, running = taken
        if not running.overdue:
            st.speed.learn_in(event.moved_bytes, event.elapsed_ns)
        session.came_in(_all_bytes(session, event))
        st.tell(session, "paged in: {!b} in {!t}", event.moved_bytes, event.elapsed_ns)
        if running.hinted and session.want is Want.NONE:
            hints.came_back(st, session)
        _succeeded(st, session)


def resumed(st: State, event: ev.Resumed) -> None:
    if (taken := _take(st, event, Doing.RESUMING)) is not None:
        session, _ = taken
        session.was_resumed()
        st.tell(session, "let go")
        _succeeded(st, session)


def _refused(
    st: State,
    session: Session,
    running: OngoingOperation,
    notice: Notice,
    reason: Reason,
    detail: str,
) -> None:
    """Handle a refusal. Nothing changed in the target, so leave it alone for a while."""
    words = f"{reason.value}: {detail}" if detail else reason.value
    st.choose_no_more(session)
    if session.stopped and running.doing is not Doing.PAGING_IN:
        session.cannot_move_while_stopped()
    if running.ends_turn:
        if session.stopped:
            bursts.turn_ended(st, session)  # it does not run: its turn is over anyway
        else:
            # It holds the lease as before; its quantum stays used up.
            st.leave_line(session)
            session.runs_on()
            st.now_runs(session)
            st.notify(session, Notice.RESUMED, "it could not be stopped and goes on")
    draining = reason is Reason.DRAINING
    known = draining or (reason in HOPELESS and words == session.problem_detail)
    if running.doing is Doing.PAGING_OUT:
        # The GPU can stay full for long, and the figures of a job's memory vary: its user knows.
        known = known or (reason is Reason.NO_ROOM and words == session.problem_detail)
        known = known or (reason is Reason.NO_JOB_MEMORY and session.cramped_ns >= 0)
        if reason is Reason.UNSUPPORTED:
            session.cannot_move()
        if reason is Reason.NO_JOB_MEMORY:
            st.cramp(session)
        else:
            st.uncramp(session)
    session.back_off(st.config, st.now_ns, longest=reason in HOPELESS, draining=draining)
    st.tell(session, "{} refused ({})", running.doing.value, words)
    if reason is not Reason.GONE:  # its loss is reported separately
        session.has_problem(notice, words)
        asked = not running.hinted or session.want is not Want.NONE
        if asked and not known:
            st.notify(session, notice, words)
    _leave_or_return(st, session)


def suspend_refused(st: State, event: ev.SuspendRefused) -> None:
    if (taken := _take(st, event, Doing.SUSPENDING)) is not None:
        _refused(st, *taken, Notice.PAGE_OUT_REFUSED, event.reason, event.detail)


def page_out_refused(st: State, event: ev.PageOutRefused) -> None:
    if (taken := _take(st, event, Doing.PAGING_OUT)) is not None:
        _refused(st, *taken, Notice.PAGE_OUT_REFUSED, event.reason, event.detail)


def page_in_refused(st: State, event: ev.PageInRefused) -> None:
    if (taken := _take(st, event, Doing.PAGING_IN)) is not None:
        session, running = taken
        if event.reason is Reason.NO_ROOM:
            session.lacked_room(st.margin_bytes)
        _refused(st, session, running, Notice.PAGE_IN_REFUSED, event.reason, event.detail)


def resume_failed(st: State, event: ev.ResumeFailed) -> None:
    if (taken := _take(st, event, Doing.RESUMING)) is not None:
        if event.paged_out_bytes:
            taken[0].found(Residency.PAGED_OUT, 0, event.paged_out_bytes)
        _refused(st, *taken, Notice.PAGE_IN_REFUSED, event.reason, event.detail)


def page_out_lost(st: State, event: ev.PageOutLost) -> None:
    if (taken := _take(st, event, Doing.PAGING_OUT)) is not None:
        lost(st, *taken, event.detail)


def page_in_lost(st: State, event: ev.PageInLost) -> None:
    session = st.ops.get(event.op)
    residue = (
        session is not None and session.op is not None and session.op.doing is Doing.RESIDUE_IN
    )
    if (taken := _take(st, event, Doing.RESIDUE_IN if residue else Doing.PAGING_IN)) is not None:
        lost(st, *taken, event.detail)


def residue_back(st: State, event: ev.ResidueBack) -> None:
    if (taken := _take(st, event, Doing.RESIDUE_IN)) is not None:
        session, _ = taken
        session.residue_came_in(event.moved_bytes)
        st.memory_read(session, st.now_ns)
        st.tell(session, "its contexts are back: {!b} in {!t}", event.moved_bytes, event.elapsed_ns)
        _leave_or_return(st, session)


def residue_refused(st: State, event: ev.ResidueRefused) -> None:
    """Leave the residue where it is for a while. That is no reason to put off a page-in."""
    if (taken := _take(st, event, Doing.RESIDUE_IN)) is not None:
        session, _ = taken
        session.residue_waits(st.config, st.now_ns)
        words = f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value
        st.tell(session, "its contexts do not come back yet ({})", words)
        _leave_or_return(st, session)


def lost(st: State, session: Session, running: OngoingOperation, detail: str) -> None:
    """Handle the loss of a session's contents. A session that still waits for its burst gets its
    grant, so that its own CUDA calls raise; otherwise it would wait for ever."""
    if running.ends_turn:
        bursts.stop_holding(st, session)
    waits = session.want is Want.QUEUED and not session.mid_burst and not session.leaving
    bursts.lose(st, session)
    if session.want is not Want.NONE:
        bursts.to_rest(st, session)
    mark_lost(st, session, detail)
    if waits:
        orders.grant_lost(st, session)
    _leave_or_return(st, session)


def mark_lost(st: State, session: Session, detail: str) -> None:
    session.has_problem(Notice.LOST, detail or "the driver could not restore its GPU memory")
    st.notify(session, Notice.LOST, session.problem_detail)
    st.tell(session, "its GPU memory is lost ({})", session.problem_detail)


def overdue(st: State, event: ev.OperationOverdue) -> None:
    session = st.ops.get(event.op)
    if session is None or session.op is None:
        st.ignore()
        return
    if session.op.overdue:
        return
    session.op.overdue = True
    st.history.happenings.append(OperationHung(session.op.doing))
    st.choose_no_more(session)
    st.refresh(session)
    if session.gone:
        return
    if session.stopped:
        session.has_problem(Notice.STOPPED, session.stopped)
    else:
        session.has_problem(Notice.STUCK, f"{session.op.doing.value} does not come to an end")
    st.notify(session, session.problem or Notice.STUCK, session.problem_detail)
    why = f"waits: it is {session.stopped}" if session.stopped else "hangs"
    st.tell(session, "{} ({!b}) {}", session.op.doing.value, session.footprint_bytes, why)


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.Suspended: suspended,
    ev.SuspendRefused: suspend_refused,
    ev.PagedOut: paged_out,
    ev.PageOutRefused: page_out_refused,
    ev.PageOutLost: page_out_lost,
    ev.PagedIn: paged_in,
    ev.PageInRefused: page_in_refused,
    ev.PageInLost: page_in_lost,
    ev.ResidueBack: residue_back,
    ev.ResidueRefused: residue_refused,
    ev.Resumed: resumed,
    ev.ResumeFailed: resume_failed,
    ev.OperationOverdue: overdue,
}
