"""Room in the GPU: whether there is enough for a session, and who must go out for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kiwi_core.sched import orders
from kiwi_core.sched.needs import unknown, wish_bytes
from kiwi_core.sched.session import Doing, Home
from kiwi_core.states import AntiThrash, Notice
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.sched.session import Session
    from kiwi_core.sched.state import State


class Room(Enum):
    READY = "ready"
    COMING = "coming"
    """Others are on their way out."""
    SHORT = "short"
    """Not to be had from those that do not hold the lease."""


@dataclass(slots=True)
class Survey:
    """Who could go out now, and who would have to but cannot."""

    victims: list[Session] = field(default_factory=list)
    gain_bytes: int = 0
    refusing: Session | None = None
    over_budget: Session | None = None


def wanted_bytes(st: State, session: Session) -> int:
    """What shall be free for ``session`` (its own included) before it may run."""
    footprint = session.footprint_bytes
    if session.leaving:
        return footprint
    if st.anti_thrash is AntiThrash.OFF:
        if session.home is not Home.OUT:
            return session.counted_claim_bytes
        expected = footprint
    else:
        expected = max(wish_bytes(session, st.total_bytes), footprint)
    with_margin = expected + st.margin_bytes + session.extra_room_bytes
    return max(footprint, min(with_margin, st.capacity_bytes))


def _least_bytes(st: State, session: Session, alone: bool) -> int:
    """Below this it shall not run; compare ``wanted_bytes``. Alone, one of unknown needs makes do
    with half of what there is: a neighbour that cannot be moved must neither keep everybody out
    for ever, nor leave a newcomer so little that it runs out of memory at once."""
    protects = st.anti_thrash is not AntiThrash.OFF and not session.leaving
    if alone and protects and unknown(session, st.total_bytes):
        return max(session.footprint_bytes, st.capacity_bytes // 2)
    if alone or session.leaving:
        return session.footprint_bytes
    if not protects:
        return wanted_bytes(st, session)
    with_margin = session.need_bytes + st.margin_bytes + session.extra_room_bytes
    return max(session.footprint_bytes, min(with_margin, st.capacity_bytes))


def coming_bytes(st: State) -> int:
    """What page-outs under way will free; hung ones do not count."""
    return sum(
        session.counted_claim_bytes
        for session in st.ops.values()
        if session.op is not None
        and session.op.doing is Doing.PAGING_OUT
        and not session.op.overdue
    )


def _queued_ns(session: Session) -> int:
    return session.queued_ns


def survey(st: State, short_bytes: int, beside: Session | None = None) -> Survey:
    """Pick victims until ``short_bytes`` are gained, or all there are."""
    found = Survey()
    host_bytes = st.host_claimed_bytes
    if short_bytes <= 0:
        return found
    waiters = sorted(st.waiting_in.values(), key=_queued_ns) if st.waiting_in else ()
    for victim in st.policy.victims(st.idle.values(), waiters):
        if victim is beside or victim.op is not None:
            continue
        if victim.leaving or victim.home is Home.LOST:
            continue
        if victim.backoff_until_ns > st.now_ns:
            st.wake_at(victim.backoff_until_ns)
            found.refusing = found.refusing or victim
        elif host_bytes + victim.resident_bytes > st.host_budget_bytes:
            found.over_budget = found.over_budget or victim
        else:
            found.victims.append(victim)
            found.gain_bytes += victim.counted_claim_bytes
            host_bytes += victim.resident_bytes
            if found.gain_bytes >= short_bytes:
                break
    return found


def make_room(st: State, session: Session, alone: bool) -> tuple[Room, Survey | None]:
    """Order whatever frees enough for ``session``. What it may grow by is left out where it cannot
    be had; ``alone`` (nobody holds the lease or is on the way in) what it needs as well."""
    held_bytes = session.counted_claim_bytes
    short_bytes = wanted_bytes(st, session) - held_bytes - st.free_bytes
    if short_bytes <= 0:
        return Room.READY, None
    coming = coming_bytes(st)
    found = survey(st, short_bytes - coming, beside=session)
    if coming + found.gain_bytes < short_bytes:
        least_bytes = _least_bytes(st, session, alone) - held_bytes - st.free_bytes
        if coming + found.gain_bytes < least_bytes:
            return Room.SHORT, found
        if not found.victims and not coming:
            return Room.READY, found
    evict(st, found, f"room for {session.id}")
    return Room.COMING, found


def evict(st: State, found: Survey, cause: str) -> None:
    for victim in found.victims:
        orders.page_out(st, victim, cause)


def blocked_by(st: State, session: Session, found: Survey) -> tuple[Notice, str]:
    """Why room cannot be had, in words that everybody may read (no names)."""
    if (victim := found.over_budget) is not None:
        must_bytes, left_bytes = victim.resident_bytes, st.host_budget_bytes - st.host_claimed_bytes
        words = f"{format_bytes(must_bytes)} of another session would have to go to system RAM, "
        words += f"which can take {format_bytes(max(0, left_bytes))} more"
        return Notice.BLOCKED_HOST_MEMORY, words
    if (victim := found.refusing) is not None:
        return Notice.BLOCKED_REFUSED, victim.problem_detail or "another session cannot be moved"
    if any(other.stuck for other in st.ops.values()):
        return Notice.BLOCKED_REFUSED, "a driver call on another session hangs"
    words = f"it needs {format_bytes(session.footprint_bytes)}; programs outside Kiwi hold "
    words += f"{format_bytes(st.outside_bytes)} of {format_bytes(st.total_bytes)}"
    return Notice.BLOCKED_OUTSIDE, words
