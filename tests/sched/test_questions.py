"""The cheap questions that a daemon asks after every event, against the whole view."""

from __future__ import annotations

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageOut, Suspend
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, NS_PER_S, SessionId

A, B = SessionId("a"), SessionId("b")


def test_one_that_could_not_be_held_is_loose_until_it_has_memory() -> None:
    scheduler = Scheduler(8 * GIB, host_budget_bytes=64 * GIB, tq_ns=NS_PER_S, checks=True)
    for session in (A, B):
        scheduler.handle(ev.SessionJoined(session=session), 1)
        scheduler.handle(ev.LeaseRequested(session=session, burst=1), 2)
    assert not scheduler.loose
    (_, order) = scheduler.handle(ev.DeadlinePassed(), 3 * NS_PER_S)
    assert isinstance(order, Suspend)
    scheduler.handle(ev.Suspended(op=order.op, resident_bytes=0), 4 * NS_PER_S)
    assert scheduler.loose == (A,)
    seen = ev.MemoryObserved(free_bytes=7 * GIB, resident_bytes={A: GIB}, at_large=[A])
    scheduler.handle(seen, 5 * NS_PER_S)
    assert not scheduler.loose


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
