"""Tests of which programs have Kiwi's gate, and of programs without it."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from client_program import ClientProgram
from gpu_cells import PRELUDE
from patience import wait_until

import kiwi_emulator as emulator
from kiwi_core import preload
from kiwi_core.preload import ready
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook


pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = """
import json, os, sys
from cuda.bindings import driver
def ck(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None
ck(driver.cuInit(0))
ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
size = int(sys.argv[1]) << 20
pointer = ck(driver.cuMemAlloc(size))
ck(driver.cuMemsetD8(pointer, 7, size))
print(json.dumps({"pid": os.getpid()}), flush=True)
back = bytearray(size)
for _ in sys.stdin:
    ck(driver.cuCtxSynchronize())
    ck(driver.cuMemcpyDtoH(back, pointer, size))
    print(json.dumps(back.count(7) == size), flush=True)
"""


@pytest.fixture(autouse=True)
def compiled() -> None:
    ready.ensure()


@pytest.fixture
def run(stack: Any) -> Callable[..., ClientProgram]:
    """``run(daemon, "first", 150)`` starts a program that takes so many MiB under ``kiwi run``; the
    other arguments are the command that starts it (``env -u LD_PRELOAD``)."""

    def start(daemon: Daemon, name: str, mib: int, *before: str) -> ClientProgram:
        command = [*before, sys.executable, "-c", PROGRAM, str(mib)]
        program: ClientProgram = stack.enter_context(ClientProgram(daemon, name, command))
        return program

    return start


def test_programs_under_kiwi_run_are_guarded_and_take_turns(
    make_daemon: Callable[..., Daemon], run: Callable[..., ClientProgram]
) -> None:
    daemon = make_daemon("1x256MiB", "--tq", "0.5")
    first, second = run(daemon, "first", 150), run(daemon, "second", 150)
    assert first.introduction()["pid"]
    assert second.introduction()["pid"]
    for program in (first, second, first):
        assert program.get("look") is True
    for program in (first, second):
        assert program.session is not None
        assert program.session.guarded
        assert program.session.unguarded_text == ""
    wait_until(lambda: first.session and first.session.suspensions, "the first one was stopped")
    # A stopped program gets the notice when its turn comes again.
    assert second.end() == 0
    assert first.end() == 0


def test_a_program_with_a_stripped_environment_keeps_the_gpu_until_it_is_done(
    make_daemon: Callable[..., Daemon], run: Callable[..., ClientProgram], kiwi: Callable[..., Any]
) -> None:
    daemon = make_daemon("1x256MiB", "--tq", "0.5")
    bare = run(daemon, "bare", 150, "env", "-u", "LD_PRELOAD")
    assert bare.introduction()["pid"]
    wait_until(lambda: bare.session and not bare.session.guarded, "it is known to have no gate")
    other = run(daemon, "other", 150)

    def held_up() -> bool:
        return other.session is not None and other.session.problem == "blocked-unguarded"

    wait_until(held_up, "the other one is told why it waits")
    for _ in range(20):
        assert bare.get("look") is True
    assert bare.session is not None
    assert bare.session.suspensions == 0
    assert "LD_PRELOAD" in bare.session.unguarded_text
    text = kiwi(daemon, "status").out
    assert "unguarded" in text
    assert "LD_PRELOAD" in text
    refused = kiwi(daemon, "suspend", bare.session.id)
    assert refused.code == 1
    assert "no gate of Kiwi's" in refused.err
    assert not bare.session.kept_out
    assert bare.end() == 0
    assert other.introduction()["pid"]
    assert other.session is not None
    assert other.session.guarded
    assert other.end() == 0


CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", PROGRAM, "32"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip())
"""


@pytest.mark.parametrize("how", ["by LD_PRELOAD", "by the extension"])
def test_a_notebook_and_its_children_are_guarded(
    how: str, make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x256MiB")
    env = dict(daemon.env)
    if how == "by LD_PRELOAD":
        env |= preload.environment(preload.library(), env) | {"KIWI_PRELOAD_OWN": "0"}
    kernel = make_notebook(daemon, "A", **env).kernel
    kernel.check(PRELUDE)
    kernel.check("memory = Memory(32, 1)")
    kernel.check(f"PROGRAM = {PROGRAM!r}")
    assert "pid" in kernel.check(CHILD).text
    (session,) = daemon.status().sessions
    assert session.guarded, session.unguarded_text
    assert "Unguarded" not in kernel.check("%kiwi status").text
    kernel.check("child.communicate()")


def test_a_kernel_that_had_loaded_the_driver_before_kiwi_is_unguarded_and_says_so(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x256MiB")
    kernel = make_notebook(daemon, "A").kernel
    driver = str(emulator.build().libcuda)
    kernel.check(f"%%kiwi cpu\nimport ctypes\nearly = ctypes.CDLL({driver!r}, ctypes.RTLD_GLOBAL)")
    said = kernel.check(PRELUDE).stream("stderr")
    said += kernel.check("memory = Memory(32, 1)").stream("stderr")
    assert said.count("Restart this kernel") == 1, said

    def unguarded() -> bool:
        (session,) = daemon.status().sessions
        return not session.guarded and "LD_PRELOAD" in session.unguarded_text

    wait_until(unguarded, "the daemon sees it")
    assert "Unguarded" in str(kernel.check("%kiwi status").outputs())
    assert kernel.check("memory.intact()").result == "True"


def test_a_program_that_is_stopped_while_it_runs_loses_its_turn_and_nothing_else(
    make_daemon: Callable[..., Daemon], run: Callable[..., ClientProgram]
) -> None:
    daemon = make_daemon("1x256MiB", "--tq", "0.5")
    first = run(daemon, "first", 150)
    assert first.introduction()["pid"]
    # What the daemon has not read yet makes nobody wait.
    wait_until(lambda: first.session and first.session.resident_bytes >= 150 * MIB, "it is seen")
    os.kill(first.pid, signal.SIGSTOP)
    second = run(daemon, "second", 150)
    assert second.introduction()["pid"], "the stopped one does not keep the GPU"
    wait_until(lambda: first.session and first.session.stopped, "the status says so")
    for _ in range(5):
        assert second.get("look") is True
    os.kill(first.pid, signal.SIGCONT)
    wait_until(lambda: first.session and not first.session.stopped, "it goes on")
    assert second.end() == 0
    assert first.get("look") is True
    assert first.end() == 0
