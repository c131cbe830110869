"""Tests of deadlocks between the GIL, the program's own locks, and a gate that closes.

Nothing may hang, whichever thread holds the GIL: the pager is no Python thread and takes no lock.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pager_daemon import eventually

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from conftest import Stage

MIB = 1 << 20
NOT_YET_S = 0.3
SETUP = """
import ctypes
init()
p = alloc(16 * MIB)
d = fill(p, 1, 16 * MIB)
small = alloc(MIB)
context = ck(driver.cuCtxGetCurrent())
keeps_gil = ctypes.PyDLL("libcuda.so.1")
libc = ctypes.PyDLL(None)
"""

GIL_AND_LOCK = """
lock, stop, rounds = threading.Lock(), False, [0, 0, 0]
def submits():
    ck(driver.cuCtxSetCurrent(context))
    while not stop:
        with lock:
            assert keeps_gil.cuMemsetD8_v2(ctypes.c_uint64(small), 1, ctypes.c_size_t(MIB)) == 0
        rounds[0] += 1
def wants_the_lock(mine):
    ck(driver.cuCtxSetCurrent(context))
    while not stop:
        with lock:
            rounds[mine] += 1
        ck(driver.cuMemsetD8(small, 1, MIB))
threads = [threading.Thread(target=submits)]
threads += [threading.Thread(target=wants_the_lock, args=(n,)) for n in (1, 2)]
for thread in threads: thread.start()
"""


def test_a_thread_at_the_gate_with_the_gil_and_a_lock(stage: Stage) -> None:
    program = stage.program(SETUP + GIL_AND_LOCK)
    peer = stage.daemon.peer()
    for _ in range(10):
        before = program.get("list(rounds)")
        eventually(lambda before=before: all(map(int.__lt__, before, program.get("rounds"))))
        out = peer.do("page-out")
        assert out["outcome"] == "moved", out
        assert peer.do("page-in")["outcome"] == "moved"
    program.do("stop = True\nfor thread in threads: thread.join()")
    assert program.get("digest(p, 16 * MIB) == d")


def test_page_out_behind_a_long_call_with_the_gil(stage: Stage, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = stage.program(SETUP)
    peer = stage.daemon.peer()
    program.send(
        f"libc.read(os.open({str(pipe)!r}, os.O_RDONLY), ctypes.create_string_buffer(1), 1)"
    )
    with open(pipe, "wb") as end:  # both ends are open: the call has the GIL, or will in a moment
        assert not program.answered(NOT_YET_S)
        for _ in range(3):
            assert peer.do("page-out")["outcome"] == "moved"
            assert peer.do("page-in")["outcome"] == "moved"
        assert not program.answered(), "it has had the GIL all along"
        end.write(b"x")
    assert program.answer() == 1
    assert program.get("digest(p, 16 * MIB) == d")


AT_EXIT = """
import atexit, gc, sys
from cuda.core import Device
device = Device(); device.set_current()
class Owner:
    def __init__(self): self.p = alloc(MIB)
    def __del__(self, free=driver.cuMemFree, end=os._exit): int(free(self.p)[0]) == 0 or end(7)
sys.owner = Owner()
threading.held_until_the_very_end = Owner()
atexit.register(free, alloc(MIB))
loop = Owner(); loop.itself = loop; gc.disable()
"""


@pytest.mark.parametrize("action", ["hold", "page-out"])
@pytest.mark.parametrize("daemon", ["there", "gone"])
def test_frees_at_exit_wait_at_a_shut_gate(stage: Stage, action: str, daemon: str) -> None:
    """The frees ask for the lease; without a daemon the memory comes back first, and the gate
    opens."""
    program = stage.program(SETUP + AT_EXIT, KIWI_PRELOAD_ALONE_S="1")
    peer = stage.daemon.peer()
    assert peer.do(action)["outcome"] == "moved"
    if daemon == "gone":
        stage.daemon.stop()
    program.end_input()
    if daemon == "there":
        peer.await_received("want-lease")
        peer.begin("free" if action == "hold" else "page-in")
    assert program.ended(30)
    assert program.returncode == 0


def test_an_exit_in_the_middle_of_a_page_out(stage: Stage) -> None:
    program = stage.program(SETUP)
    peer = stage.daemon.peer()
    emulator.set_copy_bandwidth(stage.state, 8 * MIB)
    peer.begin("page-out")
    program.end_input()
    assert program.ended(30)
    assert program.returncode == 0


def test_an_exit_while_a_thread_waits_for_room(stage: Stage) -> None:
    stage.daemon.grants_room = None
    program = stage.program(SETUP)
    program.do(
        "def grow():\n"
        "    ck(driver.cuCtxSetCurrent(context))\n"
        "    driver.cuMemAlloc(250 * MIB)\n"
        "threading.Thread(target=grow, daemon=True).start()"
    )
    stage.daemon.peer().await_received("want-room")
    program.end_input()
    assert program.ended(30)
    assert program.returncode == 0


HOST_FUNCTION = """
entered, leave = threading.Event(), threading.Event()
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def host_function(_):
    entered.set()
    leave.wait()
"""


def test_a_pending_host_function_refuses_the_page_out(stage: Stage) -> None:
    program = stage.program(SETUP + HOST_FUNCTION)
    peer = stage.daemon.peer()
    program.do("assert keeps_gil.cuLaunchHostFunc(None, host_function, None) == 0; entered.wait()")
    for action in ("hold", "page-out"):
        done = peer.do(action, within_s=0.3)
        assert (done["outcome"], done["reason"]) == ("refused", "draining"), done
        assert peer.state["state"] == "resident"
        program.send("ck(driver.cuMemsetD8Async(small, 1, MIB, 0))", "exec")
        assert not program.answered(NOT_YET_S), "new work waits until the old has ended"
        assert peer.do("free")["outcome"] == "moved"
        program.answer()
    program.do("leave.set()")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 16 * MIB) == d")


def test_a_host_function_that_needs_the_gil_which_waits_at_the_gate(stage: Stage) -> None:
    """The gate closes, a thread waits at it with the GIL, and the host function that the pager
    waits for needs the GIL: only the time limit helps."""
    program = stage.program(SETUP + HOST_FUNCTION + "leave.set()")
    peer = stage.daemon.peer()
    program.send(
        "for _ in range(30):\n"
        "    assert keeps_gil.cuLaunchHostFunc(None, host_function, None) == 0\n"
        "    keeps_gil.cuMemsetD8Async(ctypes.c_uint64(small), 1, ctypes.c_size_t(MIB), None)",
        "exec",
    )
    outcomes = set()
    while not program.answered():
        done = peer.do("hold", within_s=0.2)
        outcomes.add((done["outcome"], done["reason"]))
        peer.do("free")
    program.answer()
    assert outcomes <= {("moved", ""), ("refused", "lock-timeout"), ("refused", "draining")}
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 16 * MIB) == d")
