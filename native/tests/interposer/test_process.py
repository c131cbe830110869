"""Tests of the library in a process's life: switched off, at interrupts, forks, exec and exit."""

from __future__ import annotations

import os

import pytest
from preload_world import compile_c, run

import kiwi_emulator as emulator
from kiwi_core import preload

LIBRARY = "import ctypes, os, signal, threading, time; kiwi = ctypes.CDLL(None)"
OWNED = (
    "(lambda b: kiwi.kiwi_preload_test_books(ctypes.byref(b)) and 0 or b[0])"
    "((ctypes.c_uint64 * 32)())"
)


def test_it_owns_and_counts(world):
    worker = world.worker()
    worker.do(LIBRARY)
    before = worker.get("kiwi.kiwi_preload_test_passed()")
    worker.do("p = alloc(8 * MIB); write(p, b'kiwi'); free(p); q = alloc(8 * MIB)")
    assert worker.get("kiwi.kiwi_preload_test_passed()") == before + 3
    assert worker.get(OWNED) == 8 << 20


@pytest.mark.parametrize("setting", [{"KIWI_DISABLE": "1"}, {"KIWI_PRELOAD_OWN": "0"}])
def test_it_owns_nothing_where_it_must_not(world, setting):
    worker = world.worker(**setting)
    worker.do(LIBRARY)
    worker.do("p = alloc(8 * MIB)")
    expected = worker.get("fill(p, 1, 8 * MIB)")
    assert worker.get("digest(p, 8 * MIB)") == expected
    assert worker.get(OWNED) == 0
    assert (worker.get("kiwi.kiwi_preload_test_passed()") > 0) == ("KIWI_DISABLE" not in setting)
    worker.do("free(p)")


def test_an_interrupt_at_the_gate(world):
    """The C handler runs while the thread waits; the Python handler runs after the call, as with
    any other call into C."""
    worker = world.worker()
    worker.do(LIBRARY)
    worker.do("p = alloc(4096); assert kiwi.kiwi_preload_test_close(ctypes.c_int64(60 * 10**9))")
    worker.do(
        "def poke():\n"
        "    status = f'/proc/self/task/{os.getpid()}/syscall'\n"
        "    looks = 0\n"
        "    while looks < 4:\n"  # in one, it may wait for its turn to run Python, at a futex, too
        "        time.sleep(0.02); call = open(status).read().split()[0]\n"
        "        looks = looks + 1 if seen == ['comes'] and call in ('202', '98') else 0\n"
        "    seen.clear()\n"
        "    os.kill(os.getpid(), signal.SIGINT); seen.append('poked')\n"
        "    time.sleep(0.1); kiwi.kiwi_preload_test_open()\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append('handled'))\n"
        "t = threading.Thread(target=poke); t.start()\n"
        "seen.append('comes'); write(p, b'kiwi'); seen.append('written'); t.join()"
    )
    assert worker.get("seen[0] == 'poked' and sorted(seen[1:]) == ['handled', 'written']")
    assert worker.get("read(p, 4)[:4].decode()") == "kiwi"


def test_the_child_of_a_program_that_uses_the_gpu(world):
    """The driver refuses every call, and nothing of Kiwi hangs, whether the gate is closed or
    not."""
    worker = world.worker()
    worker.do(LIBRARY)
    worker.do("p = alloc(MIB); expected = fill(p, 1, MIB)")
    worker.do("assert kiwi.kiwi_preload_test_close(ctypes.c_int64(60 * 10**9))")
    worker.do(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    names = [name_of(driver.cuMemAlloc, 8), name_of(driver.cuMemFree, p)]\n"
        "    os._exit(7 if set(names) == {'CUDA_ERROR_NOT_INITIALIZED'} else 8)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "kiwi.kiwi_preload_test_open()"
    )
    assert worker.get("status") == 7
    assert worker.get("digest(p, MIB) == expected")


def test_the_child_of_one_that_does_not(world):
    worker = world.worker(setup="")
    worker.do(LIBRARY)
    worker.do(
        "ck(driver.cuDriverGetVersion())\n"  # libcuda is loaded, and not initialised
        "child = os.fork()\n"
        "if child == 0:\n"
        "    init(); p = alloc(MIB); good = fill(p, 1, MIB) == digest(p, MIB)\n"
        f"    os._exit(7 if good and {OWNED} >= MIB else 8)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    assert worker.get("status") == 7
    worker.do("init(); free(alloc(MIB))")


def test_exec_gives_back_what_was_owned(world):
    worker = world.worker()
    worker.do("import os, sys; p = alloc(64 * MIB)")
    assert emulator.books(world.state).gpus[0].used_bytes >= 64 << 20
    worker.send("os.execv('/bin/sh', ['sh', '-c', 'exit 3'])", "exec")
    assert worker.ended(60.0)


@pytest.mark.parametrize("gate", ["open", "closed", "out"])
def test_a_program_ends_with_memory_wherever_it_is(world, gate):
    code = {"open": "", "closed": "kiwi.kiwi_preload_test_close(ctypes.c_int64(10**10))"}
    code["out"] = "assert kiwi.kiwi_preload_test_out(ctypes.c_int64(10**10), None, 0) == 0"
    worker = world.worker()
    worker.do(LIBRARY)
    worker.do("p = alloc(8 * MIB); q = ck(driver.cuStreamCreate(0))")
    worker.do(code[gate] or "pass")
    worker.end_input()
    assert worker.ended(60.0), f"{worker.pid} hangs at its end"


def test_names_that_lead_nowhere(library, tmp_path):
    """A program that asks by a weak symbol whether it was linked with the driver is told so."""
    program = compile_c("weak.c", tmp_path / "weak")
    plain = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    for more in ({}, preload.environment(library, plain)):
        done = run(program, environment=plain | more)
        assert (done.returncode, done.stdout, done.stderr) == (0, "absent\n", "")
