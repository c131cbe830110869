"""Tests of the command line on a real daemon, with two programs that do not fit together."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from cli_process import PATIENCE_S, finish
from scripted_daemon import eventually

PROGRAM = """
import hashlib, sys, time
from cuda.bindings import driver
import numpy
def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
ok(driver.cuInit(0))
ok(driver.cuCtxCreate(None, 0, ok(driver.cuDeviceGet(0))))
size, seed, seconds = 150 << 20, int(sys.argv[1]), float(sys.argv[2])
data = numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)
address = ok(driver.cuMemAlloc(size))
ok(driver.cuMemcpyHtoD(address, data.ctypes.data, size))
until = time.monotonic() + seconds
while time.monotonic() < until:
    ok(driver.cuCtxSynchronize())
    time.sleep(0.01)
back = numpy.zeros_like(data)
ok(driver.cuMemcpyDtoH(back.ctypes.data, address, size))
print("intact" if (back == data).all() else "CORRUPT", flush=True)
"""
"""Holds 150 MiB of random bytes on a GPU of 256 MiB for a while."""


@pytest.fixture
def real_daemon(spawn, sockets):
    """Run a daemon, and end it by SIGTERM, which must succeed."""
    process = spawn("daemon", "--emulate", "1x256MiB", "--tq", "0.5", "--socket-dir", str(sockets))
    eventually(lambda: list(sockets.glob("*.sock")) or process.poll() is not None)
    assert process.poll() is None, finish(process).err
    yield process
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert result.code == 0, result.err
    assert "EMULATED" in result.out


@pytest.mark.timeout(PATIENCE_S * 4)
def test_two_programs_take_turns_and_lose_no_byte(real_daemon, spawn, kiwi, sockets):
    programs = [
        spawn(
            "run", "--name", f"p{n}", "--require", "--", sys.executable, "-c", PROGRAM, str(n), "4"
        )
        for n in (1, 2)
    ]
    suspended = eventually(lambda: _suspended(kiwi))
    assert suspended <= {"p1", "p2"}
    for program in programs:
        result = finish(program)
        assert (result.code, result.out) == (0, "intact\n"), result.err
    assert kiwi("set", "tq=3").code == 0
    eventually(lambda: not _gpu(kiwi)["sessions"])
    assert _gpu(kiwi)["scheduler"]["tq_s"] == 3.0
    (journal,) = (sockets / "state").glob("*.journal")
    report = eventually(lambda: _replayed(kiwi, str(journal)))
    assert {move["direction"] for move in report["moves"]} == {"in", "out"}
    assert len({span["session"] for span in report["held"]}) == 2


def _gpu(kiwi) -> dict:
    result = kiwi("status", "--json")
    assert result.code == 0, result.err
    (gpu,) = json.loads(result.out)["gpus"]
    return gpu


def _suspended(kiwi) -> set[str]:
    return {one["name"] for one in _gpu(kiwi)["sessions"] if one["suspensions"] > 0}


def _replayed(kiwi, journal: str) -> dict | None:
    """Return the replay once the journal is complete: the scheduler must decide the same again."""
    result = kiwi("replay", journal, "--json")
    runs = json.loads(result.out)["runs"] if result.code == 0 else []
    return runs[0] if runs and len({span["session"] for span in runs[0]["held"]}) == 2 else None
