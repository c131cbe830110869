"""Tests that the fake pager passes the contract of the real backends."""

from __future__ import annotations

import itertools

import pytest
from blocking import Blocking, Loop
from contract import PagerContract
from fake_pager import FakePager, Lose, Refuse

from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Target
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, SessionId

_numbers = itertools.count(1)
LOOP = Loop()


class FakeSession:
    """A session whose contents cannot change; the digest says whether they are in the GPU."""

    def __init__(self, pager: FakePager, size_bytes: int) -> None:
        number = next(_numbers)
        self.target = Target(SessionId(f"s{number}"), ProcessRef(number, 0))
        self._pager = pager
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

    def __init__(self) -> None:
        self.pager: FakePager = Blocking(FakePager(self.memory_bytes), LOOP)  # type: ignore[assignment]

    def start(self, size_bytes: int) -> FakeSession:
        return FakeSession(self.pager, size_bytes)

    def hold_outside(self, free_bytes: int) -> None:
        self.pager.hold_outside(self.memory_bytes - free_bytes)

    def refuse_page_out(self, session: FakeSession) -> None:
        fault = Refuse(Reason.LOCK_TIMEOUT)
        self.pager.script("page_out", fault, session=session.target.session)

    def allow_page_out(self, session: FakeSession) -> None:
        """Do nothing: the fault was for one page-out."""

    def break_page_in(self, session: FakeSession) -> None:
        self.pager.script("page_in", Lose(), session=session.target.session)

    def free_bytes(self) -> int:
        return self.pager.free_bytes


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


class TestFake(PagerContract):
    pass
