"""Tests of sessions with linked and other processes: all move or none, and what stays in the
GPU."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until
from worlds import EmulatedWorld, LinkedWorld

from kiwi_core.config import DEFAULTS
from kiwi_core.pager.api import Lost
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from linked_program import LinkedProgram
    from worlds import SharedWorlds

SUPPORT = Path(__file__).parents[1] / "support"

_CHILD = """
from cuda_processes import Worker
child = Worker({{}})
child.do({setup!r})
"""
_PLAIN = f"init(); q = alloc({4 * MIB}); before = fill(q, 9, {4 * MIB})"
_LINKED = (
    "from linked_library import Library; init(); "
    "library = Library({path!r}); library.take({size}, 9); before = library.digest()"
)


_ALONE = """
import sys, time
sys.path.insert(0, {support!r})
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
from linked_library import Library
library = Library({path!r})
library.take(1 << 20, 1)
before = library.digest()
with open({beats!r}, "w") as beats:
    while library.digest() == before:
        beats.write(".")
        beats.flush()
        time.sleep(0.02)
"""


class Family:
    """A linked program and its child, which is plain or linked."""

    def __init__(self, world: LinkedWorld, *, linked: bool = False) -> None:
        self.world = world
        self.root = world.start(4 * MIB)
        self.linked = linked
        setup = _LINKED.format(path=str(world.socket), size=4 * MIB) if linked else _PLAIN
        self.root.do(_CHILD.format(setup=setup))
        self.child_pid = int(self.root.get("child.pid"))
        self.before = self.root.digest()

    def close(self) -> None:
        self.root.do("child.close()")

    def assert_intact(self) -> None:
        assert self.root.digest() == self.before
        now = "library.digest()" if self.linked else f"digest(q, {4 * MIB})"
        assert self.root.get(f"child.get('before == {now}')") is True

    def residency(self) -> Residency:
        return self.world.pager.observe(self.root.target).residency

    def script_child(self, action: str, fault: str) -> None:
        self.root.do(f'child.do("library.faults[{action!r}] = [{fault!r}]")')


@pytest.fixture
def world(shared_worlds: SharedWorlds) -> Iterator[LinkedWorld]:
    with shared_worlds.lend(LinkedWorld) as world:
        yield world


@pytest.fixture
def mixed(world: LinkedWorld) -> Iterator[Family]:
    family = Family(world)
    yield family
    family.close()


@pytest.fixture
def twins(world: LinkedWorld) -> Iterator[Family]:
    family = Family(world, linked=True)
    yield family
    family.close()


def test_each_is_moved_by_whom_it_can_be(world: LinkedWorld, mixed: Family) -> None:
    out = moved(world.pager.page_out(mixed.root.target, soon_ns()))
    assert world.state(mixed.child_pid) == "CHECKPOINTED"
    assert world.state(mixed.root.pid) == "RUNNING", "its library has moved it"
    sizes = world.pager.export_footprints(mixed.root.target)
    assert sum(sizes.values()) == out.bytes_moved
    assert len(sizes) == 2
    assert moved(world.pager.page_in(mixed.root.target, soon_ns())).bytes_moved == out.bytes_moved
    mixed.assert_intact()


def test_suspend_and_resume_of_both(world: LinkedWorld, mixed: Family) -> None:
    moved(world.pager.suspend(mixed.root.target, soon_ns()))
    assert world.state(mixed.child_pid) == "LOCKED"
    assert mixed.root.get("library._held")
    moved(world.pager.resume(mixed.root.target, soon_ns()))
    mixed.assert_intact()


@pytest.mark.parametrize("call", ["suspend", "page_out"])
def test_if_the_driver_cannot_hold_its_part_the_library_lets_go(
    world: LinkedWorld, mixed: Family, call: str
) -> None:
    world.faults.set("lock_timeout", pid=mixed.child_pid)
    refused(getattr(world.pager, call)(mixed.root.target, soon_ns(2.0)), Reason.LOCK_TIMEOUT)
    assert mixed.residency() is Residency.RESIDENT
    mixed.assert_intact()


@pytest.mark.parametrize("found_held", [False, True])
def test_if_the_library_refuses_to_move_all_is_as_it_was(
    world: LinkedWorld, mixed: Family, *, found_held: bool
) -> None:
    if found_held:
        moved(world.pager.suspend(mixed.root.target, soon_ns()))
    mixed.root.script("page-out", "refuse no-host-memory")
    refused(world.pager.page_out(mixed.root.target, soon_ns()), Reason.NO_HOST_MEMORY)
    assert mixed.residency() is (Residency.SUSPENDED if found_held else Residency.RESIDENT)
    assert world.state(mixed.child_pid) == ("LOCKED" if found_held else "RUNNING")
    moved(world.pager.page_in(mixed.root.target, soon_ns()))
    mixed.assert_intact()


def test_if_one_of_two_libraries_refuses_the_other_comes_back(
    world: LinkedWorld, twins: Family
) -> None:
    twins.script_child("page-out", "refuse driver")
    refused(world.pager.page_out(twins.root.target, soon_ns()), Reason.DRIVER)
    assert twins.residency() is Residency.RESIDENT
    twins.assert_intact()
    moved(world.pager.page_out(twins.root.target, soon_ns()))
    twins.script_child("page-in", "refuse no-room")
    refused(world.pager.page_in(twins.root.target, soon_ns()), Reason.NO_ROOM)
    seen = world.pager.observe(twins.root.target)
    assert (seen.residency, seen.paged_out_bytes) == (Residency.PAGED_OUT, 8 * MIB)
    moved(world.pager.page_in(twins.root.target, soon_ns()))
    twins.assert_intact()


def test_if_one_of_two_cannot_go_on_neither_does(world: LinkedWorld, twins: Family) -> None:
    moved(world.pager.suspend(twins.root.target, soon_ns()))
    twins.script_child("free", "refuse driver")
    refused(world.pager.page_in(twins.root.target, soon_ns()), Reason.DRIVER)
    assert twins.root.get("library._held")
    moved(world.pager.page_in(twins.root.target, soon_ns()))
    assert twins.residency() is Residency.RESIDENT
    twins.assert_intact()


def test_if_the_driver_cannot_bring_its_part_back_the_library_takes_its_own_out_again(
    world: LinkedWorld, mixed: Family
) -> None:
    moved(world.pager.page_out(mixed.root.target, soon_ns()))
    # enough for the library's part, not for the other process
    world.hold_outside(free_bytes=7 * MIB)
    refused(world.pager.page_in(mixed.root.target, soon_ns(1.0)), Reason.NO_ROOM)
    assert mixed.root.get("library._out")
    assert world.state(mixed.child_pid) == "CHECKPOINTED"
    world.hold_outside(free_bytes=world.memory_bytes)
    moved(world.pager.page_in(mixed.root.target, soon_ns()))
    mixed.assert_intact()


def test_a_loss_of_one_lets_the_others_go(world: LinkedWorld, twins: Family) -> None:
    moved(world.pager.page_out(twins.root.target, soon_ns()))
    twins.script_child("page-in", "lose")
    assert isinstance(world.pager.page_in(twins.root.target, soon_ns()), Lost)
    assert twins.root.digest() == twins.before
    assert twins.residency() is Residency.LOST


def test_a_child_that_dies_on_its_way_is_no_longer_missed(
    world: LinkedWorld, twins: Family
) -> None:
    twins.script_child("page-out", "die")
    moved(world.pager.page_out(twins.root.target, soon_ns()))
    moved(world.pager.page_in(twins.root.target, soon_ns()))
    assert twins.root.digest() == twins.before


@pytest.mark.parametrize("action", ["hold", "page-out"])
def test_the_root_dies_on_its_way(world: LinkedWorld, action: str) -> None:
    session = world.start(4 * MIB)
    session.script(action, "die")
    refused(world.pager.page_out(session.target, soon_ns()), Reason.GONE)
    assert world.pager.export_footprints() == {}


def test_what_the_root_leaves_behind_is_let_go(world: LinkedWorld, tmp_path: Path) -> None:
    """A linked child outlives its session, which is paged out."""
    root, beats = world.start(4 * MIB), tmp_path / "beats"
    code = _ALONE.format(support=str(SUPPORT), path=str(world.socket), beats=str(beats))
    root.do(f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {code!r}])")
    child_pid = int(root.get("child.pid"))
    try:
        wait_until(beats.exists, "the child works")
        moved(world.pager.page_out(root.target, soon_ns()))
        root.kill()
        refused(world.pager.page_in(root.target, soon_ns()), Reason.GONE)
        marks = beats.stat().st_size
        wait_until(lambda: beats.stat().st_size > marks + 2, "the child goes on")
    finally:
        os.kill(child_pid, signal.SIGKILL)


# --- what stays behind ---------------------------------------------------------------------------


def test_a_little_that_the_library_cannot_move_stays(world: LinkedWorld) -> None:
    session = world.start(4 * MIB, unowned_bytes=2 * MIB)
    out = moved(world.pager.page_out(session.target, soon_ns()))
    assert out.stays_bytes == 4 * MIB, "with the context"
    seen = world.pager.observe(session.target)
    assert (seen.residency, seen.resident_bytes) == (Residency.PAGED_OUT, 4 * MIB)
    assert world.state(session.pid) == "RUNNING"


def test_much_of_it_goes_through_the_driver(world: LinkedWorld) -> None:
    pager = world.pager = world.new_pager(unowned_left_bytes=MIB)
    session = world.start(4 * MIB, unowned_bytes=2 * MIB)
    before = session.digest()
    out = moved(pager.page_out(session.target, soon_ns()))
    assert world.state(session.pid) == "CHECKPOINTED"
    assert session.get("library.orders")[-2:] == ["page-out", "yield"], "it leaves the driver alone"
    assert pager.observe(session.target).resident_bytes == 0
    assert out.bytes_moved == 8 * MIB  # its own memory, the unowned memory, and the context
    assert moved(pager.page_in(session.target, soon_ns())).bytes_moved == out.bytes_moved
    assert session.digest() == before
    assert session.get(f"digest(u, {2 * MIB}) == fill(u, 1, {2 * MIB})")


def test_a_second_page_out_takes_what_the_first_left(world: LinkedWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    assert moved(world.pager.page_out(session.target, soon_ns())).stays_bytes == 2 * MIB
    again = moved(world.pager.page_out(session.target, soon_ns()))
    assert again.bytes_moved == 6 * MIB, "all that is out now: its own, and its context"
    assert again.stays_bytes == 0
    assert session.get("library.orders")[-1] == "yield"
    assert sum(world.pager.export_footprints().values()) == 6 * MIB
    assert world.pager.observe(session.target).paged_out_bytes == 6 * MIB
    assert moved(world.pager.page_in(session.target, soon_ns())).bytes_moved == 6 * MIB
    assert session.digest() == before


def test_the_driver_leaves_alone_whose_library_does_not_yield(world: LinkedWorld) -> None:
    """The library might call the driver, which would kill a checkpointed program."""
    session = world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    session.script("yield", "refuse lock-timeout")
    assert moved(world.pager.page_out(session.target, soon_ns())).bytes_moved == 0
    assert world.state(session.pid) == "RUNNING"
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_the_driver_leaves_alone_who_may_be_on_the_way_in(world: LinkedWorld) -> None:
    """The session was out when the pager last read its state. Until the next reading nobody knows,
    and its bytes in the GPU do not count twice."""
    session = world.start(4 * MIB)
    before = session.digest()
    moved(world.pager.page_out(session.target, soon_ns()))
    out_bytes = world.pager.observe(session.target).paged_out_bytes
    session.do("library.reconnects = False; library.drop()")

    def less_is_out() -> bool:
        return bool(world.pager.observe(session.target).paged_out_bytes < out_bytes)

    wait_until(less_is_out, "it is away")
    refused(world.pager.page_out(session.target, soon_ns()), Reason.DRIVER)
    assert world.state(session.pid) == "RUNNING"
    session.do("library.reconnects = True")
    moved(world.pager.page_out(session.target, soon_ns()))
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_what_others_left_in_the_gpu_goes_when_room_is_short(world: LinkedWorld) -> None:
    one, other = world.start(8 * MIB), world.start(8 * MIB)
    contents = one.digest(), other.digest()
    for session in (one, other):
        moved(world.pager.page_out(session.target, soon_ns()))
    world.hold_outside(free_bytes=7 * MIB)
    moved(world.pager.page_in(one.target, soon_ns()))
    assert world.state(other.pid) == "CHECKPOINTED"
    assert other.get("library.orders")[-1] == "yield"
    assert one.digest() == contents[0]
    world.hold_outside(free_bytes=world.memory_bytes)
    moved(world.pager.page_in(other.target, soon_ns()))
    assert other.digest() == contents[1]


@pytest.mark.parametrize("kind", ["linked", "plain", "mixed"])
def test_nobody_waits_for_what_others_left_in_the_gpu(world: LinkedWorld, kind: str) -> None:
    """Whichever pager moves it, the room is made and not waited for."""
    world.pager = world.new_pager(room_wait_ns=3600 * NS_PER_S)  # too long for this test
    other = world.start(8 * MIB)
    if kind == "mixed":
        target = Family(world).root.target
    else:
        start = EmulatedWorld.start if kind == "plain" else LinkedWorld.start
        target = start(world, 8 * MIB).target
    for one in (other.target, target):
        moved(world.pager.page_out(one, soon_ns()))
    assert world.state(other.pid) == "RUNNING", "its context is there"
    need_bytes = sum(world.pager.export_footprints(target).values())
    need_bytes += 0 if kind == "linked" else DEFAULTS.restore_margin_min_bytes
    world.hold_outside(free_bytes=need_bytes - MIB)
    moved(world.pager.page_in(target, soon_ns(3600)))
    assert world.state(other.pid) == "CHECKPOINTED"


# --- what the driver has taken comes back alone ---------------------------------------------------


def taken(world: LinkedWorld, session: LinkedProgram) -> None:
    """Have the driver take what the library leaves in the GPU."""
    for _ in range(2):
        moved(world.pager.page_out(session.target, soon_ns()))
    assert world.state(session.pid) == "CHECKPOINTED"


def test_a_call_of_nvml_goes_on_when_contexts_are_back(world: LinkedWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    session.do("import pynvml; pynvml.nvmlInit()")
    taken(world, session)
    session.worker.send("pynvml.nvmlDeviceGetCount()")
    assert not session.worker.answered(0.3), "the driver has the process"
    moved(world.pager.residue_in(session.target, soon_ns()))
    assert session.worker.answer() == 1
    assert world.pager.observe(session.target).residency is Residency.PAGED_OUT
    assert session.get("library.orders")[-2:] == ["yield", "page-out"], "it knows that it is over"
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_contexts_stay_out_while_there_is_no_room(world: LinkedWorld) -> None:
    session = world.start(4 * MIB)
    before = session.digest()
    taken(world, session)
    world.hold_outside(free_bytes=MIB)
    refused(world.pager.residue_in(session.target, soon_ns()), Reason.NO_ROOM)
    assert world.state(session.pid) == "CHECKPOINTED"
    world.hold_outside(free_bytes=world.memory_bytes)
    moved(world.pager.residue_in(session.target, soon_ns()))
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_caller_that_is_killed_while_contexts_come_back(world: LinkedWorld) -> None:
    """The driver brings them back, locked. The next caller goes on from there."""
    session = world.start(4 * MIB)
    before = session.digest()
    taken(world, session)
    world.hang("unlock", session.pid)
    world.pager.begin("residue_in", session.target, soon_ns())
    world.wait_hanging()
    world.pager.kill()
    world.let_go()
    world.pager = world.new_pager()
    wait_until(lambda: world.pager.observe(session.target).paged_out_bytes > 0, "it is known")
    moved(world.pager.residue_in(session.target, soon_ns()))
    assert world.state(session.pid) == "RUNNING"
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_contexts_of_one_of_two_are_lost(world: LinkedWorld, twins: Family) -> None:
    for _ in range(2):
        moved(world.pager.page_out(twins.root.target, soon_ns()))
    world.faults.set("restore_fail", pid=twins.child_pid)
    assert isinstance(world.pager.residue_in(twins.root.target, soon_ns()), Lost)
    assert world.state(twins.root.pid) == "RUNNING", "the other one is let go"


# --- links that do not answer --------------------------------------------------------------------


def test_a_call_that_does_not_end_is_a_refusal(world: LinkedWorld) -> None:
    session = world.start(4 * MIB)
    session.do("library.__enter__()")
    refused(world.pager.page_out(session.target, soon_ns(0.5)), Reason.LOCK_TIMEOUT)
    session.do("library.__exit__()")
    moved(world.pager.page_out(session.target, soon_ns()))


def test_two_operations_on_one_session_wait_for_each_other(world: LinkedWorld) -> None:
    session = world.start(4 * MIB)
    session.script("page-out", "hang")
    world.pager.begin("page_out", session.target, soon_ns())
    wait_until(lambda: "page-out" in session.get("library.orders"), "it hangs")
    threading.Timer(0.2, lambda: session.do("library.released.set()")).start()
    moved(world.pager.finish())
    moved(world.pager.page_in(session.target, soon_ns()))


# --- who holds a process: its library or the driver ----------------------------------------------


def half_out(world: LinkedWorld, session: LinkedProgram) -> None:
    """Let the library fail half-way and bring nothing back: 4 of 8 MiB are out."""
    session.script("page-out", "stick no-host-memory")
    session.script("page-in", "refuse driver")
    out = moved(world.pager.page_out(session.target, soon_ns()))
    assert (out.bytes_moved, out.stays_bytes) == (4 * MIB, 6 * MIB), "with the context"
    seen = world.pager.observe(session.target)
    assert (seen.residency, seen.paged_out_bytes) == (Residency.PAGED_OUT, 4 * MIB)
    assert (seen.resident_bytes, seen.owned) == (6 * MIB, True)


def test_what_a_page_out_cut_short_has_left_goes_with_the_next_one(world: LinkedWorld) -> None:
    session = world.start(8 * MIB)
    before = session.digest()
    half_out(world, session)
    again = moved(world.pager.page_out(session.target, soon_ns()))
    assert (again.bytes_moved, again.stays_bytes) == (8 * MIB, 2 * MIB)
    assert world.state(session.pid) == "RUNNING", "its library moved it, not the driver"
    assert moved(world.pager.page_in(session.target, soon_ns())).bytes_moved == 8 * MIB
    half_out(world, session)
    assert moved(world.pager.page_in(session.target, soon_ns())).bytes_moved == 4 * MIB
    assert session.digest() == before


def test_the_driver_takes_nobody_whose_library_has_only_half_out(world: LinkedWorld) -> None:
    """The library must move the rest, and its first driver call would never return."""
    one, other = world.start(8 * MIB), world.start(8 * MIB)
    contents = one.digest(), other.digest()
    moved(world.pager.page_out(one.target, soon_ns()))
    half_out(world, other)
    world.hold_outside(free_bytes=7 * MIB)
    refused(world.pager.page_in(one.target, soon_ns(5.0)), Reason.NO_ROOM)
    assert world.state(other.pid) == "RUNNING"
    moved(world.pager.page_out(other.target, soon_ns()))
    moved(world.pager.page_in(one.target, soon_ns()))
    world.hold_outside(free_bytes=world.memory_bytes)
    moved(world.pager.page_in(other.target, soon_ns()))
    assert (one.digest(), other.digest()) == contents


@pytest.mark.parametrize("how", ["locked", "out"])
@pytest.mark.parametrize("out", ["all", "half", "none"])
def test_what_the_driver_holds_is_not_asked_of_its_library(
    world: LinkedWorld, how: str, out: str
) -> None:
    """A call that a killed daemon left behind may have locked it."""
    session = world.start(8 * MIB)
    before = session.digest()
    if out == "all":
        moved(world.pager.page_out(session.target, soon_ns()))
    elif out == "half":
        half_out(world, session)
    orders = session.get("library.orders")
    code = "__import__('kiwi_core.gpu.driver').gpu.driver"
    world.pager.worker.do(f"{code}.lock({session.pid}, 5000)")
    if how == "out":
        world.pager.worker.do(f"{code}.checkpoint({session.pid})")
    # As a new daemon, which has not seen it run.
    world.pager.worker.do("paging._survey._free.clear()")
    moved(world.pager.suspend(session.target, soon_ns()))
    moved(world.pager.page_out(session.target, soon_ns()))
    assert world.state(session.pid) == "CHECKPOINTED"
    assert world.pager.observe(session.target).resident_bytes == 0
    assert session.get("library.orders") == orders
    moved(world.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_move_that_never_ends_is_given_up(world: LinkedWorld) -> None:
    """The library gets no order until it has reported how the move ended. A page-in keeps the room
    that it may still take, and everything continues from there."""
    session, other = world.start(8 * MIB), world.start(8 * MIB)
    contents = session.digest(), other.digest()
    for one in (session, other):
        moved(world.pager.page_out(one.target, soon_ns()))
    world.pager.patch("import kiwi_core.daemon.links.calls as calls; calls.MOVE_GRACE_S = 0.2")
    session.script("page-in", "hang")
    refused(world.pager.page_in(session.target, soon_ns(1.0)), Reason.LOCK_TIMEOUT)
    orders = session.get("library.orders")
    refused(world.pager.page_in(session.target, soon_ns(1.0)), Reason.LOCK_TIMEOUT)
    assert session.get("library.orders") == orders, "nothing is queued behind"
    world.hold_outside(free_bytes=12 * MIB)
    refused(world.pager.page_in(other.target, soon_ns(1.0)), Reason.NO_ROOM)
    world.hold_outside(free_bytes=world.memory_bytes)
    session.do("library.released.set()")
    moved(world.pager.page_in(session.target, soon_ns()))
    moved(world.pager.page_in(other.target, soon_ns()))
    assert (session.digest(), other.digest()) == contents
