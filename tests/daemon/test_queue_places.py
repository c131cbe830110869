"""Tests of bursts: their places in the queue, of which each user has a share, and their numbers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from talker import Talker

from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.daemon.sessions.bursts import Bursts
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.peer_limits import QUEUE_PLACES
from kiwi_core.sched import events as ev
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.units import GIB, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon

UID, BURST, OWN = 1000, 7, 0


class Core:
    """A scheduler without a daemon. It keeps the sessions that were put into the queue."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(GIB, host_budget_bytes=GIB)
        self.lined_up: list[SessionId] = []

    def feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.LeaseRequested):
            self.lined_up.append(event.session)
        self.scheduler.handle(event, 1)

    def in_burst(self, record: SessionRecord) -> bool:
        known = self.scheduler.session(record.id)
        return known is not None and known.in_burst


@pytest.mark.parametrize("asked", [(BURST, OWN), (OWN, BURST), (BURST, OWN, OWN)])
def test_the_burst_of_the_client_is_lined_up_though_its_library_asks_too(
    asked: tuple[int, ...],
) -> None:
    """Otherwise no grant would reach the burst that the client waits for."""

    async def run() -> None:
        core: Any = Core()
        share = Shares()[QUEUE_PLACES]
        places = share.limit.per_user
        bursts = Bursts(core, share)
        records = [SessionRecord(SessionId(f"k{n}"), ProcessRef(n, 1), UID) for n in range(places)]
        outside = SessionRecord(SessionId("outside"), ProcessRef(places, 1), UID)
        for record in (*records, outside):
            core.feed(ev.SessionJoined(session=record.id))
        holder = SessionRecord(SessionId("holder"), ProcessRef(places + 1, 1), UID + 1)
        core.feed(ev.SessionJoined(session=holder.id))
        bursts.request(holder, BURST)
        for record in records:
            bursts.request(record, BURST)
        assert len(core.lined_up) == places + 1
        for client_burst in asked:
            bursts.request(outside, client_burst)
        assert len(core.lined_up) == places + 1, "it waits outside"
        bursts.withdraw(records[0], BURST)
        bursts.after(Step(ev.DeadlinePassed(), [], [], 1))
        await asyncio.sleep(0)
        assert core.lined_up[places + 1 :] == [outside.id]
        assert outside.client_burst == BURST

    asyncio.run(run())


def test_a_burst_that_was_reported_as_over_is_not_taken_for_the_next_one(
    start: Callable[..., Daemon],
) -> None:
    """The scheduler gets the end after a look. A client that loses its connection before that, and
    is in its next burst when it is back, has the GPU for that one."""
    path = start("1x64MiB").sockets()[0]
    with Talker(path) as first, Talker(path) as second:
        first.hello(role="session")
        first.say("acquire", burst=1)
        first.until("granted")
        first.say("end-burst", burst=1)
        assert first.ask("ping") == {"type": "pong"}, "the end was read"
        second.hello(role="session", burst=2, in_burst=True)
        assert second.until("granted")["burst"] == 2


def test_a_session_that_has_left_keeps_no_place() -> None:
    """Its process may join again: the new session has the same id, and waits for itself alone."""

    async def run() -> None:
        core: Any = Core()
        share = Shares()[QUEUE_PLACES]
        bursts = Bursts(core, share)
        first, holder, again = (
            SessionRecord(SessionId(name), ProcessRef(number, 1), uid)
            for name, number, uid in (("same", 1, UID), ("holder", 2, UID + 1), ("same", 1, UID))
        )
        for record in (holder, first):
            core.feed(ev.SessionJoined(session=record.id))
            bursts.request(record, BURST)
        core.feed(ev.SessionDetached(session=first.id))
        bursts.left(first)
        core.feed(ev.SessionJoined(session=again.id))
        bursts.request(again, BURST)
        bursts.recount()
        assert core.scheduler.session(again.id).waits
        assert share.used == 1

    asyncio.run(run())


def test_a_client_that_comes_back_gets_no_turn_for_a_burst_that_is_at_rest(
    start: Callable[..., Daemon],
) -> None:
    """What its cell left behind was idle, so the GPU is free for others; the client cannot know."""
    daemon = start("1x64MiB", "--idle-after", "0.1")
    path = daemon.sockets()[0]
    with Talker(path) as first, Talker(path) as second:
        first.hello(role="session")
        first.say("acquire", burst=1)
        first.until("granted")
        first.say("end-burst", burst=1, lingering=True)
        daemon.wait_for(lambda status: not status.holders, "it is idle")
        second.hello(role="session", burst=1, in_burst=True)
        assert second.ask("ping") == {"type": "pong"}, "no grant comes first"
        assert not daemon.status().holders
