"""Room on demand: a program found no GPU memory for an allocation and asks for some.

A request counts as needed until the memory is seen to be held (``Session.need_bytes``), so
everything that makes room for a runner works for it, too. This module answers requests: there is
room, or there will be none, because the whole GPU is too small or because of a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.actions import RoomDenied, RoomMade
from kiwi_core.sched.model.session import RoomRequest
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import room
from kiwi_core.states import AntiThrash, Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.sched import events as ev
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


def wanted(st: State, event: ev.RoomWanted) -> None:
    """Record a request. A repeated one (its program reconnected) is the same and is answered
    anew."""
    session = st.sessions.get(event.session)
    if session is None or session.gone or session.leaving:
        st.ignore()
        return
    drop(st, session, event.request)
    if session.residency is Residency.LOST:
        _deny(st, session, event.request, "Its GPU memory is lost.")
        return
    if (why := _beyond_the_gpu(st, session, event.bytes)) is not None:
        _deny(st, session, event.request, why)
        return
    wanted = RoomRequest(session, event.request, event.bytes, st.now_ns)
    st.room_requests[session.id, event.request] = wanted
    session.asked_bytes += wanted.bytes
    st.refresh(session)
    st.tell(session, "asks for {} more", format_bytes(wanted.bytes))


def no_longer_wanted(st: State, event: ev.RoomNoLongerWanted) -> None:
    session = st.sessions.get(event.session)
    if session is None or not drop(st, session, event.request):
        st.ignore()


def drop(st: State, session: Session, request: int) -> bool:
    wanted = st.room_requests.pop((session.id, request), None)
    if wanted is None:
        return False
    session.asked_bytes -= wanted.bytes
    st.refresh(session)
    return True


def drop_all(st: State, session: Session) -> None:
    for of, request in tuple(st.room_requests):
        if of == session.id:
            drop(st, session, request)


def seen(st: State, session: Session, began_ns: int) -> None:
    """Drop the requests promised before ``began_ns``, when the session's memory was read: they are
    held by now, or no longer wanted."""
    for wanted in tuple(st.room_requests.values()):
        if (
            wanted.session is session
            and wanted.promised_ns is not None
            and wanted.promised_ns < began_ns
        ):
            drop(st, session, wanted.request)


def tend(st: State) -> None:
    for wanted in tuple(st.room_requests.values()):
        if wanted.promised_ns is None:
            _tend(st, wanted)


def _tend(st: State, wanted: RoomRequest) -> None:
    session = wanted.session
    if (why := _beyond_the_gpu(st, session, wanted.bytes)) is not None:
        _give_up(st, wanted, why)  # programs outside have grown
        return
    if session.want is Want.QUEUED or session.op is not None:
        return  # the room is made before its turn comes
    if session.residency is Residency.SUSPENDED:
        return  # its burst ended while it was suspended: it is resumed first
    kept_bytes = session.footprint_bytes
    for other in st.room_requests.values():
        if other.session is session and other.promised_ns is not None:
            kept_bytes += other.bytes  # it may have taken that since its memory was last read
    others_bytes = st.claimed_bytes - session.counted_claim_bytes
    short_bytes = wanted.bytes + kept_bytes + others_bytes - st.capacity_bytes
    if short_bytes <= 0:
        wanted.promised_ns = st.now_ns
        st.actions.append(RoomMade(session=session.id, request=wanted.request))
        st.tell(session, "has room for {} more", format_bytes(wanted.bytes))
        return
    coming_bytes = room.coming_bytes(st)
    found = room.survey(st, short_bytes - coming_bytes, beside=session)
    room.evict(st, found, f"{session.id} asks for more")
    if coming_bytes + found.gain_bytes >= short_bytes:
        return
    if session.want is Want.RUNNING and st.anti_thrash is AntiThrash.ON:
        # Those that run beside it no longer fit together with it: one of them all has to wait,
        # maybe this one.
        st.runners_outgrow(st.outgrown or len(st.runners) > 1)
        makes_way = any(runner.guarded for runner in st.runners.values())
        if st.holders > 1 and (makes_way or st.holders > len(st.runners)):
            return
    # A refusal, an operation in progress or a runner may pass.
    until_ns = wanted.asked_ns + st.config.room_patience_ns
    if until_ns > st.now_ns:
        st.wake_at(until_ns)
        return
    why = "others that are at work hold the rest of the GPU"
    if found.over_budget is not None or found.refusing is not None or not st.holders:
        _, why = room.blocked_by(st, session, found)
    _give_up(st, wanted, f"No room could be made: {why}.")


def _beyond_the_gpu(st: State, session: Session, size_bytes: int) -> str | None:
    """Return why even the whole GPU would be too small, or ``None``."""
    # Without what was promised lately: the last reading of its memory may include that already.
    kept_bytes = session.footprint_bytes
    if size_bytes + kept_bytes <= st.capacity_bytes:
        return None
    return (
        f"It has {format_bytes(kept_bytes)} and asks for {format_bytes(size_bytes)} more; "
        f"the GPU has {format_bytes(st.capacity_bytes)} for programs."
    )


def _give_up(st: State, wanted: RoomRequest, detail: str) -> None:
    drop(st, wanted.session, wanted.request)
    _deny(st, wanted.session, wanted.request, detail)


def _deny(st: State, session: Session, request: int, detail: str) -> None:
    st.actions.append(RoomDenied(session=session.id, request=request, detail=detail))
    st.tell(session, "gets no more memory: {}", detail)
