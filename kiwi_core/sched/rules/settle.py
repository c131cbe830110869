"""The settle pass: it runs once after every event and decides everything that can be decided.

Handlers only record what happened. The order matters: bursts that are over end first, then the
mode follows from the remaining sessions, then waiters get what is free, then runners are protected.
What nobody waits for comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import (
    bursts,
    growth,
    hints,
    kept_out,
    orders,
    residues,
    turns,
)
from kiwi_core.states import AntiThrash, Notice, Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.state import State


def settle(st: State) -> None:
    if st.lingerers:
        _end_lingerers(st)
    if st.kept_out:
        kept_out.tend(st)
    _choose_mode(st)
    if st.queue:
        turns.admit(st)
    if st.runners:
        turns.shelter(st)
    if st.room_requests:
        growth.tend(st)
    if st.outgrown and st.runners:
        _choose_mode(st)
        turns.thin_out(st)
    if st.misplaced:
        _tend_misplaced(st)
    if st.hinted is not None:
        hints.tend(st, st.hinted)
    residues.tend(st)


def _end_lingerers(st: State) -> None:
    """End lingering bursts at the end of their quantum where it is unknown whether left-over
    threads still use the GPU. (Where it is known, the observation ended the burst already.)"""
    for session in tuple(st.lingerers.values()):
        if session.want is not Want.RUNNING or not session.lingering:
            st.drop_lingerer(session)
        elif session.busy is None:
            end_ns = session.granted_ns + st.quantum_ns(session)
            st.wake_at(end_ns)
            if end_ns <= st.now_ns:
                bursts.end(st, session, "left-over threads, perhaps at work", st.now_ns)
                session.may_work_on()  # if it has no gate, its memory stays: nothing holds it
                st.drop_lingerer(session)


def _choose_mode(st: State) -> None:
    crowded = st.active > 1 and (
        st.outgrown or st.active_need_bytes + st.margin_bytes > st.capacity_bytes
    )
    automatic = st.anti_thrash is AntiThrash.ON
    serialise = crowded if automatic else st.anti_thrash is AntiThrash.ALWAYS
    if serialise is st.serialised:
        return
    st.serialise(serialise)
    if serialise and len(st.runners) > 1:
        why = "together they need more than the GPU has"
        if not automatic:
            why = "anti-thrash is set to always"
        for runner in st.runners.values():
            st.notify(runner, Notice.SERIALISING, why)
            st.tell(runner, "from now on one at a time: {}", why)


def _tend_misplaced(st: State) -> None:
    """Resume sessions that are suspended without need, and suspend those that run though they were
    not to (a restore that had hung has succeeded after all)."""
    for session in tuple(st.misplaced.values()):
        suspended = session.residency is Residency.SUSPENDED
        backs_off = session.backoff_until_ns > st.now_ns
        if session.may_not_come_yet(st.now_ns) if suspended else backs_off:
            st.wake_at(session.backoff_until_ns)
        elif suspended:
            why = "it leaves Kiwi" if session.leaving else "an idle process is not kept waiting"
            orders.resume(st, session, why)
        else:
            orders.suspend(st, session, "it is not its turn")
