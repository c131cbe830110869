"""Handlers for readings of the driver, NVML and the system, and for the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.policy import make
from kiwi_core.sched.rules import bursts, growth
from kiwi_core.states import NOT_FREE, Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


def memory(st: State, event: ev.MemoryObserved) -> None:
    began_ns = st.now_ns if event.began_ns is None else event.began_ns
    st.see_owned(bool(event.owned))
    for session_id, resident_bytes in event.resident_bytes.items():
        session = st.sessions.get(session_id)
        if session is None or session.op is not None or session.gone:
            continue
        if session.moved_at_ns > began_ns:
            continue  # at which point of the operation its memory was read is unknown
        if session_id in event.at_large and session.residency in NOT_FREE:
            # It should be suspended, but runs, as the driver reports: it had no GPU memory, so the
            # driver could not lock it, and has some now (or another program unlocked it). If it is
            # not its turn, the settle pass suspends it again.
            session.was_resumed()
            st.tell(session, "uses the GPU though it was to wait: the driver does not hold it")
        out = session.residency is Residency.PAGED_OUT and session.paged_out_bytes
        if session_id in event.nowhere and out:
            session.was_resumed()
            st.tell(session, "has nothing in system RAM any more: its program was replaced")
        session.was_read(resident_bytes, session_id in event.owned)
        session.residue_seen(event.taken.get(session_id, 0), st.config, st.now_ns)
        # Its last bursts say something about its needs if the GPU worked in them, or if they left
        # allocations.
        used = session_id in event.allocated or event.busy.get(session_id)
        session.learn_from_use(used, began_ns)
        unsized = session_id in event.unsized
        session.sees_size(not unsized)
        if not unsized:
            _learn(st, session, session.resident_bytes)
        st.memory_read(session, began_ns)
        st.refresh(session)
        if session.asked_bytes:
            growth.seen(st, session, began_ns)
    for session_id, busy in event.busy.items():
        session = st.sessions.get(session_id)
        if session is None:
            continue
        session.seen_at_work(busy)
        if session.want is Want.RUNNING:
            session.seen_in_turn(busy, st.now_ns)
            idle_ns = st.now_ns - session.busy_at_ns
            if not busy and session.lingering and idle_ns >= st.config.lingering_idle_ns:
                bursts.end(st, session, "what it left running has been idle on the GPU")
    # What is used outside Kiwi can be told only while nothing moves: the bytes of an operation that
    # just began or ended would count as outside. A hung operation counts in full.
    if began_ns >= st.moved_at_ns and all(session.stuck for session in st.ops.values()):
        held_bytes = st.resident_bytes
        for hung in st.ops.values():
            held_bytes += hung.counted_claim_bytes - hung.resident_bytes
        st.all_read(began_ns, max(0, st.total_bytes - event.free_bytes - held_bytes))


def need(st: State, event: ev.NeedReported) -> None:
    session = st.known(event.session)
    if session is not None:
        _learn(st, session, min(event.need_bytes, st.total_bytes))
        st.refresh(session)


def _learn(st: State, session: Session, held_bytes: int) -> None:
    """Learn from a reading. Memory that was first read after its last burst ended was held in that
    burst, too, although the next one has begun meanwhile."""
    in_burst = session.want is Want.RUNNING or session.mid_burst
    of_last = session.unread and not session.mid_burst and not session.attained_ns
    session.learn_from_reading(held_bytes, st.total_bytes, in_burst, of_last)


def host_budget(st: State, event: ev.HostBudgetObserved) -> None:
    st.see_host_budget(event.budget_bytes)


def settings(st: State, event: ev.SettingsChanged) -> None:
    if event.tq_ns is not None:
        st.turn_settings = replace(st.turn_settings, tq_ns=event.tq_ns)
    if event.policy is not None and event.policy != st.policy.name:
        st.policy = make(event.policy)
        for session in st.sessions.values():  # the previous policy's values mean nothing now
            session.queues_on(0)
    if event.anti_thrash is not None and event.anti_thrash is not st.anti_thrash:
        st.set_anti_thrash(event.anti_thrash)
        for session in st.sessions.values():
            st.refresh(session)
    st.policy.adopt(st)


def deadline(st: State, event: ev.DeadlinePassed) -> None:
    """Record nothing: the settle pass checks the time."""


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {
    ev.MemoryObserved: memory,
    ev.NeedReported: need,
    ev.HostBudgetObserved: host_budget,
    ev.SettingsChanged: settings,
    ev.DeadlinePassed: deadline,
}
