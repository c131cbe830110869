"""Tests of driver calls and NVML readings that hang, and of stopped programs, in every state.

The daemon answers throughout, the others continue, and nothing is lost.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Final

import psutil
import pytest
from daemon import wait_until
from stopped import is_stopped

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

ARGS: Final = ("1x256MiB", "--tq", "0.5", "--lock-timeout", "1", "--stuck-after", "2")

ASKS: Final = 10


def answers(daemon: Daemon) -> None:
    """Check that the daemon answers, and again after it has done something else. One that waited
    for the driver would not answer at all."""
    for _ in range(ASKS):
        daemon.status()
        time.sleep(0.1)


def _shown_as_stopped(daemon: Daemon, one: SessionProgram) -> None:
    daemon.wait_for(
        lambda s: any("Ctrl-Z" in x.stopped for x in s.sessions if x.pid == one.pid), "shown"
    )


def works(one: SessionProgram) -> None:
    one.start_burst()
    wait_until(one.granted, f"{one.name} is granted")
    before = one.rounds()
    wait_until(lambda: one.rounds() > before, f"{one.name} goes on")
    one.stop_burst()


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "get_state"])
@pytest.mark.parametrize("state", ["idle", "running"])
def test_on_its_way_out(start: Start, program: Program, operation: str, state: str) -> None:
    daemon = start(*ARGS)
    other, hung = program(daemon, 20), program(daemon, 110)
    if state == "running":
        hung.start_burst()
        wait_until(hung.granted, "it computes")
    faults = emulator.Faults(daemon.state_path)
    faults.set("hang", pid=hung.pid, operation=operation, count=-1)
    if state == "idle":
        hung.worker.do("client.release()")
    else:
        big = program(daemon)
        big.begin_take(150, 7)  # the daemon has to make room
    wait_until(lambda: faults.hanging() > 0, "it hangs")
    answers(daemon)
    if state == "idle":
        works(other)
    faults.clear()
    if state == "running":
        big.worker.answer()
        hung.stop_burst()
        assert big.intact()
    assert hung.intact()
    assert other.intact()


@pytest.mark.parametrize("operation", ["restore", "unlock", "get_state"])
def test_on_its_way_in(start: Start, program: Program, operation: str) -> None:
    daemon = start(*ARGS)
    other, hung = program(daemon, 20), program(daemon, 60)
    hung.worker.do("client.release()")
    daemon.wait_state(hung.pid, "paged-out")
    faults = emulator.Faults(daemon.state_path)
    faults.set("hang", pid=hung.pid, operation=operation, count=-1)
    hung.start_burst()
    wait_until(lambda: faults.hanging() > 0, "it hangs")
    answers(daemon)
    if operation != "get_state":
        daemon.wait_for(lambda s: any(x.problem for x in s.sessions if x.pid == hung.pid), "shown")
    works(other)
    faults.clear()
    wait_until(hung.granted, "it has come back", 120)
    hung.stop_burst()
    assert hung.intact()
    assert other.intact()


def test_nvml_hangs(start: Start, program: Program) -> None:
    """Only workers read NVML. The status says that nothing is known, and leases are still
    granted."""
    daemon = start(*ARGS, env={"KIWI_EMULATOR_HANG": "nvmlDeviceGetComputeRunningProcesses"})
    one = program(daemon)
    answers(daemon)
    one.worker.do("begin(); client.end_burst()")
    daemon.wait_for(lambda s: bool(s.errors), "it is shown")
    answers(daemon)


def test_workers_that_are_killed_again_and_again(start: Start, program: Program) -> None:
    daemon = start(*ARGS)
    one, other = program(daemon, 150), program(daemon, 150)
    for _ in range(5):
        for child in psutil.Process(daemon.status().daemon_pid).children():
            child.kill()
        works(one)
        works(other)
    assert one.intact()
    assert other.intact()


# --- stopped programs -----------------------------------------------------------------------------


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "it is stopped")


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("state", ["idle", "running"])
def test_ctrl_z_on_one_that_has_the_gpu(
    start: Start, program: Program, state: str, known: bool
) -> None:
    """Its turn ends, its memory goes out, and it stays stopped, whether or not the daemon has
    noticed that it is stopped when another session asks for the GPU."""
    daemon = start(*ARGS)
    other, stopped = program(daemon, 150), program(daemon, 150)
    daemon.wait_state(stopped.pid, "idle")
    if state == "running":
        stopped.start_burst()
        wait_until(stopped.granted, "it computes")
    stop(stopped.pid)
    if known:
        _shown_as_stopped(daemon, stopped)
    works(other)
    answers(daemon)
    assert is_stopped(stopped.pid)
    _shown_as_stopped(daemon, stopped)
    os.kill(stopped.pid, signal.SIGCONT)
    if state == "running":
        before = stopped.rounds()
        wait_until(lambda: stopped.rounds() > before, "it goes on by itself")
        stopped.stop_burst()
    assert stopped.intact()
    assert other.intact()


def test_ctrl_z_on_one_that_waits_with_its_memory_out(start: Start, program: Program) -> None:
    """It takes no turn until it is continued."""
    daemon = start(*ARGS)
    stopped, other = program(daemon, 150), program(daemon, 150)
    daemon.wait_state(stopped.pid, "paged-out")
    other.start_burst()
    wait_until(other.granted, "the other computes")
    stopped.start_burst()
    stop(stopped.pid)
    before = other.rounds()
    wait_until(lambda: other.rounds() > before + 100, "the other goes on")
    answers(daemon)
    other.stop_burst()
    works(other)
    os.kill(stopped.pid, signal.SIGCONT)
    wait_until(stopped.granted, "its turn has come")
    stopped.stop_burst()
    assert stopped.intact()
    assert other.intact()
