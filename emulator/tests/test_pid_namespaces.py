"""Tests of programs in their own PID namespaces, as in containers: each reader sees its own
pids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_processes import wait_until

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from cuda_processes import Worker

    from conftest import Machine

MIB = 1 << 20
INSIDE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a PID namespace")


def inside(machine: Machine) -> tuple[Worker, int]:
    """Start a program as process 1 of a new namespace; return it and its pid here."""
    worker = machine.worker("init()", *INSIDE)
    (pid,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    assert worker.get("os.getpid()") == 1
    return worker, int(pid)


def test_who_looks_from_outside_sees_the_pids_here(machine: Machine) -> None:
    (a, a_pid), (b, b_pid) = inside(machine), inside(machine)
    a.do("p = alloc(20 * MIB); sum_a = fill(p, 1, 20 * MIB)")
    b.do("q = alloc(30 * MIB)")
    books = emulator.books(machine.state)
    assert {p.pid: p.device_bytes[0] for p in books.processes} == {
        a_pid: 20 * MIB, b_pid: 30 * MIB,
    }  # fmt: skip
    assert b.fails("alloc(20 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    controller = machine.worker()
    controller.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    rows = "sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h))"
    assert controller.get(rows) == sorted([a_pid, b_pid, controller.pid])
    controller.do(f"suspend({a_pid})")
    assert controller.get(f"checkpoint_of({a_pid}).state") == "checkpointed"
    assert controller.get(f"checkpoint_of({b_pid}).state") == "running"
    b.do("r = alloc(20 * MIB); free(r)")
    controller.do(f"resume({a_pid})")
    assert a.get("digest(p, 20 * MIB) == sum_a")


def test_who_looks_from_inside_sees_nobody_else(machine: Machine) -> None:
    outside = machine.worker()
    outside.do("p = alloc(20 * MIB)")
    one, _ = inside(machine)
    one.do("import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)")
    rows = "[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]"
    assert one.get(rows) == [1]
    assert one.get("used()") > 20 * MIB
    assert one.fails("alloc(50 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert machine.device_bytes(outside) == 20 * MIB


@pytest.mark.parametrize("seen_before", [True, False])
def test_the_memory_of_one_that_was_killed_is_free(machine: Machine, seen_before: bool) -> None:
    one, pid = inside(machine)
    one.do("p = alloc(50 * MIB)")
    reader = machine.worker()
    if seen_before:
        assert reader.get("used()") > 50 * MIB
    os.kill(pid, 9)
    wait_until(lambda: one.returncode is not None, "it has ended")
    reader.do("q = alloc(50 * MIB)")
    assert [p.pid for p in emulator.books(machine.state).processes] == [reader.pid]
