"""Room in the GPU: whether there is enough for a session, and how many to page out for it.

The policy says in which order (``Policy.victims``). Three figures say how much is enough, each with
the session's own memory included:

- ``wanted_bytes``: with a margin and the possible growth. Ordinary sessions are paged out for it.
- ``minimum_bytes``: with less the session must not run. It waits while even all page-outs together
  free less; with at least this much it runs.
- ``forced_bytes``: without margin and possible growth. The page-out of residues (``is_residue``) is
  slow, so they are paged out only until this much is free (or ``minimum_bytes``, if that is more).
"""

from __future__ import annotations

from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.model.state import PlaceKept
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import orders, tenancy
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay, why_it_stays
from kiwi_core.states import Notice, Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kiwi_core.sched.model.state import State


RESIDUE_SHARE: Final = 8
"""Contexts and memory that a library cannot own take at most one eighth of the GPU: 1 GB of 8 GB,
and few GPUs are smaller."""


class RoomState(Enum):
    READY = "ready"
    COMING = "coming"
    """Other sessions are being paged out."""
    SHORT = "short"
    """Sessions that do not hold the lease cannot free enough."""


_queued_ns = attrgetter("queued_ns")
_until_ns = attrgetter("until_ns")


class VictimSurvey(Struct, eq=False):
    """The sessions that can be paged out now, and those that would have to be but cannot."""

    victims: list[Session] = []
    gain_bytes: int = 0
    host_bytes: int = 0
    """System RAM that the victims may take."""
    refusing: Session | None = None
    staying: Session | None = None
    """A session whose memory must stay (``unguarded_and_stopped.must_stay``)."""
    kept: PlaceKept | None = None
    """The first place to be free again of those that are kept for their sessions."""
    over_budget: Session | None = None
    """A session whose memory system RAM cannot take."""


def is_residue(st: State, session: Session) -> bool:
    """Return whether all that ``session`` has in the GPU is what its library cannot move
    (contexts). The driver can move it, but slowly, and would have to at each turn. So it is moved
    only where room is really lacking. A larger remainder is taken for the rest of an interrupted
    page-out."""
    return session.partly_in and session.resident_bytes <= st.total_bytes // RESIDUE_SHARE


def wanted_bytes(st: State, session: Session) -> int:
    """Return the room that ``session`` should have before it runs."""
    footprint = session.footprint_bytes
    if session.leaving:
        return footprint
    if not st.protects:
        if session.residency is not Residency.PAGED_OUT:
            return session.counted_claim_bytes
        expected = footprint
    else:
        expected = session.wish_bytes(session.need_bytes, st.total_bytes)
    wanted = expected + st.margin_bytes + session.extra_room_bytes
    if wanted > st.capacity_bytes:
        wanted = st.capacity_bytes
    return wanted if wanted > footprint else footprint


