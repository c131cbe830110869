"""Tests that each GPU has one quota for all processes, live and dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_processes import wait_until

import kiwi_emulator as emulator
from kiwi_emulator import _layout

if TYPE_CHECKING:
    from cuda_processes import Worker

MIB = 1 << 20


def socket_name(worker: Worker) -> str:
    return f"{Path('/proc/self/ns/pid').stat().st_ino}-{worker.pid}"


def test_processes_share_a_gpu_and_see_each_other(machine):
    a, b = machine.worker(), machine.worker()
    a.do("p = alloc(40 * MIB)")
    assert b.get("used()") == 44 * MIB
    assert b.fails("alloc(21 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    b.do("q = alloc(20 * MIB)")
    a.do("free(p)")
    assert b.get("used()") == 24 * MIB


def test_a_failed_allocation_costs_nothing(machine):
    a = machine.worker()
    assert a.fails("alloc(63 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert machine.used() == 2 * MIB
    a.do("alloc(62 * MIB)")


def test_no_context_without_room(machine):
    machine.worker().do("alloc(61 * MIB)")
    late = machine.worker(setup="")
    assert late.fails("init()") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_killed_process_frees_its_memory_for_the_next_allocation(machine):
    a, b = machine.worker(), machine.worker()
    a.do("p = alloc(50 * MIB)")
    a.kill()
    b.do("q = alloc(60 * MIB)")
    assert machine.device_bytes(b) == 60 * MIB


def test_a_normal_exit_clears_the_books_and_the_socket(machine):
    a = machine.worker()
    a.do("p = alloc(MIB)")
    socket = machine.state.with_name(machine.state.name + ".d") / socket_name(a)
    assert socket.exists()
    a.end_input()
    assert a.ended(30.0)
    assert machine.used() == 0
    assert not socket.exists()


ASK = """
import os, socket, sys
os.chdir(sys.argv[1])  # as root: another user cannot go all the way
os.setgroups([]); os.setgid(54321); os.setuid(54321)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect(sys.argv[2])
    asking.send(bytes(int(sys.argv[3])))
    print(int.from_bytes(asking.recv(8)[:4], sys.byteorder))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_reaches_the_socket_and_is_refused(machine):
    """Root without CAP_DAC_OVERRIDE must reach it, so its mode cannot say who may ask."""
    a = machine.worker("os.umask(0o077); ck(driver.cuInit(0))")
    directory = machine.state.with_name(machine.state.name + ".d")
    assert (directory / socket_name(a)).stat().st_mode & 0o777 == 0o666
    directory.chmod(0o777)  # like root's daemon
    request_bytes = 12 + 32 * _layout.GPUS_MAX
    answer = subprocess.run(
        [sys.executable, "-I", "-c", ASK, directory, socket_name(a), str(request_bytes)],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip
    assert int(answer) == 800, "CUDA_ERROR_NOT_PERMITTED"


def test_a_forked_child_has_no_gpu_and_does_not_disturb_the_parent(machine):
    a, controller = machine.worker(), machine.worker("ck(driver.cuInit(0))")
    a.do("p = alloc(8 * MIB)")
    expected = a.get("fill(p, 1, 8 * MIB)")
    a.do(
        "r, w = os.pipe(); child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(w, name_of(driver.cuMemGetInfo).encode() + b' ' + "
        "name_of(driver.cuInit, 0).encode())\n"
        "    time.sleep(600)"
    )
    children = [a.get("child")]
    try:
        said = a.get("os.read(r, 100).decode()")
        assert said == "CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_NOT_INITIALIZED"
        assert machine.device_bytes(a) == 8 * MIB
        controller.do(f"suspend({a.pid}); resume({a.pid})")
        assert a.get("digest(p, 8 * MIB)") == expected
        machine.faults.set("hang", operation="lock")
        controller.send(f"name_of(driver.cuCheckpointProcessLock, {a.pid}, None)")
        wait_until(lambda: machine.faults.hanging() == 1, "the lock is under way")
        # it inherits the caller's connection
        children.append(a.get("os.fork() or time.sleep(600)"))
        a.kill()
        assert controller.answer() == "CUDA_ERROR_OPERATING_SYSTEM"
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_a_child_that_execs_is_a_process_of_its_own(machine):
    a = machine.worker()
    a.do(
        "import subprocess; out = subprocess.run([sys.executable, '-c', "
        "'from cuda.bindings import driver as d; print(int(d.cuInit(0)[0]))'], "
        "capture_output=True, text=True).stdout"
    )
    assert a.get("out.strip()") == "0"


def test_a_process_killed_inside_the_lock_blocks_nobody(machine):
    """A kill may hit at any point; the robust lock and the reaping keep the books consistent."""
    for round_ in range(6):
        victim = machine.worker()
        victim.send("[free(alloc(MIB)) for _ in range(10**9)]")
        wait_until(lambda v=victim: machine.device_bytes(v) > 0, "it is under way")
        victim.kill()
        assert machine.used() == 0, f"round {round_}"
    machine.worker().do("alloc(60 * MIB)")


def test_each_gpu_has_its_own_quota(boot):
    machine = boot("2x32MiB")
    a = machine.worker()
    a.do("alloc(30 * MIB); init(1); alloc(30 * MIB)")
    assert [machine.used(0), machine.used(1)] == [32 * MIB, 32 * MIB]


def test_context_size_is_settable(machine):
    emulator.set_context_bytes(machine.state, 10 * MIB)
    machine.worker()
    assert machine.used() == 10 * MIB


@pytest.mark.parametrize("value", ["", "/nonexistent/state", "/dev/null"])
def test_without_a_usable_state_file_there_is_no_device(machine, value):
    worker = machine.worker(setup="", KIWI_EMULATOR_STATE=value)
    assert worker.get("name_of(driver.cuInit, 0)") == "CUDA_ERROR_NO_DEVICE"
    worker.do("import pynvml")
    assert "Driver Not Loaded" in worker.fails("pynvml.nvmlInit()")
