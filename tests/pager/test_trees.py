"""Tests of sessions with several processes on the emulated driver: all move, or none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from contract import moved, refused, soon_ns
from cuda_processes import wait_until
from worlds import EmulatedWorld, RunningSession

import kiwi_emulator as emulator
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Lost
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB


def states(world: EmulatedWorld, session: RunningSession) -> tuple[str, str]:
    return world.state(session.pid), world.state(session.child_pid)


def test_parent_and_child_move_together(emulated: EmulatedWorld) -> None:
    session = emulated.start(4 * MIB, child_bytes=6 * MIB)
    before = session.digest()
    out = moved(emulated.pager.page_out(session.target, soon_ns()))
    assert out.bytes_moved == 10 * MIB + 2 * emulated.overhead_bytes
    assert states(emulated, session) == ("CHECKPOINTED", "CHECKPOINTED")
    assert emulated.used_bytes() == 0
    seen = emulated.pager.observe(session.target)
    assert (seen.residency, len(seen.processes)) == (Residency.PAGED_OUT, 2)
    assert seen.paged_out_bytes == out.bytes_moved
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert states(emulated, session) == ("RUNNING", "RUNNING")
    assert session.digest() == before


def test_a_child_that_cannot_be_locked_leaves_both_running(emulated: EmulatedWorld) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    before = session.digest()
    emulated.faults.set("lock_timeout", pid=session.child_pid)
    refused(emulated.pager.page_out(session.target, soon_ns(1.0)), Reason.LOCK_TIMEOUT)
    assert states(emulated, session) == ("RUNNING", "RUNNING")
    assert session.digest() == before


@pytest.mark.parametrize("victim", ["pid", "child_pid"])
def test_a_checkpoint_that_fails_half_way_is_undone(emulated: EmulatedWorld, victim: str) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    before, used_before = session.digest(), emulated.used_bytes()
    emulated.faults.set("checkpoint_fail", pid=getattr(session, victim))
    refused(emulated.pager.page_out(session.target, soon_ns()), Reason.DRIVER)
    assert states(emulated, session) == ("RUNNING", "RUNNING")
    assert emulated.used_bytes() == used_before
    assert session.digest() == before
    assert emulated.pager.export_footprints() == {}
    moved(emulated.pager.page_out(session.target, soon_ns()))
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_suspended_session_stays_suspended_after_a_refused_page_out(
    emulated: EmulatedWorld,
) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    before = session.digest()
    moved(emulated.pager.suspend(session.target, soon_ns()))
    emulated.faults.set("checkpoint_fail", pid=session.child_pid)
    refused(emulated.pager.page_out(session.target, soon_ns()), Reason.DRIVER)
    assert states(emulated, session) == ("LOCKED", "LOCKED")
    moved(emulated.pager.resume(session.target, soon_ns()))
    assert session.digest() == before


def test_none_comes_back_if_there_is_not_room_for_all(emulated: EmulatedWorld) -> None:
    session = emulated.start(10 * MIB, child_bytes=10 * MIB)
    before = session.digest()
    moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=16 * MIB)  # enough for either of them, not for both
    refused(emulated.pager.page_in(session.target, soon_ns(0.2)), Reason.NO_ROOM)
    assert states(emulated, session) == ("CHECKPOINTED", "CHECKPOINTED")
    emulated.hold_outside(emulated.memory_bytes)
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_child_lost_for_good_lets_the_parent_go(emulated: EmulatedWorld) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.faults.set("restore_fail", pid=session.child_pid)
    assert isinstance(emulated.pager.page_in(session.target, soon_ns()), Lost)
    assert states(emulated, session) == ("RUNNING", "FAILED")
    assert emulated.pager.observe(session.target).residency is Residency.LOST


def test_out_of_memory_in_a_restore_is_asked_again_and_then_lost(emulated: EmulatedWorld) -> None:
    """Current drivers behave like this (NVIDIA/cuda-checkpoint#44): the state stays CHECKPOINTED,
    and every later restore answers 304."""
    session = emulated.start(4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.faults.set("restore_oom", pid=session.pid)
    assert isinstance(emulated.pager.page_in(session.target, soon_ns()), Lost)
    assert isinstance(emulated.pager.page_in(session.target, soon_ns()), Lost)


@pytest.mark.parametrize("operation", ["lock", "checkpoint"])
def test_a_child_killed_during_a_page_out_is_left_out(
    emulated: EmulatedWorld, operation: str
) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    emulated.hang(operation, session.child_pid)
    emulated.pager.begin("page_out", session.target, soon_ns())
    emulated.wait_hanging()
    session.kill_child()
    emulated.let_go()
    moved(emulated.pager.finish())
    assert emulated.state(session.pid) == "CHECKPOINTED"
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert emulated.state(session.pid) == "RUNNING"


@pytest.mark.host_goes_down
@pytest.mark.parametrize("operation", ["restore", "unlock"])
def test_a_child_killed_during_a_page_in_is_left_out(
    emulated: EmulatedWorld, operation: str
) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.hang(operation, session.child_pid)
    emulated.pager.begin("page_in", session.target, soon_ns())
    emulated.wait_hanging()
    session.kill_child()
    emulated.let_go()
    moved(emulated.pager.finish())
    assert emulated.state(session.pid) == "RUNNING"


def test_a_child_that_starts_to_use_the_gpu_later(emulated: EmulatedWorld) -> None:
    session = emulated.start(4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    moved(emulated.pager.page_in(session.target, soon_ns()))
    session.start_child(4 * MIB)
    before = session.digest()
    moved(emulated.pager.page_out(session.target, soon_ns()))
    assert states(emulated, session) == ("CHECKPOINTED", "CHECKPOINTED")
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_a_child_found_while_the_parent_is_being_locked(emulated: EmulatedWorld) -> None:
    """The child starts to use the GPU after the first reading; a later reading finds it in time."""
    session = emulated.start(4 * MIB)
    emulated.hang("lock", session.pid)
    emulated.pager.begin("page_out", session.target, soon_ns())
    emulated.wait_hanging()
    session.start_child(4 * MIB)
    emulated.let_go()
    moved(emulated.pager.finish())
    assert states(emulated, session) == ("CHECKPOINTED", "CHECKPOINTED")


@pytest.mark.host_goes_down
@pytest.mark.parametrize("stage", ["running", "suspend", "page_out"])
def test_what_a_dead_kernel_leaves_behind_is_let_go(emulated: EmulatedWorld, stage: str) -> None:
    """A worker whose parents have ended is still in the kernel's terminal session."""
    session = emulated.start(4 * MIB, child_bytes=4 * MIB, leader=True)
    # Like a worker of a process pool, the child ignores the closed pipe and outlives its parent.
    session.get("child.send('time.sleep(1000)')")
    if stage != "running":
        moved(getattr(emulated.pager, stage)(session.target, soon_ns()))
    session.kill()
    refused(emulated.pager.page_in(session.target, soon_ns()), Reason.GONE)
    assert emulated.state(session.child_pid) == "RUNNING"
    seen = emulated.pager.observe(session.target)
    assert not seen.alive
    os.kill(session.child_pid, signal.SIGKILL)
    wait_until(lambda: emulated.used_bytes() == 0, "the memory is free")


@pytest.mark.host_goes_down
@pytest.mark.parametrize("own_bytes", [0, 4 * MIB])
def test_an_orphan_of_a_living_kernel_moves_with_it(
    emulated: EmulatedWorld, own_bytes: int
) -> None:
    session = emulated.start(own_bytes, leader=True)
    # A grandchild whose parent ends at once.
    code = (
        "__import__('subprocess').check_output([sys.executable, '-c', "
        "'import subprocess, sys; "
        'print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], '
        "stdout=subprocess.DEVNULL).pid)', "
        "'import cuda_worker as w, time; w.init(); w.alloc(1 << 20); time.sleep(1000)'], "
        "env=os.environ | {'PYTHONPATH': sys.path[0]})"
    )
    orphan = int(session.get(f"int({code})"))  # type: ignore[call-overload]
    try:
        least_bytes = own_bytes + emulated.context_bytes * (2 if own_bytes else 1) + MIB
        wait_until(lambda: emulated.used_bytes() >= least_bytes, "the orphan has its memory")
        ref = processes.ref_of(orphan)
        assert ref is not None
        assert ref not in processes.tree(session.root)
        moved(emulated.pager.page_out(session.target, soon_ns()))
        assert emulated.state(orphan) == "CHECKPOINTED"
        assert emulated.used_bytes() == 0
        moved(emulated.pager.page_in(session.target, soon_ns()))
        assert emulated.state(orphan) == "RUNNING"
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_session_inside_another_is_left_alone(emulated: EmulatedWorld) -> None:
    session = emulated.start(4 * MIB, child_bytes=4 * MIB)
    inner = processes.ref_of(session.child_pid)
    assert inner is not None
    emulated.pager.other_root(inner)
    emulated.pager.other_root(session.root)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    assert states(emulated, session) == ("CHECKPOINTED", "RUNNING")
    moved(emulated.pager.page_in(session.target, soon_ns()))


def test_a_session_that_uses_two_gpus_is_left_alone(tmp_path: Path) -> None:
    """A restore would need room on a GPU that another daemon manages."""
    world = EmulatedWorld(tmp_path / "gpus", "2x64MiB")
    try:
        session = world.start(4 * MIB)
        moved(world.pager.page_out(session.target, soon_ns()))
        moved(world.pager.page_in(session.target, soon_ns()))
        session.get("init(1)")
        answer = refused(world.pager.page_out(session.target, soon_ns()), Reason.UNSUPPORTED)
        assert emulator.books(world.path).gpus[1].uuid in answer.detail
        assert world.state(session.pid) == "RUNNING"
    finally:
        world.close()
