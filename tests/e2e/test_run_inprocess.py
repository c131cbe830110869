"""Tests that a program under ``kiwi run`` whose library owns its memory asks for the GPU only to
compute."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest
from client_program import ClientProgram

from kiwi_core.states import MovedBy, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from daemon import Daemon

    from kiwi_core.wire.messages import GpuStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = """
import json, sys
from cuda.bindings import driver
MIB = 1 << 20
def ck(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None
held = []
props, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access.location = props.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
def map_own(size):
    handle = ck(driver.cuMemCreate(size, props, 0))
    at = ck(driver.cuMemAddressReserve(size, 0, 0, 0))
    ck(driver.cuMemMap(at, size, 0, handle, 0))
    ck(driver.cuMemSetAccess(at, size, [access], 1))
    return at
def allocate(size):
    return ck(driver.cuMemAlloc(size))
def take(size, how=allocate):
    pointer, value = how(size * MIB), (len(held) * 7 + 3) % 251
    ck(driver.cuMemsetD8(pointer, value, size * MIB))
    held.append((pointer, value, size * MIB))
def intact():
    for pointer, value, size in held:
        back = bytearray(size)
        ck(driver.cuMemcpyDtoH(back, pointer, size))
        if back.count(value) != size:
            return False
    return True
ck(driver.cuInit(0))
ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


@pytest.fixture
def run(stack: ExitStack) -> Callable[[Daemon, str], ClientProgram]:
    def start(daemon: Daemon, name: str) -> ClientProgram:
        command = [sys.executable, "-c", PROGRAM]
        program = ClientProgram(daemon, name, command, "--pager", "auto")
        return stack.enter_context(program)

    return start


def wait_rests(program: ClientProgram) -> None:
    """Wait until the program lives and does not hold the GPU."""

    def rests(status: GpuStatus) -> bool:
        (session,) = (s for s in status.sessions if s.name == program.name)
        busy = (SessionState.RUNNING, SessionState.WAITING)
        return session.pager is MovedBy.INPROCESS and session.state not in busy

    program.daemon.wait_for(rests, f"{program.name} rests", 90.0)


@pytest.mark.parametrize("how", ["allocate", "map_own"])
def test_two_programs_that_each_want_most_of_the_gpu(
    make_daemon: Callable[..., Daemon], run: Callable[[Daemon, str], ClientProgram], how: str
) -> None:
    """Neither waits for the other's quantum, which is ten minutes, and neither runs out of memory,
    whether they allocate it or map it themselves, as JAX does."""
    daemon = make_daemon("1x256MiB", "--tq", "600")
    first = run(daemon, "first")
    assert first.get(f"take(170, {how})") is None
    wait_rests(first)
    second = run(daemon, "second")
    assert second.get(f"take(20, {how})") is None
    for _ in range(10):  # up to 90 % of the GPU, in small steps
        assert second.get(f"take(20, {how})") is None
    assert second.get("intact()") is True
    wait_rests(second)
    assert first.session.paged_out_bytes > 0
    assert first.get("intact()") is True
    assert second.get("intact()") is True
    assert (first.end(), second.end()) == (0, 0)


def test_a_program_that_is_out_when_its_kiwi_run_is_killed(
    make_daemon: Callable[..., Daemon], run: Callable[[Daemon, str], ClientProgram]
) -> None:
    """The program is then its own session, and comes back when it is used: another idle program
    makes room for it."""
    daemon = make_daemon("1x256MiB", "--tq", "600", "--idle-after", "1")
    first = run(daemon, "first")
    assert first.get("take(170)") is None
    wait_rests(first)
    root = first.session.pid
    second = run(daemon, "second")
    assert second.get("take(170)") is None
    wait_rests(second)
    assert first.session.paged_out_bytes > 0
    first.kill_kiwi_run()
    daemon.wait_for(
        lambda s: any(x.paged_out_bytes for x in s.sessions if x.pid not in (root, second.pid)),
        "it is a session of its own, and out",
    )
    assert first.get("intact()") is True
    assert second.get("intact()") is True
    assert second.end() == 0


def test_a_program_that_crashed_after_a_move_leaves_its_memory_to_the_driver_next_time(
    make_daemon: Callable[..., Daemon], run: Callable[[Daemon, str], ClientProgram]
) -> None:
    daemon = make_daemon("1x256MiB", "--tq", "600", "--idle-after", "1")
    first, other = run(daemon, "job"), run(daemon, "other")
    for one in (first, other, first):
        assert one.get("take(140) if not held else intact()") in (None, True)
        wait_rests(one)
    first.ask("__import__('os').abort()")
    assert first.end() == 128 + signal.SIGABRT
    again = run(daemon, "job again")
    assert again.get("take(20)") is None
    daemon.wait_for(lambda _: "has crashed within 10 s" in again.session.pager_text, "it is known")
    assert again.session.pager is MovedBy.CHECKPOINT
    assert (again.end(), other.end()) == (0, 0)
