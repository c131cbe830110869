"""The end of sessions whose turn is over, that occupy room for which others wait, and that cannot
be paged out.

The driver keeps paged-out memory in the process that owns it. A session whose own job or container
has too little RAM (``Session.cramped_ns``) therefore keeps its memory in the GPU: there is no other
place for it. Where ``Config.end_immovable_after_ns`` is set, such a session is ended. For that long
without a break its page-outs were refused for that reason, it was not its turn (it idled, ran on
past its turn, or its process was stopped), and others waited that cannot have enough room before it
has gone. At the end of that time a page-out has to be refused once more. Sessions are ended one at
a time: after each one, others may do without the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import EndSession
from kiwi_core.sched.model.memory import RESIDENT, SUSPENDED
from kiwi_core.sched.model.operations import PAGING_OUT
from kiwi_core.sched.model.turn import NOTHING, RUNNING
from kiwi_core.sched.rules import room
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Notice
from kiwi_core.units import NS_PER_S, format_period_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State

    Hindrance = tuple[Session, list[Session]]
    """A waiter and the sessions in its way."""


def tend(st: State) -> None:
    """Begin and break off countdowns, and end a session whose time has come. The settle pass calls
    this while some session is cramped or a waiter gets room by an end."""
    occupants = _occupants(st) if st.config.end_immovable_after_ns else []
    counted = [session for session in occupants if _refused_lately(st, session)]
    hindrances = _hindrances(st, counted)
    for session in _named(hindrances):
        if session.ends_ns is None:
            _begin(st, session)
    if len(counted) < len(occupants):
        # Others are tried again first. Meanwhile a countdown goes on that would go on if they stay.
        hindrances += _hindrances(st, occupants)
    named = _named(hindrances)
    for session in st.cramped.values():
        if session not in named and not session.ended:
            session.end_at(None)
    st.awaiting_end = {waiter.id for waiter, found in hindrances if _is_to_end(found)}
    _end_in_turn(st, named)


def _end_in_turn(st: State, named: list[Session]) -> None:
    """End the first of ``named`` whose time has come. Only one is ended at a time."""
    under_way = any(session.ended for session in st.cramped.values())
    for session in named:
        if (ends_ns := session.ends_ns) is None:
            continue
        if ends_ns > st.now_ns:
            st.wake_at(ends_ns)
        elif not under_way and session.op is None:
            under_way = _last_step(st, session, ends_ns)


def _named(hindrances: list[Hindrance]) -> list[Session]:
    """Return each session that is a hindrance, once."""
    return list({session.id: session for _, found in hindrances for session in found}.values())


def _is_to_end(sessions: list[Session]) -> bool:
    return any(session.ends_ns is not None for session in sessions)


def _refused_lately(st: State, session: Session) -> bool:
    """Return whether a refusal still counts; otherwise a page-out is tried first. While its process
    is stopped it is not tried again, except at the end."""
    lately = session.backoff_until_ns > st.now_ns or session.fixed
    return lately or session.ends_ns is not None


def _hindrances(st: State, occupants: list[Session]) -> list[Hindrance]:
    """Return the part of ``occupants`` that has to go before a waiter can have enough room, for
    each waiter that there is such a part for."""
    waiters = st.queue.values() if occupants else ()
    in_the_way = [(waiter, _in_the_way_of(st, waiter, occupants)) for waiter in waiters]
    return [(waiter, found) for waiter, found in in_the_way if found]


def _occupants(st: State) -> list[Session]:
    """Return the sessions that only occupy room, in the order in which they are ended: idle ones
    first, the least recently used before the others, then those whose process is stopped, then
    runners, the youngest before the others because it loses least."""
    idle = [one for one in st.policy.victims(st.idle.values(), ()) if one.id in st.cramped]
    others = sorted((s for s in st.cramped.values() if s.id not in st.idle), key=_work_to_lose)
    return [one for one in (*idle, *others) if _stays_in(one) and _may_be_over(one)]


def _work_to_lose(session: Session) -> tuple[bool, int]:
    return not session.stopped, -session.granted_ns


def _stays_in(session: Session) -> bool:
    """Return whether nothing but the refused page-outs keeps the memory of ``session`` where it is,
    as far as is known."""
    if session.spared or session.leaving or session.stuck:
        return False
    return session.op is None or session.op.doing is PAGING_OUT


def _may_be_over(session: Session) -> bool:
    """Return whether ``session`` occupies its room without a right to it. It does if it idles or
    its process is stopped. A runner may: see ``_is_over``. Without a gate, memory is not tried to
    be moved while its program runs or is stopped."""
    if session.want is NOTHING and not session.stopped:
        return session.residency is RESIDENT and not session.at_work
    if session.want is RUNNING or session.turn_ending or session.stopped:
        return session.guarded and session.residency in (RESIDENT, SUSPENDED)
    return False


def _is_over(st: State, session: Session, waiter: Session) -> bool:
    """Return whether ``session`` is not running, or should have made way for ``waiter`` by now."""
    if session.want is not RUNNING:
        return True
    return st.protects and st.policy.turn_ends_at_ns(st, session, waiter) <= st.now_ns


def _in_the_way_of(st: State, waiter: Session, candidates: list[Session]) -> list[Session]:
    """Return the part of ``candidates`` without which ``waiter`` could be admitted once its turn
    comes; nothing if it need not wait for them, or if their end would not help it."""
    if waiter.stopped or waiter.stuck or waiter.turn_ending:
        return []
    occupants = [session for session in candidates if _is_over(st, session, waiter)]
    needs_bytes = room.minimum_bytes(st, waiter, alone=True)
    room_bytes = st.capacity_bytes - _stays_bytes(st, waiter, occupants)
    occupied_bytes = sum(session.resident_bytes for session in occupants)
    if needs_bytes > room_bytes:
        return []
    found = []
    for session in occupants:
        if needs_bytes <= room_bytes - occupied_bytes:
            break
        found.append(session)
        occupied_bytes -= session.resident_bytes
    return found


def _stays_bytes(st: State, waiter: Session, occupants: list[Session]) -> int:
    """Return the memory of others that stays in the GPU for any other reason. The memory of runners
    does not count, because their turns end, unless they went past theirs and may not be ended."""
    return sum(
        other.resident_bytes
        for other in st.sessions.values()
        if (other.want is not RUNNING or other.spared)
        and (other.problem is Notice.PAGE_OUT_REFUSED or other.stuck or must_stay(other))
        and other is not waiter
        and other not in occupants
    )


def _begin(st: State, session: Session) -> None:
    after_ns = st.config.end_immovable_after_ns
    st.notify(session, Notice.ENDING, session.shortage)
    st.tell(session, "others wait for its memory: ended in {!t} if that lasts", after_ns)
    session.end_at(st.now_ns + after_ns)


def _last_step(st: State, session: Session, ends_ns: int) -> bool:
    """End ``session`` if it was tried once more after its time, else have it tried now; return
    whether it was ended."""
    if session.cramped_ns < ends_ns:
        session.try_not_before(st.now_ns)
        session.forget_refusals_while_stopped()
        return False
    waited = format_period_s(st.config.end_immovable_after_ns / NS_PER_S)
    cause = f"others have waited {waited} for {_what(session)}. {session.shortage}"
    session.end_ordered()
    session.back_off(st.config, st.now_ns, longest=True)
    st.actions.append(EndSession(session=session.id, cause=cause))
    st.tell(session, "ended: {}", cause)
    return True


def _what(session: Session) -> str:
    if session.stopped:
        return "its GPU memory, and its process is stopped"
    return "its GPU memory past its turn" if session.want is RUNNING else "its unused GPU memory"


def end_refused(st: State, event: ev.EndRefused) -> None:
    session = st.known(event.session)
    if session is None:
        return
    session.cannot_be_ended()
    st.tell(session, "not ended after all: {}", event.why)


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {ev.EndRefused: end_refused}
