"""Tests of programs whose library is only a gate: the driver moves them while the gate is shut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import PagerContract, moved, refused, soon_ns
from cuda_processes import wait_until
from worlds import GatedWorld

from kiwi_core.pager.api import Refused
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds import SharedWorlds


@pytest.fixture
def world(shared_worlds: SharedWorlds) -> Iterator[GatedWorld]:
    with shared_worlds.lend(GatedWorld) as world:
        yield world


class TestGated(PagerContract):
    pass


def test_a_suspended_one_is_held_by_its_gate_alone(world: GatedWorld) -> None:
    session = world.start(4 * MIB)
    moved(world.pager.suspend(session.target, soon_ns()))
    assert world.state(session.pid) == "RUNNING", "the driver has nothing to do with it"
    assert session.get("library.orders") == ["hold"]
    assert world.pager.observe(session.target).residency is Residency.SUSPENDED
    moved(world.pager.resume(session.target, soon_ns()))
    assert session.get("library.orders") == ["hold", "free"]


def test_the_gate_is_shut_before_the_driver_comes_and_opens_when_it_has_gone(
    world: GatedWorld,
) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    world.hang("lock", session.pid)
    world.pager.begin("page_out", session.target, soon_ns())
    world.wait_hanging()
    assert session.get("library.orders") == ["hold"]
    assert session.get("library._held")
    world.let_go()
    moved(world.pager.finish())
    world.hang("unlock", session.pid)
    world.pager.begin("page_in", session.target, soon_ns())
    world.wait_hanging()
    assert session.get("library._held"), "it may not look through pointers yet"
    world.let_go()
    moved(world.pager.finish())
    assert session.get("library.orders") == ["hold", "free"]
    assert session.digest() == before


CHILD = (
    "from cuda_processes import Worker; child = Worker({}); child.do('init(); c = alloc(1 << 20)')"
)


def test_a_gate_that_opens_while_others_are_locked_is_shut_again(world: GatedWorld) -> None:
    """The driver must not checkpoint a program whose gate is open: a synchronise call would kill
    it."""
    session = world.start(4 * MIB)
    before = session.digest()
    session.do(CHILD)
    child = int(session.get("child.pid"))
    world.hang("lock", child)
    world.pager.begin("page_out", session.target, soon_ns())
    world.wait_hanging()
    session.do("library._open(); library.tell()")
    world.let_go()
    moved(world.pager.finish())
    assert session.get("library.orders") == ["hold", "hold"]
    assert session.get("library._held")
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before
    session.do("child.close()")


def test_one_whose_gate_cannot_be_shut_is_not_touched(world: GatedWorld) -> None:
    session = world.start(4 * MIB)
    session.do("library.__enter__()")  # a thread inside the driver
    refused(world.pager.page_out(session.target, soon_ns(1.0)), Reason.LOCK_TIMEOUT)
    assert world.state(session.pid) == "RUNNING"
    session.do("library.__exit__()")
    moved(world.pager.page_out(session.target, soon_ns()))
    moved(world.pager.page_in(session.target, soon_ns()))


def test_what_ram_cannot_take_is_not_disturbed(world: GatedWorld) -> None:
    """It is tried again and again, while it computes."""
    pager = world.new_pager()
    parts = "dataclasses.replace(paging._parts, host_available_bytes=lambda pids: 3 << 20)"
    pager.worker.do(f"paging._parts = {parts}")
    session = world.start(4 * MIB)
    answer = refused(pager.page_out(session.target, soon_ns()), Reason.NO_HOST_MEMORY)
    assert "3 MiB left for it" in answer.detail
    assert session.get("library.orders") == []


@pytest.mark.parametrize("operation", ["lock", "checkpoint"])
def test_what_the_driver_refuses_opens_the_gate_again(world: GatedWorld, operation: str) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    fault = "lock_timeout" if operation == "lock" else "checkpoint_fail"
    world.faults.set(fault, pid=session.pid)
    reason = Reason.LOCK_TIMEOUT if operation == "lock" else Reason.DRIVER
    deadline_ns = soon_ns(2.0) if operation == "lock" else soon_ns()
    refused(world.pager.page_out(session.target, deadline_ns), reason)
    assert session.get("library.orders") == ["hold", "free"]
    assert session.digest() == before


def test_a_library_that_comes_back_is_told_nothing_before_the_driver_has_let_go(
    world: GatedWorld,
) -> None:
    """After a crash of the daemon, the library's first driver call might crash the program."""
    session = world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    welcomes = session.get("len(library.welcomes)")
    session.do("library.drop()")
    wait_until(lambda: session.get("len(library.welcomes)") > welcomes, "it is back")
    assert world.pager.observe(session.target).residency is Residency.PAGED_OUT
    moved(world.pager.suspend(session.target, soon_ns()))
    assert session.get("library.orders") == ["hold"]
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.get("library.orders") == ["hold", "free"]
    assert session.digest() == before


HANGS = """
from kiwi_core.movers.errors import hung
looks = []

def hanging(call):
    async def asked(self, name, *args, deadline_s):
        if name == "look" and {pid} in args[1]:
            looks.append(args)
            if len(looks) > 1:
                raise hung(name, deadline_s)
        if name == "checkpoint_state" and args[0] == {pid}:
            raise hung(name, deadline_s)
        return await call(self, name, *args, deadline_s=deadline_s)
    return asked

MoverPool.call = hanging(MoverPool.call)
"""


def test_a_process_that_hangs_does_not_hide_the_others(world: GatedWorld) -> None:
    """One question asks about all of them. What was stopped before it hung is let go."""
    session = world.start(4 * MIB)
    session.do(CHILD)
    world.pager.patch(HANGS.format(pid=int(session.get("child.pid"))))
    outcome = world.pager.page_out(session.target, soon_ns())
    assert isinstance(outcome, Refused), outcome
    assert session.get("library.orders") == ["hold", "free"]


BLIND = """
from kiwi_core.errors import GpuError
looks = []

def blind(call):
    async def asked(self, name, *args, deadline_s):
        if name == "look":
            looks.append(args)
            if len(looks) > 1:
                raise GpuError("nvml", "NVML fails.", driver_code=999)
        return await call(self, name, *args, deadline_s=deadline_s)
    return asked

MoverPool.call = blind(MoverPool.call)
"""


def test_what_was_stopped_is_let_go_although_nvml_fails(world: GatedWorld) -> None:
    session = world.start(4 * MIB)
    world.pager.patch(BLIND)
    outcome = world.pager.page_out(session.target, soon_ns())
    assert isinstance(outcome, Refused), outcome
    assert session.get("library.orders") == ["hold", "free"]
