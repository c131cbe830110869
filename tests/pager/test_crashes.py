"""Tests of deaths and hangs of the target and the caller at every stage, on the emulated driver.

A new caller asks the driver for the state and finishes what a killed one has left.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Target
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from worlds import EmulatedWorld

STAGES = [
    ("page_out", "lock"),
    ("page_out", "checkpoint"),
    ("page_in", "restore"),
    ("page_in", "unlock"),
]
AFTERWARDS = {
    "lock": "LOCKED",
    "checkpoint": "CHECKPOINTED",
    "restore": "LOCKED",
    "unlock": "RUNNING",
}


@pytest.mark.host_goes_down
@pytest.mark.parametrize(("call", "operation"), STAGES)
@pytest.mark.parametrize("child_bytes", [0, 4 * MIB], ids=["one", "two"])
def test_the_target_killed_at_each_stage(
    emulated: EmulatedWorld, call: str, operation: str, child_bytes: int
) -> None:
    session = emulated.start(4 * MIB, child_bytes=child_bytes, leader=True)
    if call == "page_in":
        moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.hang(operation, session.child_pid or session.pid)
    emulated.pager.begin(call, session.target, soon_ns())
    emulated.wait_hanging()
    session.kill()
    emulated.let_go()
    refused(emulated.pager.finish(), Reason.GONE)
    seen = emulated.pager.observe(session.target)
    assert not seen.alive
    if child_bytes:
        # Nothing holds the child: it notices that its parent has ended, and ends.
        wait_until(lambda: processes.ref_of(session.child_pid) is None, "the child's end")
    wait_until(lambda: emulated.used_bytes() == 0, "the memory is free")


@pytest.mark.parametrize(("call", "operation"), STAGES)
@pytest.mark.parametrize("then", ["page_out", "page_in"])
def test_the_caller_killed_at_each_stage(
    emulated: EmulatedWorld, call: str, operation: str, then: str
) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    before = session.digest()
    caller = emulated.new_pager()
    if call == "page_in":
        moved(caller.page_out(session.target, soon_ns()))
    emulated.hang(operation, session.child_pid)
    caller.begin(call, session.target, soon_ns())
    emulated.wait_hanging()
    caller.kill()
    emulated.let_go()
    # The driver finishes what a killed caller had begun.
    wait_until(lambda: emulated.state(session.child_pid) == AFTERWARDS[operation], "it is done")
    # `emulated.pager` knows nothing of what happened, not even the footprints.
    moved(getattr(emulated.pager, then)(session.target, soon_ns()))
    expected = Residency.PAGED_OUT if then == "page_out" else Residency.RESIDENT
    assert emulated.pager.observe(session.target).residency is expected
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


@pytest.mark.parametrize("call", ["page_out", "page_in"])
def test_the_caller_killed_while_the_driver_copies(emulated: EmulatedWorld, call: str) -> None:
    """The driver continues, and reports CHECKPOINTING (4) or RESTORING (5) until it is done."""
    emulated.set_driver_version(13040)
    session = emulated.start(16 * MIB)
    before = session.digest()
    caller = emulated.new_pager()
    if call == "page_in":
        moved(caller.page_out(session.target, soon_ns()))
    emulated.set_copy_bandwidth(1 << 10)
    caller.begin(call, session.target, soon_ns())
    under_way = "CHECKPOINTING" if call == "page_out" else "RESTORING"
    wait_until(lambda: emulated.state(session.pid) == under_way, under_way)
    seen = emulated.pager.observe(session.target)
    assert seen.residency in (Residency.SUSPENDED, Residency.PAGED_OUT)
    caller.kill()
    refused(emulated.pager.page_in(session.target, soon_ns(0.05)), Reason.DRIVER)
    emulated.set_copy_bandwidth(0)
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert emulated.state(session.pid) == "RUNNING"
    assert session.digest() == before


def test_footprints_outlive_the_caller(emulated: EmulatedWorld) -> None:
    first = emulated.new_pager()
    session = emulated.start(8 * MIB)
    before = session.digest()
    emulated.hang("checkpoint", session.pid)
    first.begin("page_out", session.target, soon_ns())
    emulated.wait_hanging()
    emulated.let_go()
    moved(first.finish())
    size = 8 * MIB + emulated.overhead_bytes
    footprints = first.export_footprints()
    assert footprints == first.remembered() == {session.root: size}
    first.kill()

    emulated.hold_outside(free_bytes=40 * MIB)
    # The size is unknown and another program uses the GPU, so the pager takes no risk.
    refused(emulated.pager.page_in(session.target, soon_ns(0.1)), Reason.NO_ROOM)
    emulated.pager.import_footprints(footprints | {ProcessRef(2**22 - 1, 1): MIB})
    assert emulated.pager.export_footprints() == footprints, "the dead are left out"
    assert emulated.pager.observe(session.target).paged_out_bytes == size
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before
    assert emulated.pager.export_footprints() == {}


def test_footprints_are_told_before_anything_moves(emulated: EmulatedWorld) -> None:
    session = emulated.start(8 * MIB)
    emulated.faults.set("checkpoint_fail", pid=session.pid)
    refused(emulated.pager.page_out(session.target, soon_ns()), Reason.DRIVER)
    size = 8 * MIB + emulated.overhead_bytes
    assert emulated.pager.remembered() == {session.root: size}
    assert emulated.pager.export_footprints() == {}


def test_two_page_ins_do_not_count_on_the_same_room(emulated: EmulatedWorld) -> None:
    """Only one of them fits: the other is refused, and neither is lost."""
    one, two = emulated.start(24 * MIB), emulated.start(24 * MIB)
    before = [one.digest(), two.digest()]
    pager = emulated.new_pager(room_wait_ns=200_000_000)
    for session in (one, two):
        moved(pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=48 * MIB)
    pager.worker.do(
        "import concurrent.futures, time; pool = concurrent.futures.ThreadPoolExecutor(2)"
    )
    for _ in range(3):
        calls = [
            f"pool.submit(pager.page_in, target_of({s.target.session!r}, {s.root.pid}, "
            f"{s.root.start_ticks}), time.monotonic_ns() + 60_000_000_000)"
            for s in (one, two)
        ]
        code = f"[plain(f.result())[0] for f in [{', '.join(calls)}]]"
        assert sorted(pager.worker.get(code)) == ["Moved", "Refused"]
        for session in (one, two):
            moved(pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(emulated.memory_bytes)
    for session in (one, two):
        moved(pager.page_in(session.target, soon_ns()))
    assert [one.digest(), two.digest()] == before


@pytest.mark.parametrize("limit", ["deadline", "config"])
def test_waiting_for_a_lock_ends_in_time(emulated: EmulatedWorld, limit: str) -> None:
    session = emulated.start(MIB)
    pager = emulated.pager
    deadline_s = 0.5
    if limit == "config":
        pager, deadline_s = emulated.new_pager(lock_timeout_ns=500_000_000), 600.0
    emulated.faults.set("lock_timeout", pid=session.pid)
    began = time.monotonic()
    refused(pager.page_out(session.target, soon_ns(deadline_s)), Reason.LOCK_TIMEOUT)
    assert time.monotonic() - began >= 0.4
    assert emulated.state(session.pid) == "RUNNING"


def test_waiting_for_room_ends_in_time(emulated: EmulatedWorld) -> None:
    session = emulated.start(8 * MIB)
    pager = emulated.new_pager(room_wait_ns=300_000_000)
    moved(pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=4 * MIB)
    began = time.monotonic()
    refused(pager.page_in(session.target, soon_ns(600)), Reason.NO_ROOM)
    assert time.monotonic() - began >= 0.25


def test_room_that_is_freed_late_is_waited_for(emulated: EmulatedWorld) -> None:
    session = emulated.start(8 * MIB)
    before = session.digest()
    pager = emulated.new_pager(room_wait_ns=60 * NS_PER_S)
    moved(pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=4 * MIB)
    pager.begin("page_in", session.target, soon_ns())
    emulated.hold_outside(emulated.memory_bytes)
    moved(pager.finish())
    assert session.digest() == before


def test_system_ram_that_cannot_hold_it(emulated: EmulatedWorld) -> None:
    session = emulated.start(8 * MIB)
    pager = emulated.new_pager(host_bytes=9 * MIB)
    answer = refused(pager.page_out(session.target, soon_ns()), Reason.NO_HOST_MEMORY)
    assert "10 MiB" in answer.detail
    assert "9 MiB" in answer.detail
    assert emulated.state(session.pid) == "RUNNING"


def test_a_thread_id_is_not_taken_for_its_process(emulated: EmulatedWorld) -> None:
    session = emulated.start(MIB)
    session.loop()
    thread = int(session.get("rounds.thread.native_id"))  # type: ignore[call-overload]
    stat = processes.stat_of(thread)
    assert stat is not None
    assert processes.ref_of(thread) is None
    target = Target(SessionId("thread"), ProcessRef(thread, stat.start_ticks))
    moved(emulated.pager.suspend(target, soon_ns()))
    assert emulated.state(session.pid) == "RUNNING"
    session.wait_rounds(3)
    code = f"__import__('kiwi_core.gpu.driver').gpu.driver.lock({thread}, 100)"
    assert "not a live process" in emulated.pager.worker.fails(code)


def test_a_running_loop_keeps_its_bytes(emulated: EmulatedWorld) -> None:
    """A loop checks what it reads while its memory moves out and in again and again."""
    session = emulated.start(8 * MIB)
    before = session.digest()
    session.loop()
    for _ in range(10):
        moved(emulated.pager.page_out(session.target, soon_ns()))
        stopped_at = session.rounds()
        assert session.rounds() == stopped_at
        moved(emulated.pager.page_in(session.target, soon_ns()))
        session.wait_rounds(2)
    assert session.digest() == before
