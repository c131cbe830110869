"""One comes in beside another's way out, with the real library: what goes wrong on the way."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until
from worlds import PreloadedWorld

from kiwi_core import emulator
from kiwi_core.pager.api import Moved
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from worlds import RunningSession

SIZE = 36 * MIB


class Pair:
    """``into`` is out, and ``out`` has the GPU, which holds one of them only."""

    def __init__(self, world: PreloadedWorld) -> None:
        self.world = world
        self.into = world.start(SIZE)
        self.contents = [self.into.digest()]
        moved(world.pager.page_out(self.into.target, soon_ns()))
        self.out = world.start(SIZE)
        self.contents.append(self.out.digest())

    def fault(self, session: RunningSession, kind: str, skip: int, count: int = 1) -> None:
        session.get(f"__import__('owner_calls').fault({kind!r}, {skip}, {count})")

    def begin(self, within_s: float = 60.0, mark: str = "") -> None:
        self.world.pager.begin_swap(self.out.target, self.into.target, soon_ns(within_s), mark=mark)

    def until_in_the_middle(self, into_bytes: int = 6 * MIB) -> None:
        def is_so() -> bool:
            books = emulator.books(self.world.path)
            pids = (self.into.pid, self.out.pid)
            there = [books.process(pid).device_bytes.get(0, 0) for pid in pids]
            return into_bytes < there[0] < SIZE and 6 * MIB < there[1] < SIZE

        wait_until(is_so, "both are on their ways")

    def assert_as_before(self) -> None:
        self.world.set_copy_bandwidth(0)
        seen = self.world.pager.observe(self.into.target)
        assert (seen.residency, seen.paged_out_bytes) == (Residency.PAGED_OUT, SIZE)
        assert self.out.digest() == self.contents[1]

    def assert_nothing_is_lost(self) -> None:
        """Each comes in, when the other is out."""
        self.world.set_copy_bandwidth(0)
        for session, other, content in (
            (self.into, self.out, self.contents[0]),
            (self.out, self.into, self.contents[1]),
        ):
            moved(self.world.pager.page_out(other.target, soon_ns()))
            moved(self.world.pager.page_in(session.target, soon_ns()))
            assert session.digest() == content


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    world = PreloadedWorld(tmp_path / "gpus")
    yield Pair(world)
    world.close()


@pytest.mark.parametrize("kind", ["copy_out", "unmap"])
def test_a_way_out_that_breaks_off_gets_its_room_back(pair: Pair, kind: str) -> None:
    pair.fault(pair.out, kind, 14)  # of 18 pieces
    left, came = pair.world.swap(pair.out, pair.into, soon_ns())
    refused(left, Reason.DRIVER)
    refused(came, Reason.NO_ROOM)
    pair.assert_as_before()
    pair.assert_nothing_is_lost()


@pytest.mark.parametrize("kind", ["copy_in", "map"])
def test_a_way_in_that_fails_gives_back_what_it_took(pair: Pair, kind: str) -> None:
    pair.fault(pair.into, kind, 12, -1)
    left, came = pair.world.swap(pair.out, pair.into, soon_ns())
    assert moved(left).left_bytes == 0
    refused(came, Reason.DRIVER)
    assert pair.world.pager.observe(pair.into.target).paged_out_bytes == SIZE
    pair.fault(pair.into, kind, 0, 0)
    moved(pair.world.pager.page_in(pair.into.target, soon_ns()))
    assert pair.into.digest() == pair.contents[0]
    pair.assert_nothing_is_lost()


def test_who_comes_in_is_killed_in_the_middle(pair: Pair) -> None:
    pair.world.set_copy_bandwidth(20 * MIB)
    pair.begin()
    pair.until_in_the_middle()
    pair.into.kill()
    pair.world.set_copy_bandwidth(0)
    left, came = pair.world.pager.finish_swap()
    assert moved(left).left_bytes == 0
    refused(came, Reason.GONE)
    moved(pair.world.pager.page_in(pair.out.target, soon_ns()))
    assert pair.out.digest() == pair.contents[1]


def test_who_goes_out_is_killed_in_the_middle(pair: Pair) -> None:
    pair.world.set_copy_bandwidth(20 * MIB)
    pair.begin()
    pair.until_in_the_middle()
    pair.out.kill()
    left, came = pair.world.pager.finish_swap()
    refused(left, Reason.GONE)
    refused(came, Reason.NO_ROOM)
    pair.world.set_copy_bandwidth(0)
    assert pair.world.pager.observe(pair.into.target).paged_out_bytes == SIZE
    moved(pair.world.pager.page_in(pair.into.target, soon_ns()))
    assert pair.into.digest() == pair.contents[0]


def test_a_time_limit_in_the_middle(pair: Pair) -> None:
    pair.world.set_copy_bandwidth(10 * MIB)
    pair.begin(1.5)
    left, came = pair.world.pager.finish_swap()
    refused(left, Reason.DRIVER)
    refused(came, Reason.NO_ROOM)
    pair.assert_as_before()
    pair.assert_nothing_is_lost()


def test_a_way_out_whose_room_is_not_given_back_stays_out(tmp_path: Path) -> None:
    """Who came in beside it was stopped: it waits for a bounded time, and says what is."""
    world = PreloadedWorld(tmp_path / "gpus")
    try:
        world.pager = world.new_pager(
            operation_deadline_min_ns=NS_PER_S // 2, room_wait_ns=NS_PER_S
        )
        pair = Pair(world)
        pair.fault(pair.out, "copy_out", 16)
        world.set_copy_bandwidth(20 * MIB)
        mark = tmp_path / "left"
        pair.begin(mark=str(mark))
        pair.until_in_the_middle(into_bytes=26 * MIB)  # more than is free beside the other
        os.kill(pair.into.pid, signal.SIGSTOP)
        world.set_copy_bandwidth(0)
        wait_until(mark.exists, "it waited long enough")
        os.kill(pair.into.pid, signal.SIGCONT)
        left, came = world.pager.finish_swap()
        assert isinstance(left, Moved), left
        assert left.left_bytes > 0
        refused(came, Reason.NO_ROOM)
        pair.assert_nothing_is_lost()
    finally:
        world.close()