def minimum_bytes(st: State, session: Session, alone: bool) -> int:
    """Return the room below which ``session`` must not run. Alone, a session of unknown need makes
    do with half of the capacity: a neighbour that cannot be moved must neither keep all others out
    for ever, nor leave a newcomer so little that it runs out of memory at once."""
    protects = st.protects and not session.leaving
    if alone and protects and session.is_unknown(st.total_bytes):
        return max(session.footprint_bytes, st.capacity_bytes // 2)
    if alone or session.leaving:
        return session.footprint_bytes
    if not protects:
        return wanted_bytes(st, session)
    with_margin = session.need_bytes + st.margin_bytes + session.extra_room_bytes
    return max(session.footprint_bytes, min(with_margin, st.capacity_bytes))


def forced_bytes(st: State, session: Session) -> int:
    """Return the room for which residues, too, are moved: without the margin, and without the
    possible growth of a session of unknown need."""
    expected = footprint = session.footprint_bytes
    if st.protects and not (session.leaving or session.is_unknown(st.total_bytes)):
        expected = session.need_bytes
    forced = expected + session.extra_room_bytes
    if forced > st.capacity_bytes:
        forced = st.capacity_bytes
    return forced if forced > footprint else footprint


def coming_bytes(st: State) -> int:
    """Return what page-outs in progress will free; hung ones do not count."""
    if not st.ops:
        return 0
    return sum(session.counted_claim_bytes for session in _making_room(st))


def _making_room(st: State) -> Iterator[Session]:
    for session in st.ops.values():
        op = session.op
        if op is not None and op.doing is Doing.PAGING_OUT and not op.overdue:
            yield session


def survey(
    st: State,
    short_bytes: int,
    beside: Session | None = None,
    residues_for_bytes: int | None = None,
    *,
    keeps: bool = False,
) -> VictimSurvey:
    """Pick victims until they free ``short_bytes``, or until there are no more. Residues are moved
    only for ``residues_for_bytes``, a part of it (default: all of it). With ``keeps`` the places
    that are kept from ``beside`` (``rules.tenancy``) are left alone."""
    found = VictimSurvey()
    if residues_for_bytes is None:
        residues_for_bytes = short_bytes
    if short_bytes <= 0 or not (st.idle or st.waiting_in or st.waiting_partly_in):
        return found
    waiters: Sequence[Session] = ()
    if st.waiting_in or st.waiting_partly_in:
        both = chain(st.waiting_in.values(), st.waiting_partly_in.values())
        waiters = sorted(both, key=_queued_ns)
    spared: list[Session] = []
    for victim in st.policy.victims(st.idle.values(), waiters):
        if victim is beside or victim.op is not None:
            continue
        if victim.leaving or victim.residency is Residency.LOST:
            continue
        if st.knows_owned and is_residue(st, victim):
            spared.append(victim)
            continue
        if keeps and beside is not None and (kept := tenancy.kept_place(st, victim, beside)):
            found.kept = min(found.kept or kept, kept, key=_until_ns)
            continue
        _take(st, found, victim)
        if found.gain_bytes >= short_bytes:
            return found
    for victim in spared:
        if found.gain_bytes >= residues_for_bytes:
            break
        _take(st, found, victim)
    return found


def _take(st: State, found: VictimSurvey, victim: Session) -> None:
    if must_stay(victim):
        found.staying = found.staying or victim
        return
    if victim.backoff_until_ns > st.now_ns:
        st.wake_at(victim.backoff_until_ns)
        found.refusing = found.refusing or victim
        return
    left_bytes = st.host_budget_bytes - st.host_claimed_bytes - found.host_bytes
    if victim.resident_bytes > left_bytes:
        found.over_budget = found.over_budget or victim
        return
    found.victims.append(victim)
    found.gain_bytes += victim.counted_claim_bytes
    found.host_bytes += victim.resident_bytes


def _awaits_reading(st: State, beside: Session) -> bool:
    """Return whether another session gave up the lease and may have left more in the GPU than
    recorded. This wait is bounded: a driver that does not answer must not keep sessions out, and a
    page-in is verified anyway."""
    awaits = False
    for session in st.unread.values():
        until_ns = session.left_ns + st.config.reading_patience_ns
        if session is beside or session.want is Want.RUNNING or session.op is not None:
            continue
        if until_ns > st.now_ns:
            st.wake_at(until_ns)
            awaits = True
    return awaits


def make_room(st: State, session: Session, alone: bool) -> tuple[RoomState, VictimSurvey | None]:
    """Order the page-outs that free enough for ``session``. If that cannot be freed, room without
    its possible growth suffices. If the session would be ``alone`` (no session holds the lease or
    is being brought in), room for what it already has suffices."""
    if st.unread and _awaits_reading(st, session):
        return RoomState.COMING, None
    has_bytes = session.counted_claim_bytes + st.capacity_bytes - st.claimed_bytes
    short_bytes = wanted_bytes(st, session) - has_bytes
    if short_bytes <= 0:
        return RoomState.READY, None
    needs_bytes = minimum_bytes(st, session, alone) - has_bytes
    forces_bytes = max(needs_bytes, forced_bytes(st, session) - has_bytes)
    comes_bytes = coming_bytes(st)
    lacking_bytes = short_bytes - comes_bytes
    found = survey(st, lacking_bytes, session, forces_bytes - comes_bytes, keeps=True)
    if found.kept is not None and found.gain_bytes < lacking_bytes:
        # The waiter waits while that place is kept: look again when that may be over.
        st.keep_place(found.kept)
        if (reorders_at_ns := st.policy.reorders_at_ns(st)) is not None:
            st.wake_at(reorders_at_ns)
        return RoomState.COMING, found
    if comes_bytes + found.gain_bytes < short_bytes:
        if comes_bytes + found.gain_bytes < needs_bytes:
            return RoomState.SHORT, found
        if not found.victims and not comes_bytes:
            return RoomState.READY, found
    evict(st, found, f"room for {session.id}")
    for victim in found.victims:
        st.goes_out_for(victim, session)
    return RoomState.COMING, found


def evict(st: State, found: VictimSurvey, cause: str) -> None:
    for victim in found.victims:
        orders.page_out(st, victim, cause)


def make_up(st: State, session: Session) -> None:
    """Make up room for a page-in in progress if a reading has shown since that others hold more
    than was recorded when it was ordered. The pager waits for the room: order the page-outs now,
    not when the pager has given up."""
    restore_bytes = session.footprint_bytes - session.resident_bytes
    free_bytes = st.capacity_bytes - st.resident_bytes
    free_bytes += sum(one.resident_bytes for one in _making_room(st))
    lacking_bytes = restore_bytes - free_bytes
    margin_bytes = 0 if session.leaving else st.margin_bytes  # as ``wanted_bytes``
    found = survey(st, lacking_bytes + margin_bytes, session, residues_for_bytes=lacking_bytes)
    evict(st, found, f"room for {session.id}, which is on its way in")


def blocked_by(st: State, session: Session, found: VictimSurvey) -> tuple[Notice, str]:
    """Return why there is no room, in words that all users may read (no names)."""
    if (victim := found.over_budget) is not None:
        can_bytes = max(0, st.host_budget_bytes - st.host_claimed_bytes)
        words = f"{format_bytes(victim.resident_bytes)} of another session would have to go to "
        words += f"system RAM, which can take {format_bytes(can_bytes)} more"
        return Notice.BLOCKED_HOST_MEMORY, words
    if found.refusing is not None:
        return refused_by(found.refusing)
    if (victim := found.staying) is not None:
        return why_it_stays(victim)
    if stuck := [other for other in st.ops.values() if other.stuck]:
        halted = next((other.stopped for other in stuck if other.stopped), "")
        words = (
            f"another session is {halted}" if halted else "a driver call on another session hangs"
        )
        return Notice.BLOCKED_REFUSED, words
    words = f"it needs {format_bytes(session.footprint_bytes)}; programs outside Kiwi hold "
    words += f"{format_bytes(st.outside_bytes)} of {format_bytes(st.total_bytes)}"
    if any(other.residency is Residency.LOST for other in st.sessions.values()):
        words += ", or a program whose GPU memory is lost, until it is restarted"
    return Notice.BLOCKED_OUTSIDE, words


def refused_by(session: Session) -> tuple[Notice, str]:
    """Return that ``session`` could not be moved or suspended, and why, in words for all users."""
    words = session.problem_detail or "another session cannot be moved"
    return Notice.BLOCKED_REFUSED, words.removesuffix(".")
