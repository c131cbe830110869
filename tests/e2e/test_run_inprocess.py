"""Tests that a program under ``kiwi run --pager inprocess`` asks for the GPU only to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kiwi_core.states import MovedBy, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from daemon import Daemon

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = """
import sys
from cuda.bindings import driver
MIB = 1 << 20
def ck(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None
held = []
def take(size):
    pointer, value = ck(driver.cuMemAlloc(size * MIB)), (len(held) * 7 + 3) % 251
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
    print(eval(line), flush=True)
"""


class Program:
    def __init__(self, daemon: Daemon, name: str) -> None:
        command = ["run", "--pager", "inprocess", "--require", "--name", name, "--"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kiwi_core.cli", *command, sys.executable, "-c", PROGRAM],
            env={**os.environ, **daemon.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.daemon, self.name = daemon, name

    def get(self, expression: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def session(self) -> SessionStatus:
        return next(s for s in self.daemon.status().sessions if s.name == self.name)

    def wait_rests(self) -> None:
        """Wait until it lives and does not hold the GPU."""

        def rests(status: GpuStatus) -> bool:
            (session,) = (s for s in status.sessions if s.name == self.name)
            busy = (SessionState.RUNNING, SessionState.WAITING)
            return session.pager is MovedBy.INPROCESS and session.state not in busy

        self.daemon.wait_for(rests, f"{self.name} rests", 90.0)

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        with self.process:
            self.process.kill()


def test_two_programs_that_each_want_most_of_the_gpu(
    make_daemon: Callable[..., Daemon], stack: ExitStack
) -> None:
    """Neither waits for the other's quantum, which is ten minutes, and neither runs out of
    memory."""
    daemon = make_daemon("1x256MiB", "--tq", "600")
    first = Program(daemon, "first")
    stack.callback(first.kill)
    assert first.get("take(170)") == "None"
    first.wait_rests()
    second = Program(daemon, "second")
    stack.callback(second.kill)
    assert second.get("take(20)") == "None"
    for _ in range(10):  # up to 90 % of the GPU, in small steps
        assert second.get("take(20)") == "None"
    assert second.get("intact()") == "True"
    second.wait_rests()
    assert first.session.paged_out_bytes > 0
    assert first.get("intact()") == "True"
    assert second.get("intact()") == "True"
    assert (first.end(), second.end()) == (0, 0)


def test_a_program_that_is_out_when_its_kiwi_run_is_killed(
    make_daemon: Callable[..., Daemon], stack: ExitStack
) -> None:
    """The program is then its own session, and comes back when it is used: another idle program
    makes room for it."""
    daemon = make_daemon("1x256MiB", "--tq", "600", "--idle-after", "1")
    first = Program(daemon, "first")
    stack.callback(first.kill)
    assert first.get("take(170)") == "None"
    first.wait_rests()
    root = first.session.pid
    second = Program(daemon, "second")
    stack.callback(second.kill)
    assert second.get("take(170)") == "None"
    second.wait_rests()
    assert first.session.paged_out_bytes > 0
    first.process.kill()
    daemon.wait_for(
        lambda s: [x.paged_out_bytes > 0 for x in s.sessions if x.pid not in (root, second.pid)],
        "it is a session of its own, and out",
    )
    assert first.get("intact()") == "True"
    assert second.get("intact()") == "True"
    assert second.end() == 0
