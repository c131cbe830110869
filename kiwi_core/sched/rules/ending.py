"""The end of idle sessions that hold room for which others wait and that cannot be paged out.

The driver keeps paged-out memory in the process that owns it. A session whose own job or container
has too little RAM (``Session.cramped_ns``) therefore keeps its memory in the GPU: there is no other
place for it. Where ``Config.end_immovable_after_ns`` is set, such a session is ended. For that long
without a break its page-outs were refused for that reason, it wanted nothing, and others waited
that cannot have enough room before it has gone. At the end of that time a page-out has to be
refused once more. Sessions are ended one at a time: after each one, others may do without the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import EndSession
from kiwi_core.sched.model.memory import RESIDENT
from kiwi_core.sched.model.operations import PAGING_OUT
from kiwi_core.sched.model.stories import StorySpan
from kiwi_core.sched.model.turn import NOTHING, RUNNING
from kiwi_core.sched.rules import room
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Notice, Reason
from kiwi_core.units import NS_PER_S, format_period_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId


def tend(st: State) -> None:
    """Begin and break off countdowns, and end a session whose time has come."""
    if not (st.cramped or st.awaiting_end):
        return
    st.awaiting_end = set()
    named = _in_the_way(st) if st.config.end_immovable_after_ns else {}
    for session in st.cramped.values():
        if session.id not in named and not session.ended:
            session.end_at(None)
    under_way = any(session.ended for session in st.cramped.values())
    for session in named.values():
        ends_ns = _begin(st, session) if session.ends_ns is None else session.ends_ns
        if ends_ns > st.now_ns:
            st.wake_at(ends_ns)
        elif not under_way and session.op is None:
            under_way = _last_step(st, session, ends_ns)


def _in_the_way(st: State) -> dict[SessionId, Session]:
    """Return the sessions that have to go before the waiters can have enough room, least recently
    used first."""
    holding = [s for s in st.policy.victims(st.idle.values(), ()) if _only_holds_room(st, s)]
    named: dict[SessionId, Session] = {}
    for waiter in st.queue.values() if holding else ():
        in_its_way = _in_the_way_of(st, waiter, holding)
        if in_its_way:
            st.awaiting_end.add(waiter.id)
            named.update((session.id, session) for session in in_its_way)
    return named


def _only_holds_room(st: State, session: Session) -> bool:
    """Return whether ``session`` holds memory that it neither uses nor can give up. A refusal of
    long ago does not count: a page-out is tried first. A stopped process is left alone: somebody
    has stopped it to let it go on later."""
    if session.id not in st.cramped or session.spared:
        return False
    if session.ends_ns is None and session.backoff_until_ns <= st.now_ns:
        return False
    moves = session.op is not None and session.op.doing is not PAGING_OUT
    used = session.want is not NOTHING or session.at_work or session.leaving
    return session.residency is RESIDENT and not (used or moves or session.stuck or session.stopped)


def _in_the_way_of(st: State, waiter: Session, holding: list[Session]) -> list[Session]:
    """Return the part of ``holding`` without which ``waiter`` could be admitted once its turn
    comes; nothing if it need not wait for them, or if their end would not help it."""
    if waiter.stopped or waiter.stuck:
        return []
    wanted_bytes = room.least_bytes(st, waiter, alone=True)
    room_bytes = st.capacity_bytes - _stays_bytes(st, waiter, holding)
    held_bytes = sum(session.resident_bytes for session in holding)
    if wanted_bytes > room_bytes:
        return []
    found = []
    for session in holding:
        if wanted_bytes <= room_bytes - held_bytes:
            break
        found.append(session)
        held_bytes -= session.resident_bytes
    return found


def _stays_bytes(st: State, waiter: Session, holding: list[Session]) -> int:
    """Return the memory of others that stays in the GPU for any other reason. The memory of runners
    does not count: their turns end."""
    return sum(
        other.resident_bytes
        for other in st.sessions.values()
        if other.want is not RUNNING
        and (other.problem is Notice.PAGE_OUT_REFUSED or other.stuck or must_stay(other))
        and other is not waiter
        and other not in holding
    )


def _begin(st: State, session: Session) -> int:
    """Begin the countdown of ``session`` and return when it ends."""
    after_ns = st.config.end_immovable_after_ns
    st.notify(session, Notice.ENDING, _shortage(session))
    st.tell(session, "others wait for its memory: ended in {} if that lasts", StorySpan(after_ns))
    ends_ns = st.now_ns + after_ns
    session.end_at(ends_ns)
    return ends_ns


def _last_step(st: State, session: Session, ends_ns: int) -> bool:
    """End ``session`` if it was tried once more after its time, else have it tried now; return
    whether it was ended."""
    if session.cramped_ns < ends_ns:
        session.try_not_before(st.now_ns)
        return False
    waited = format_period_s(st.config.end_immovable_after_ns / NS_PER_S)
    cause = f"others have waited {waited} for its unused GPU memory. {_shortage(session)}"
    session.end_ordered()
    session.back_off(st.config, st.now_ns, longest=True)
    st.actions.append(EndSession(session=session.id, cause=cause))
    st.tell(session, "ended: {}", cause)
    return True


def _shortage(session: Session) -> str:
    """Return why it cannot be paged out, and how much RAM would do, in words for its user."""
    return session.problem_detail.removeprefix(f"{Reason.NO_JOB_MEMORY.value}: ")


def end_refused(st: State, event: ev.EndRefused) -> None:
    session = st.known(event.session)
    if session is None:
        return
    session.cannot_be_ended()
    st.tell(session, "not ended after all: {}", event.why)


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {ev.EndRefused: end_refused}
