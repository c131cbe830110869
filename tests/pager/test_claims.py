"""Tests that room for a restore is claimed where programs outside Kiwi may take it first.

On the emulated driver, as on real ones, a restore that finds too little memory keeps what it has
taken and can never be repeated.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from blocking import Blocking, Loop
from cuda_processes import Worker
from cuda_program import CudaProgram

import kiwi_emulator as emulator
from kiwi_core.gpu import processes
from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu
from kiwi_core.movers.pool import MoverPool
from kiwi_core.pager.api import Lost, Moved, Refused, Target
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.states import Reason
from kiwi_core.units import MIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kiwi_core.gpu.looks import GpuLook

SIZE_MIB = 24


class Stage:
    """One program as a session, one outside Kiwi, and a pager. ``after_a_look`` runs after the
    pager has read the free memory. ``calls`` holds the names of the workers' calls."""

    def __init__(self, path: Path, context_bytes: int = 2 * MIB) -> None:
        libraries = emulator.build()
        emulator.create_state(path, emulator.parse_gpus("1x64MiB"))
        emulator.set_context_bytes(path, context_bytes)
        self.environment = emulator.environment(path, libraries)
        self.path = path
        self.loop = Loop()
        self.movers = MoverPool(environment=self.environment)
        self.loop.loop.call_soon_threadsafe(self.movers.start)
        self.outsider = Worker(self.environment)
        self.program = CudaProgram(self.environment, SIZE_MIB * MIB)
        self.contents = self.program.digest()
        self.after_a_look: Callable[[], None] = lambda: None
        self.calls: list[str] = []
        self.named = True
        ref = processes.ref_of(self.program.pid)
        assert ref is not None
        self.target = Target(SessionId("s"), ref)
        self.pager = Blocking(self._pager(), self.loop)

    def _pager(self) -> SessionPager:
        stage, gpu = self, emulator.books(self.path).gpus[0]

        class Watched(RemoteGpu):
            async def look(self, pids: Sequence[int] = ()) -> GpuLook:
                seen = await super().look(pids)
                stage.after_a_look()
                return replace(seen, names_users=stage.named)

            def doubt_rows(self, doubted: bool) -> None:
                pass

        call = self.movers.call

        async def counted(name: str, *args: object, deadline_s: float) -> object:
            self.calls.append(name)
            return await call(name, *args, deadline_s=deadline_s)

        self.movers.call = counted  # type: ignore[method-assign]
        made = Watched(self.movers, gpu.uuid, gpu.total_bytes)
        return SessionPager(RemoteDriver(self.movers), made)

    def take(self, mib: int) -> None:
        self.outsider.do(f"q = alloc({mib * MIB})")

    def take_the_rest(self) -> None:
        """Take all but the MiB that the driver needs to move a program out."""
        self.outsider.do(f"rest = alloc(ck(driver.cuMemGetInfo())[0] - {MIB})")
        gpu = emulator.books(self.path).gpus[0]
        assert MIB <= gpu.total_bytes - gpu.used_bytes < 2 * MIB

    def out(self) -> None:
        assert isinstance(self.pager.page_out(self.target, soon_ns()), Moved)
        self.calls.clear()

    def back(self) -> Moved | Refused | Lost:
        outcome: Moved | Refused | Lost = self.pager.page_in(self.target, soon_ns())
        return outcome

    def close(self) -> None:
        self.program.close()
        self.outsider.close()
        self.loop.run(self.movers.close())
        self.loop.close()


def soon_ns() -> int:
    return time.monotonic_ns() + 30 * NS_PER_S


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "gpus")
    yield made
    made.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Stage]:
    """A program outside Kiwi has left to the session what that has, to the last MiB. Contexts are
    so large that NVML does not report all of them, as on a real GPU."""
    made = Stage(tmp_path / "gpus", 8 * MIB)
    made.outsider.do("init()")
    made.take_the_rest()
    yield made
    made.close()


def test_memory_taken_after_the_reading_costs_a_wait_and_not_the_contents(stage: Stage) -> None:
    stage.outsider.do("init()")
    stage.out()
    taken = []

    def grab() -> None:
        if not taken:
            taken.append(stage.take(40))

    stage.after_a_look = grab
    outcome = stage.back()
    assert isinstance(outcome, Refused), outcome
    assert outcome.reason is Reason.NO_ROOM
    assert taken
    assert "restore" not in stage.calls
    stage.outsider.do("free(q)")
    outcome = stage.back()
    assert isinstance(outcome, Moved), outcome
    assert stage.program.digest() == stage.contents


def test_a_session_that_filled_what_others_left_comes_back(full: Stage) -> None:
    """The context of a claim would need some of the room."""
    before = emulator.books(full.path).gpus[0].used_bytes
    for _ in range(2):
        full.out()
        outcome = full.back()
        assert isinstance(outcome, Moved), outcome
    assert full.program.digest() == full.contents
    assert emulator.books(full.path).gpus[0].used_bytes == before


@pytest.mark.parametrize("late", [False, True])
def test_it_does_not_come_back_into_less_than_it_left(full: Stage, late: bool) -> None:
    """``late``: the other program takes a MiB after the look that found the room."""
    full.out()
    looks = []

    def grab() -> None:
        looks.append(late)
        if len(looks) == 2:  # the first one is at the session
            full.take(1)

    if late:
        full.after_a_look = grab
    else:
        full.take(1)
    outcome = full.back()
    assert isinstance(outcome, Refused), outcome
    assert outcome.reason is Reason.NO_ROOM
    assert ("claimed_restore" in full.calls) is late
    assert "restore" not in full.calls
    full.outsider.do("free(q)")
    outcome = full.back()
    assert isinstance(outcome, Moved), outcome
    assert full.program.digest() == full.contents


def test_a_claim_is_given_back(stage: Stage) -> None:
    stage.outsider.do("init()")
    stage.take(4)
    before = emulator.books(stage.path).gpus[0].used_bytes
    stage.out()
    assert isinstance(stage.back(), Moved)
    assert "claimed_restore" in stage.calls
    assert stage.program.digest() == stage.contents
    assert emulator.books(stage.path).gpus[0].used_bytes == before


def test_no_claim_where_nobody_is_outside(stage: Stage) -> None:
    """A claim needs a context, which costs time and memory."""
    stage.out()
    assert isinstance(stage.back(), Moved)
    assert "restore" in stage.calls
    assert "claimed_restore" not in stage.calls


def test_where_nobody_can_be_named_room_is_claimed(stage: Stage) -> None:
    emulator.set_quirk(stage.path, "no_process_rows")
    stage.named = False
    stage.out()
    assert isinstance(stage.back(), Moved)
    assert "claimed_restore" not in stage.calls, "the GPU is as empty as it ever was"
    stage.outsider.do("init()")
    stage.take(20)
    stage.out()
    assert isinstance(stage.back(), Moved)
    assert "claimed_restore" in stage.calls
    assert stage.program.digest() == stage.contents
