"""Page in a session's memory before it asks, only while that hinders no other session.

A hint says that a program is about to be used. It gives no place in the queue and no lease: a
session that asks meanwhile is served as if there were no hint, after the operations in progress.
Two limits keep hints from thrashing: memory that was just used or paged in is not paged out for
another session's hint, and memory that a hint paged in and that was not used is not paged in by a
hint again for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import orders
from kiwi_core.sched.rules.room import is_residue
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId

NOT_AT_REST = "it is in a burst, or its memory moves"


def hindrance(st: State, session_id: SessionId, now_ns: int) -> str:
    """Return why ``session_id`` is not paged in now, in words that all users may read; "": it
    is."""
    session = st.sessions.get(session_id)
    if session is None or session.gone or session.leaving:
        return "there is no such session any more"
    if not st.config.bring_back:
        return "bringing memory back ahead of use is switched off here"
    if why := _not_out(session):
        return why
    if st.runners:
        return "the GPU is in use"
    if st.queue:
        return "somebody waits for the GPU"
    if st.ops:
        return "the memory of another session moves"
    last_ns = session.hinted_ns
    if last_ns is not None and now_ns - last_ns < st.config.hint_interval_ns:
        return "it was brought back only a while ago, and not used since"
    return _plan(st, session, now_ns)[1]


def use_expected(st: State, event: ev.UseExpected) -> None:
    session = st.known(event.session)
    if session is not None and not hindrance(st, session.id, st.now_ns):
        st.hinted = session


def tend(st: State, session: Session) -> None:
    """Take the next step for the hinted session if it still hinders no other session. The settle
    pass calls this."""
    if session.gone or session.leaving or _not_out(session) or st.queue or st.runners:
        st.hinted = None
        return
    if any(not other.stuck for other in st.ops.values()):
        return  # room is being made
    st.hinted = None
    victims, why = _plan(st, session, st.now_ns)
    if why or st.ops:
        st.tell(session, "not brought back after all: {}", why or "a driver call hangs")
    elif victims:
        st.hinted = session
        cause = f"room for {session.id}, about to be used"
        for victim in victims:
            orders.page_out(st, victim, cause, hinted=True)
    else:
        orders.page_in(st, session, "about to be used", hinted=True)


def came_back(st: State, session: Session) -> None:
    """Record that a hint's page-in succeeded: the session is now the most recently used idle
    one."""
    session.brought_back(st.now_ns)
    st.used_now(session)


def _not_out(session: Session) -> str:
    if session.want is not Want.NONE or session.op is not None:
        return NOT_AT_REST
    if session.stopped:
        return f"its process is {session.stopped}"
    if session.kept_out:
        return f"{session.kept_out} keeps it out of the GPU"
    if session.residency is Residency.LOST:
        return "the contents of its memory are lost"
    return "its memory is in the GPU" if session.residency is not Residency.PAGED_OUT else ""


def _plan(st: State, session: Session, now_ns: int) -> tuple[list[Session], str]:
    """Return the sessions to page out for it, or why there is no room. The room is for what comes
    back, not for growth: that other sessions keep theirs matters more than a guess."""
    if not st.observed:
        return [], "the GPU's memory has not been read yet"
    if session.backoff_until_ns > now_ns:
        return [], "bringing it back failed a moment ago"
    footprint = session.footprint_bytes
    with_margin = footprint + st.margin_bytes + session.extra_room_bytes
    residues = {s.id: s.resident_bytes for s in st.idle.values() if is_residue(st, s)}
    residues.pop(session.id, None)
    wanted = max(footprint, min(with_margin, st.capacity_bytes - sum(residues.values())))
    short_bytes = wanted - session.counted_claim_bytes - st.free_bytes
    host_bytes = st.host_claimed_bytes
    victims: list[Session] = []
    for victim in st.policy.victims(st.idle.values(), ()):
        if short_bytes <= 0:
            break
        if victim.id in residues:
            continue  # moving a residue takes the driver seconds: only a cell is worth that
        host_bytes_then = host_bytes + victim.resident_bytes
        blocked = victim is session or victim.leaving or victim.backoff_until_ns > now_ns
        if blocked or must_stay(victim) or host_bytes_then > st.host_budget_bytes:
            continue
        marks = (victim.rested_ns, victim.hinted_ns)
        if any(at is not None and now_ns - at < st.config.hint_protect_ns for at in marks):
            return [], "the room is taken by what was used or brought back just now"
        victims.append(victim)
        short_bytes -= victim.counted_claim_bytes
        host_bytes = host_bytes_then
    if short_bytes > 0:
        return [], f"there is no room: {format_bytes(short_bytes)} more would have to be free"
    return victims, ""


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {ev.UseExpected: use_expected}
