"""Tests that the fake pager passes the contract of the real backends, and of its scripts."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from blocking import Blocking, Loop
from contract import PagerContract, moved, refused, soon_ns
from fake_pager import FakePager, Hang, Lose, Raise, Refuse, Slow

from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Lost, Target
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, SessionId

_numbers = itertools.count(1)
LOOP = Loop()


def fake_pager(total_bytes: int, **more: Any) -> FakePager:
    """Return a fake pager whose calls block."""
    return Blocking(FakePager(total_bytes, **more), LOOP)  # type: ignore[return-value]


class FakeSession:
    """A session whose contents cannot change; the digest says whether they are in the GPU."""

    def __init__(self, pager: FakePager, size_bytes: int) -> None:
        number = next(_numbers)
        self.target = Target(SessionId(f"s{number}"), ProcessRef(number, 0))
        self._pager, self._size_bytes = pager, size_bytes
        self._touching = False
        if size_bytes:
            pager.start(self.target.session, size_bytes)

    def digest(self) -> str:
        seen = self._pager.observe(self.target)
        assert seen.residency is Residency.RESIDENT, "it would wait for ever"
        return f"{self.target.session}: {seen.resident_bytes}"

    def touch(self) -> None:
        self._touching = True

    def touched(self, within_s: float = 0.0) -> bool:
        assert self._touching
        return self._pager.residency(self.target.session) is Residency.RESIDENT

    def finish_touch(self) -> None:
        assert self.touched()
        self._touching = False

    def kill(self) -> None:
        self._pager.end(self.target.session)


class FakeWorld:
    unit_bytes = MIB
    memory_bytes = 100 * MIB
    overhead_bytes = 0
    residue_bytes = slack_bytes = 0
    sizes_seen = True

    def __init__(self, *, copy_bytes_per_s: int | None = None) -> None:
        self.pager = fake_pager(self.memory_bytes, copy_bytes_per_s=copy_bytes_per_s)

    def start(self, size_bytes: int) -> FakeSession:
        return FakeSession(self.pager, size_bytes)

    def hold_outside(self, free_bytes: int) -> None:
        self.pager.hold_outside(self.memory_bytes - free_bytes)

    def refuse_page_out(self, session: FakeSession) -> None:
        fault = Refuse(Reason.LOCK_TIMEOUT)
        self.pager.script("page_out", fault, session=session.target.session)

    def break_page_in(self, session: FakeSession) -> None:
        self.pager.script("page_in", Lose(), session=session.target.session)

    def free_bytes(self) -> int:
        return self.pager.free_bytes


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


class TestFake(PagerContract):
    pass


def test_a_hang_lasts_until_released_and_stops_nobody_else(world: FakeWorld) -> None:
    one, other = world.start(MIB), world.start(MIB)
    hang = Hang()
    world.pager.script("page_out", hang, session=one.target.session)
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.append(world.pager.page_out(one.target, soon_ns()))
    )
    thread.start()
    assert hang.entered.wait(60)
    moved(world.pager.page_out(other.target, soon_ns()))
    assert not outcomes
    assert world.pager.observe(one.target).residency is Residency.RESIDENT
    hang.release()
    thread.join(60)
    assert moved(outcomes[0]).bytes_moved == MIB


def test_faults_are_met_once_each_in_their_order(world: FakeWorld) -> None:
    session = world.start(MIB)
    world.pager.script("page_out", Refuse(Reason.UNSUPPORTED, "why"), Raise(RuntimeError("bug")))
    assert refused(world.pager.page_out(session.target, soon_ns()), Reason.UNSUPPORTED).detail
    with pytest.raises(RuntimeError, match="bug"):
        world.pager.page_out(session.target, soon_ns())
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.pager.calls == [("page_out", session.target.session)] * 3


def test_slow_and_bandwidth_take_time() -> None:
    pager = fake_pager(100 * MIB, copy_bytes_per_s=100 * MIB)
    session = FakeSession(pager, 10 * MIB)
    pager.script("page_in", Slow(0.1))
    out = moved(pager.page_out(session.target, soon_ns()))
    back = moved(pager.page_in(session.target, soon_ns()))
    assert out.elapsed_ns >= 99_000_000
    assert back.elapsed_ns >= 199_000_000


def test_killed_while_its_memory_is_moved() -> None:
    pager = fake_pager(100 * MIB, copy_bytes_per_s=10 * MIB)
    session = FakeSession(pager, 100 * MIB)
    outcomes = []
    thread = threading.Thread(
        target=lambda: outcomes.append(pager.page_out(session.target, soon_ns()))
    )
    thread.start()
    limit = time.monotonic() + 60
    while pager.residency(session.target.session) is not Residency.SUSPENDED:
        assert time.monotonic() < limit
        time.sleep(0.001)
    session.kill()
    assert pager.free_bytes == 100 * MIB
    thread.join(60)
    refused(outcomes[0], Reason.GONE)
    assert pager.free_bytes == 100 * MIB


def test_room_that_comes_in_time_is_waited_for() -> None:
    pager = fake_pager(10 * MIB, room_wait_ns=60_000_000_000)
    session = FakeSession(pager, 6 * MIB)
    moved(pager.page_out(session.target, soon_ns()))
    pager.hold_outside(6 * MIB)
    timer = threading.Timer(0.05, pager.hold_outside, [0])
    timer.start()
    moved(pager.page_in(session.target, soon_ns()))
    timer.join()


def test_a_loss_in_mid_operation(world: FakeWorld) -> None:
    session = world.start(MIB)
    world.pager.script("page_out", Lose("the driver said so"))
    assert world.pager.page_out(session.target, soon_ns()) == Lost("the driver said so")
    assert world.pager.free_bytes == world.memory_bytes
