"""Tests of the cheap queries that a daemon makes after every event, against the whole view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Reason, Residency, SessionState
from kiwi_core.units import GIB, NS_PER_S, SessionId

A, B, NOBODY = SessionId("a"), SessionId("b"), SessionId("nobody")


def test_a_suspended_session_without_memory_is_only_recorded() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
        scheduler.handle(ev.LeaseRequested(session=session, burst=1), 2)
    assert not scheduler.only_recorded
    (_, order) = scheduler.handle(ev.DeadlinePassed(), 3 * NS_PER_S)
    assert isinstance(order, Suspend)
    scheduler.handle(ev.Suspended(op=order.op, resident_bytes=0), 4 * NS_PER_S)
    assert scheduler.only_recorded == (A,)
    seen = ev.MemoryObserved(free_bytes=7 * GIB, resident_bytes={A: GIB}, at_large=[A])
    scheduler.handle(seen, 5 * NS_PER_S)
    assert not scheduler.only_recorded


def test_paged_out_memory_of_a_replaced_program_counts_no_longer() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    scheduler.handle(
        ev.SessionJoined(session=A, residency=Residency.PAGED_OUT, paged_out_bytes=5 * GIB), 1
    )
    nowhere = ev.MemoryObserved(free_bytes=8 * GIB, resident_bytes={A: 0}, nowhere=[A])
    scheduler.handle(nowhere, 3)
    assert scheduler.view(3).sessions[0].record.paged_out_bytes == 0
    assert not scheduler.handle(ev.LeaseRequested(session=A, burst=1), 4)[1:], "granted at once"


def test_a_gpu_is_crowded_once_the_memory_of_all_does_not_fit() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    scheduler.handle(ev.SessionJoined(session=A), 1)
    seen = ev.MemoryObserved(free_bytes=GIB, resident_bytes={A: 7 * GIB})
    scheduler.handle(seen, 2)
    assert not scheduler.crowded
    out = ev.SessionJoined(session=B, residency=Residency.PAGED_OUT, paged_out_bytes=GIB)
    scheduler.handle(out, 3)
    assert scheduler.crowded, "nothing would be left to spare"


def test_holders_waiting_and_settings_are_those_of_the_view() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    now_ns = 0

    def feed(event: ev.Event, step_ns: int = 1) -> list[object]:
        nonlocal now_ns
        now_ns += step_ns
        actions: list[object] = list(scheduler.handle(event, now_ns))
        view = scheduler.view(now_ns)
        assert sorted(scheduler.holders) == sorted(view.holders)
        assert scheduler.waiting == bool(view.queue)
        assert {s.id: scheduler.state_of(s.id) for s in view.sessions} == {
            s.id: s.state for s in view.sessions
        }
        assert scheduler.state_of(NOBODY) is None
        ahead = scheduler.view(now_ns, ahead=True)
        assert scheduler.queue(now_ns) == (ahead.holders, ahead.queue)
        assert scheduler.outside_bytes == view.outside_bytes
        there = [s.id for s in view.sessions if s.state is not SessionState.LOST]
        assert list(scheduler.not_lost) == there
        assert (scheduler.tq_ns, scheduler.anti_thrash) == (view.tq_ns, view.anti_thrash)
        return actions

    for session in (A, B):
        feed(ev.SessionJoined(session=session))
    assert not scheduler.holders
    feed(ev.LeaseRequested(session=A, burst=1))
    assert scheduler.holders == (A,)
    assert not scheduler.waiting
    feed(ev.MemoryObserved(free_bytes=3 * GIB, resident_bytes={A: 5 * GIB}))
    feed(ev.LeaseRequested(session=B, burst=1))
    assert scheduler.waiting
    actions = feed(ev.DeadlinePassed(), 2 * NS_PER_S)
    (order,) = (action for action in actions if isinstance(action, PageOut))
    assert scheduler.holders == (A,)  # until it is known to be stopped
    feed(ev.PagedOut(op=order.op, moved_bytes=5 * GIB, elapsed_ns=NS_PER_S), NS_PER_S)
    assert scheduler.holders == (B,)
    feed(ev.SettingsChanged(tq_ns=7 * NS_PER_S, anti_thrash=AntiThrash.ALWAYS))
    assert scheduler.tq_ns == 7 * NS_PER_S
    feed(ev.BurstEnded(session=B, burst=1))
    feed(ev.DeadlinePassed(), NS_PER_S)
    feed(ev.SessionLost(session=A))
    assert scheduler.state_of(A) is None, "it is gone, though its operation has not reported"


def test_the_record_of_a_session_says_what_it_wants() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)

    def wants(session: SessionId) -> tuple[bool, bool]:
        known = scheduler.session(session)
        assert known is not None
        return known.waits, known.in_burst

    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
    assert wants(A) == (False, False)
    scheduler.handle(ev.LeaseRequested(session=A, burst=1), 2)
    scheduler.handle(ev.LeaseRequested(session=B, burst=1), 3)
    assert (wants(A), wants(B)) == ((False, True), (True, False))
    actions = scheduler.handle(ev.DeadlinePassed(), 3 * NS_PER_S)
    (order,) = (action for action in actions if isinstance(action, Suspend))
    scheduler.handle(ev.Suspended(op=order.op, resident_bytes=0), 4 * NS_PER_S)
    assert wants(A) == (False, True), "suspended in mid-burst"
    out = ev.SessionJoined(session=A, residency=Residency.PAGED_OUT, paged_out_bytes=GIB)
    scheduler.handle(out, 5 * NS_PER_S)
    scheduler.handle(ev.SessionDetached(session=A), 6 * NS_PER_S)
    assert wants(A) == (False, False), "it waits for its memory only"
    assert scheduler.session(NOBODY) is None
    scheduler.handle(ev.SessionLost(session=B), 7 * NS_PER_S)
    assert scheduler.session(B) is None


def test_the_floor_is_what_a_swap_costs_and_a_little_at_least() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    assert scheduler.view(0).floor_ns == NS_PER_S  # the quantum, shorter than the two seconds
    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
    scheduler.handle(ev.SettingsChanged(tq_ns=30 * NS_PER_S), 2)
    assert scheduler.view(2).floor_ns == DEFAULTS.min_run_ns
    seen = ev.MemoryObserved(free_bytes=2 * GIB, resident_bytes={A: 6 * GIB})
    scheduler.handle(seen, 3)
    (order,) = scheduler.handle(ev.ReleaseRequested(session=A), 4)
    assert isinstance(order, PageOut)
    moved = ev.PagedOut(op=order.op, moved_bytes=6 * GIB, elapsed_ns=6 * NS_PER_S)
    scheduler.handle(moved, 5)
    view = scheduler.view(6)
    assert view.swap_round_trip_ns is not None
    assert view.floor_ns == view.swap_round_trip_ns > 10 * NS_PER_S


def _one_out(**settings: object) -> Scheduler:
    """Return a scheduler in which A is paged out, and B is a newcomer without memory."""
    config = replace(DEFAULTS, **settings)  # type: ignore[arg-type]
    scheduler = Scheduler(8 * GIB, config=config, host_budget_bytes=64 * GIB, checks=True)
    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
    scheduler.handle(ev.MemoryObserved(free_bytes=7 * GIB, resident_bytes={A: GIB}), 2)
    (order,) = scheduler.handle(ev.ReleaseRequested(session=A), 3)
    assert isinstance(order, PageOut)
    assert scheduler.may_release(A), "asked again while it goes out: that is all right"
    assert scheduler.out_or_moving(A)
    scheduler.handle(ev.PagedOut(op=order.op, moved_bytes=GIB, elapsed_ns=1), 4)
    return scheduler


def test_when_a_session_may_be_released_and_when_that_has_an_effect() -> None:
    scheduler = _one_out()
    assert scheduler.may_release(A)
    assert scheduler.out_or_moving(A)
    scheduler.handle(ev.LeaseRequested(session=A, burst=1), 5)
    assert not scheduler.may_release(A)
    assert not scheduler.may_release(NOBODY)
    assert scheduler.out_or_moving(NOBODY)
    scheduler = Scheduler(8 * GIB, host_budget_bytes=0, checks=True)
    scheduler.handle(ev.SessionJoined(session=A), 1)
    scheduler.handle(ev.MemoryObserved(free_bytes=7 * GIB, resident_bytes={A: GIB}), 2)
    scheduler.handle(ev.ReleaseRequested(session=A), 3)
    assert scheduler.may_release(A)
    assert not scheduler.out_or_moving(A), "system RAM has no room for it"


def test_why_a_hint_leads_to_nothing() -> None:
    scheduler = _one_out()
    assert scheduler.hint_hindrance(A, 5) == ""
    assert "no such session" in scheduler.hint_hindrance(NOBODY, 5)
    assert "is in the GPU" in scheduler.hint_hindrance(B, 5)
    scheduler.handle(ev.LeaseRequested(session=B, burst=1), 6)
    assert "in use" in scheduler.hint_hindrance(A, 7)
    assert "in a burst" in scheduler.hint_hindrance(B, 7)
    scheduler.handle(ev.UseExpected(session=A), 8)
    scheduler.handle(ev.BurstEnded(session=B, burst=1), 9)
    (order,) = scheduler.handle(ev.UseExpected(session=A), 10)
    assert isinstance(order, PageIn)
    assert "in a burst, or its memory moves" in scheduler.hint_hindrance(A, 11)


def test_hints_can_be_switched_off() -> None:
    scheduler = _one_out(bring_back=False)
    assert "switched off" in scheduler.hint_hindrance(A, 5)
    assert scheduler.handle(ev.UseExpected(session=A), 5) == []


def test_the_history_is_asked_for_what_changed() -> None:
    scheduler = _one_out()
    assert scheduler.history_serial == 2
    (out,) = scheduler.history(0, 5)
    assert (out.id, out.serial, out.bytes_moved, out.ok, out.ended_ns) == (1, 2, GIB, True, 4)
    assert scheduler.history(2, 5) == ()
    scheduler.handle(ev.LeaseRequested(session=B, burst=1), 6)
    (held,) = scheduler.history(2, 7)
    assert (held.session, held.kind.value, held.ended_ns) == (B, "held", None)
    assert scheduler.remembered() == {A, B}
    scheduler.handle(ev.SessionLost(session=A), 8)
    assert scheduler.remembered() == {A, B}, "its entry is still kept"


@pytest.mark.parametrize("most", [1, 3])
def test_the_history_is_bounded(most: int) -> None:
    scheduler = _one_out(history_max=most)
    for burst in range(1, 10):
        scheduler.handle(ev.LeaseRequested(session=B, burst=burst), 2 * burst + 10)
        scheduler.handle(ev.BurstEnded(session=B, burst=burst), 2 * burst + 11)
    assert [e.began_ns for e in scheduler.history(0, 99)] == [28, 26, 24][:most][::-1]


def test_what_a_gate_asks() -> None:
    """Calls may pass while the session holds the lease, and when its memory is lost."""
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    assert scheduler.may_compute(NOBODY)
    assert not scheduler.at_rest(NOBODY)
    assert not scheduler.believed_in(NOBODY)
    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
        assert not scheduler.may_compute(session)
        assert scheduler.at_rest(session)
        assert scheduler.believed_in(session)
    scheduler.handle(ev.LeaseRequested(session=A, burst=1), 2)
    assert scheduler.may_compute(A)
    assert not scheduler.at_rest(A)
    seen = ev.MemoryObserved(free_bytes=3 * GIB, resident_bytes={A: 5 * GIB})
    scheduler.handle(seen, 3)
    scheduler.handle(ev.LeaseRequested(session=B, burst=1), 4)
    assert not scheduler.may_compute(B), "it waits"
    assert not scheduler.at_rest(B)
    actions = scheduler.handle(ev.DeadlinePassed(), 3 * NS_PER_S)
    (order,) = (action for action in actions if isinstance(action, PageOut))
    assert not scheduler.may_compute(A), "its turn is over"
    assert not scheduler.believed_in(A)
    scheduler.handle(ev.PageOutLost(op=order.op), 4 * NS_PER_S)
    assert scheduler.may_compute(A), "nothing is left to protect"
    scheduler.handle(ev.SessionDetached(session=B), 5 * NS_PER_S)
    assert not scheduler.at_rest(B)


def test_the_recorded_paged_out_bytes() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    assert scheduler.out_bytes(NOBODY) is None
    out = {"residency": Residency.PAGED_OUT, "paged_out_bytes": 2 * GIB}
    scheduler.handle(ev.SessionJoined(session=A, **out), 1)  # type: ignore[arg-type]
    scheduler.handle(ev.SessionJoined(session=B), 1)
    assert (scheduler.out_bytes(A), scheduler.out_bytes(B)) == (2 * GIB, None)
    scheduler.handle(ev.MemoryObserved(free_bytes=8 * GIB, resident_bytes={B: 0}), 2)
    scheduler.handle(ev.LeaseRequested(session=A, burst=1), 3)
    assert scheduler.out_bytes(A) is None  # a page-in is in progress


def test_a_session_seen_as_held_that_is_out_comes_in_again() -> None:
    """An earlier daemon was killed in a page-out, which the driver finished after the reading."""
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, checks=True)
    scheduler.handle(ev.MemoryObserved(free_bytes=5 * GIB), 0)
    held = ev.SessionJoined(
        session=A, residency=Residency.SUSPENDED, resident_bytes=3 * GIB, mid_burst=True, burst=1
    )
    (order,) = scheduler.handle(held, NS_PER_S)
    assert isinstance(order, Resume)
    failed = ev.ResumeFailed(op=order.op, reason=Reason.DRIVER, paged_out_bytes=3 * GIB)
    scheduler.handle(failed, 2 * NS_PER_S)
    wake_ns = scheduler.next_deadline_ns()
    assert wake_ns is not None
    (order,) = scheduler.handle(ev.DeadlinePassed(), wake_ns)
    assert isinstance(order, PageIn)
    assert order.need_bytes == 3 * GIB


def test_a_look_from_before_a_move_says_nothing() -> None:
    """The reading may have been taken during the move."""
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, checks=True)
    out = ev.SessionJoined(session=A, residency=Residency.PAGED_OUT, paged_out_bytes=GIB)
    scheduler.handle(out, 1)
    scheduler.handle(ev.LeaseRequested(session=A, burst=1), 2)
    actions = scheduler.handle(ev.MemoryObserved(free_bytes=8 * GIB, resident_bytes={}), 3)
    (order,) = (action for action in actions if isinstance(action, PageIn))
    scheduler.handle(ev.PagedIn(op=order.op, moved_bytes=GIB, elapsed_ns=1), 10)
    assert not scheduler.believed_in(A, since_ns=9)
    assert scheduler.believed_in(A, since_ns=10)
    assert scheduler.may_compute(A)
    actions = scheduler.handle(out, 11)  # the reading that began afterwards
    assert not scheduler.believed_in(A)
    assert not scheduler.may_compute(A)
    assert [type(action) for action in actions] == [PageIn], "it comes back by itself"
