"""One session's memory comes in while the memory that makes its room goes out.

Only where that pays on this machine, and where both can be moved in part: then room passes in
pieces, each verified before it is taken. The page-in is on the books at once, what it counts on is
still there: until that has reported, ``State.free_bytes`` may be negative, and whatever asks for
room adds what is on its way out. Where a page-out does not make its room the page-in is refused,
its reservation is void from then on, and it is no fault of anybody's memory: nobody is left alone
for it, but nobody counts on that page-out again either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import orders, room
from kiwi_core.sched.parts import freed_bytes
from kiwi_core.sched.room import Room
from kiwi_core.sched.session import Doing, Home

if TYPE_CHECKING:
    from kiwi_core.sched.session import Running, Session
    from kiwi_core.sched.state import State
    from kiwi_core.units import OpId


def possible(waiter: Session) -> bool:
    """May it come in beside others, where that pays?"""
    return waiter.partial and waiter.home is Home.OUT


def stopping(st: State) -> int:
    """How many hold the lease only until their page-out has reported, and can be counted on."""
    stopping = (s for s in st.ops.values() if s.stopping)
    return sum(s.op is not None and _counts(s, s.op) for s in stopping)


def begin(st: State, waiter: Session, alone: bool) -> bool:
    """Bring ``waiter`` in beside what goes out for it, if that makes all of its room. (That nobody
    else is on the way in has been checked.)"""
    state, _ = room.make_room(st, waiter, alone)
    if state is not Room.COMING:
        return False
    beside = _enough(st, room.short_bytes(st, waiter))
    if not beside:
        return False
    st.chosen[waiter.id] = waiter
    cause = "leaves Kiwi" if waiter.leaving else "its turn"
    orders.page_in(st, waiter, cause, beside=beside)
    return True


def _counts(session: Session, op: Running) -> bool:
    sound = not op.overdue and not op.let_down and not session.gone
    return sound and session.partial and op.doing is Doing.PAGING_OUT


def _enough(st: State, short_bytes: int) -> tuple[OpId, ...]:
    """The oldest page-outs that free so much together; all, if more is not to be had and each of
    them counts; else none."""
    beside: list[OpId] = []
    all_count = True
    for session in st.ops.values():
        op = session.op
        if op is None or op.doing is not Doing.PAGING_OUT or op.overdue:
            continue
        if not _counts(session, op):
            all_count = False
            continue
        beside.append(op.op)
        short_bytes -= freed_bytes(session, op)
        if short_bytes <= 0:
            return tuple(beside)
    return tuple(beside) if all_count else ()


def reported(st: State, page_out: OpId, *, failed: bool = False, has_room: bool = True) -> None:
    """``page_out`` hangs, or has come to an end after all; or it has ``failed``, which may have
    made room all the same: what is lost, and whose process is dead, holds none."""
    for session in st.ops.values():
        op = session.op
        if op is not None and page_out in op.beside:
            op.let_down = op.let_down or failed
            op.void = op.void or not has_room
            st.refresh(session)


def excuses(st: State, page_in: Running) -> bool:
    """Was ``page_in`` refused because of what it counted on? That is not counted on again."""
    still = [op for one in page_in.beside if (op := _operation(st, one)) is not None]
    for op in still:
        op.let_down = True
    return page_in.let_down or bool(still)


def _operation(st: State, op: OpId) -> Running | None:
    session = st.ops.get(op)
    return session.op if session is not None else None
