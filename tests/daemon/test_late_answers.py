"""Tests of a library that answers late: its report on a gate that it must open does not count."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from kiwi_core.daemon.links import calls
from kiwi_core.daemon.links.calls import PagerCall
from kiwi_core.daemon.links.link import Link
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Moved, Refused
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.states import Reason, Residency
from kiwi_core.wire.pager import PagerAction, PagerDo, PagerDone, PagerOutcome

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connection import Connection

HELD, RESIDENT = LibraryReport(Residency.SUSPENDED), LibraryReport(Residency.RESIDENT)


class Sent(list[PagerDo]):
    """A connection that keeps the orders that it should send."""

    def send(self, message: PagerDo) -> None:
        self.append(message)


def gate(sent: Sent) -> Link:
    """Return the link of a program whose library is only a gate."""
    me = processes.ref_of(os.getpid())
    assert me is not None
    numbers = iter(range(1, 100))
    made = Link(me, os.getuid(), owns=False, next_op=lambda: next(numbers))
    made.attach(cast("Connection", sent))
    made.handle_report(RESIDENT)
    return made


def done(order: PagerDo) -> PagerDone:
    return PagerDone(op=order.op, outcome=PagerOutcome.MOVED)


async def too_late(link: Link, action: PagerAction) -> None:
    call = PagerCall(action, time.monotonic_ns())
    link.begin(call)
    outcome: Any = await call.outcome
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.LOCK_TIMEOUT


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ANSWER_GRACE_S", 0.01)


def test_a_hold_that_is_answered_late_is_no_hold() -> None:
    """The order ``free`` is on its way, and the driver must not take the program before it
    arrives."""

    async def story() -> None:
        sent = Sent()
        link = gate(sent)
        await too_late(link, PagerAction.HOLD)
        hold, free = sent
        assert (hold.action, free.action) == (PagerAction.HOLD, PagerAction.FREE)
        link.handle_report(HELD)
        link.done(done(hold))
        assert link.report.residency is Residency.RESIDENT, "it opens its gate next"
        link.handle_report(RESIDENT)
        link.done(done(free))
        await held_again(link, sent)

    asyncio.run(story())


def test_a_gate_that_opens_late_is_open_from_the_order_on() -> None:
    async def story() -> None:
        sent = Sent()
        link = gate(sent)
        link.handle_report(HELD)
        await too_late(link, PagerAction.FREE)
        assert link.report.residency is Residency.RESIDENT
        link.handle_report(HELD)
        assert link.report.residency is Residency.RESIDENT
        link.done(done(sent[0]))
        await held_again(link, sent)

    asyncio.run(story())


def test_a_new_connection_has_no_order_left_from_the_old_one() -> None:
    """The order may be lost with the old connection; then the gate stays shut."""

    async def story() -> None:
        sent = Sent()
        link = gate(sent)
        link.handle_report(HELD)
        await too_late(link, PagerAction.FREE)
        link.lost()
        link.attach(cast("Connection", Sent()))
        link.handle_report(HELD)
        assert link.report.residency is Residency.SUSPENDED

    asyncio.run(story())


async def held_again(link: Link, sent: Sent) -> None:
    call = PagerCall(PagerAction.HOLD, time.monotonic_ns() + 10**10)
    link.begin(call)
    link.handle_report(HELD)
    link.done(done(sent[-1]))
    assert isinstance(await call.outcome, Moved)
    assert link.report.residency is Residency.SUSPENDED
