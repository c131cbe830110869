"""Risky parts: the last MiB of the GPU, and processes that are killed while memory is out."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from pairs import PAGERS, ballast
from stage import GIB, MIB, Program, Stage, daemon, job_command, wait_until

if TYPE_CHECKING:
    from stage import Daemon


SMALL_BYTES = 6 * GIB
"""Size of a job whose neighbour is killed: a program outside Kiwi takes the rest of the GPU."""


def full(stage: Stage) -> None:
    """Find the largest allocation alone and under each pager: Kiwi may not take the last MiB."""
    alone = stage.run([*_largest()])["bytes"]
    stage.row("largest allocation alone", alone // MIB, unit="MiB")
    for pager in PAGERS:
        with stage.attempt(f"largest allocation, {pager}"), daemon(stage, 30.0) as one:
            program = one.run("full", _largest(), pager)
            try:
                found = program.finish(stage.left_s)["bytes"]
            finally:
                program.end()
            # The in-process pager's own streams and tables may take a little.
            stage.row(
                f"largest allocation, {pager}", found // MIB, unit="MiB",
                target="within 64 MiB of alone", passed=found >= alone - 64 * MIB,
            )  # fmt: skip


def _largest() -> list[str]:
    return [sys.executable, "-c", LARGEST]


LARGEST = """
import json
from cuda.bindings import driver as cu
assert int(cu.cuInit(0)[0]) == 0
assert int(cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1])[0]) == 0
free = cu.cuMemGetInfo()[1]
low, high = 0, free >> 20
while low < high:
    middle = (low + high + 1) // 2
    code, address = cu.cuMemAlloc(middle << 20)
    if int(code) == 0:
        cu.cuMemFree(address)
        low = middle
    else:
        high = middle - 1
print(json.dumps({"bytes": low << 20}))
"""


def killed(stage: Stage) -> None:
    """Kill the daemon, then a program, while memory is out; the others must go on, bytes right."""
    size = min(stage.size(0.6), SMALL_BYTES)
    with ExitStack() as stack:
        ballast(stage, size, stack)
        command = job_command("driver", bytes=size, rounds=30 if stage.emulated else 8000)
        alone = stage.run(command)["digest"]
        for pager in PAGERS:
            for victim in ("daemon", "program"):
                name = f"{victim} killed, {pager}"
                with stage.attempt(name):
                    _killed(stage, command, alone, pager, victim, name)


def _killed(
    stage: Stage, command: list[str], alone: str, pager: str, victim: str, name: str
) -> None:
    with daemon(stage, 0.5 if stage.emulated else 1.0) as one:
        pair = [one.run(who, command, pager) for who in ("a", "b")]
        try:
            for program in pair:  # before that, the daemon does not know its needs
                program.line(stage.left_s)
            wait_until(lambda: _one_is_out(one), min(60.0, stage.left_s), "one program is out")
            survivors = _kill(one, pair, victim)
            said = [program.finish(stage.left_s)["digest"] for program in survivors]
        finally:
            for program in pair:
                program.end()
    same = set(said) == {alone}
    stage.row(
        name,
        "the rest goes on, bytes right" if same else "bytes differ",
        target="bytes right",
        passed=same,
    )


def _one_is_out(one: Daemon) -> bool:
    return any(session["paged_out_bytes"] for session in one.status()["sessions"])


def _kill(one: Daemon, pair: list[Program], victim: str) -> list[Program]:
    """Kill; return the programs that must survive it."""
    if victim == "daemon":
        # The child that serves the GPU; its supervisor starts another.
        for pid in _children(one.process.pid):
            _signal(pid)
        time.sleep(0.5)
        return pair
    out = [one_ for one_ in one.status()["sessions"] if one_["paged_out_bytes"]]
    pids = {session["pid"] for session in out}
    dead = next((program for program in pair if program.pid in pids), pair[0])
    for pid in [*_children(dead.pid), dead.pid]:
        _signal(pid)
    return [program for program in pair if program is not dead]


def _signal(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    import psutil

    found: list[Any] = psutil.Process(pid).children(recursive=True)
    return [one.pid for one in found]
