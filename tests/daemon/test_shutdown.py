"""Tests of which sessions a daemon pages in when it ends, and in which order."""

from __future__ import annotations

import asyncio
import time

import virtual_time
from fake_pager import FakePager, Hang

from kiwi_core.daemon.sessions.shutdown import LOOKS_AT_ONCE, NO_ANSWER, bring_back
from kiwi_core.pager.api import Observation, ProcessRef, Target
from kiwi_core.states import Residency
from kiwi_core.units import MIB, NS_PER_S, SessionId

ALL = [Target(SessionId(f"k{n}"), ProcessRef(n, n)) for n in range(1, 3 * LOOKS_AT_ONCE)]


class Recorded(FakePager):
    """A pager that records the largest number of simultaneous looks."""

    def __init__(self) -> None:
        super().__init__(total_bytes=1024 * MIB)
        self.looking = self.most_looking = 0

    async def observe(self, target: Target) -> Observation:
        self.looking += 1
        self.most_looking = max(self.most_looking, self.looking)
        await asyncio.sleep(0)
        self.looking -= 1
        return await super().observe(target)

    @property
    def paged_in(self) -> list[SessionId]:
        return [session for what, session in self.calls if what == "page_in"]


async def out(pager: FakePager, *targets: Target) -> None:
    for target in targets:
        pager.start(target.session, resident_bytes=4 * MIB)
        await pager.page_out(target, time.monotonic_ns() + 60 * NS_PER_S)


def test_only_who_is_out_is_paged_in_and_in_the_order_that_was_given() -> None:
    async def story() -> None:
        pager = Recorded()
        those = [ALL[70], ALL[3], ALL[40]]
        await out(pager, *those)
        rest = [target for target in ALL if target not in those]
        assert await bring_back(pager, [*those, *rest], time.monotonic() + 60) == {}
        assert pager.paged_in == [target.session for target in those]
        assert all(pager.residency(t.session) is Residency.RESIDENT for t in those)
        assert 1 < pager.most_looking <= LOOKS_AT_ONCE

    virtual_time.run(story())


def test_a_session_that_hangs_is_left_behind_and_the_next_ones_come_back() -> None:
    async def story() -> None:
        pager = Recorded()
        hanging, next_one = ALL[0], ALL[1]
        await out(pager, hanging, next_one)
        hang = Hang()
        pager.script("page_in", hang, session=hanging.session)
        left = await bring_back(pager, [hanging, next_one], time.monotonic() + 60)
        assert left == {hanging.session: NO_ANSWER}
        assert pager.residency(next_one.session) is Residency.RESIDENT
        hang.release()

    virtual_time.run(story())
