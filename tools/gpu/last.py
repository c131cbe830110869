"""Risky parts: the last MiB of the GPU, and processes that are killed while memory is out."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from callers import HERE
from pairs import PAGERS, ballast, calibrated
from stage import GIB, MIB, Program, Stage, daemon, job_command, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stage import Daemon


SMALL_BYTES = 4 * GIB
"""Size of a job whose neighbour is killed: a program outside Kiwi takes the rest of the GPU. It
leaves 1.7 times as much, and its own context and the driver's share come off that."""
LEFT_BYTES, OTHER_BYTES = 12 * GIB, 2 * GIB
EMULATED_LEFT_BYTES, EMULATED_OTHER_BYTES = 96 * MIB, 32 * MIB
"""What a program outside Kiwi leaves to one that fills the GPU and to a small one that gets its
memory back for a moment."""
FULL_TQ_S = 1.0
"""Quantum of these two, long enough for some seconds of work without a move."""
STEP_S = 20.0
"""Time limit of a start and of a comparison, with 12 GiB to move out and in: 6 + 2 s."""


def full(stage: Stage) -> None:
    """Find the largest allocation alone and under each pager: Kiwi may not take the last MiB. Then
    let a program fill the GPU beside a program outside, go out for another, and come back."""
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
    left = EMULATED_LEFT_BYTES if stage.emulated else LEFT_BYTES
    hog = stage.spawn([sys.executable, str(HERE / "quirks_target.py"), f"--hog={left}"])
    try:
        hog.line(stage.left_s)
        for pager in reversed(PAGERS):  # the driver's checkpoint is the one with a margin to keep
            name = f"full and back, {pager}"
            with stage.attempt(name), daemon(stage, FULL_TQ_S, "--swap-floor", "0") as one:
                _and_back(stage, one, pager, name)
    finally:
        hog.end()


def _and_back(stage: Stage, one: Daemon, pager: str, name: str) -> None:
    """Fill the GPU, let another program have its memory back, and compare all bytes."""
    size = EMULATED_OTHER_BYTES if stage.emulated else OTHER_BYTES
    programs = [one.run("other", job_command("hold", bytes=size), pager)]
    try:
        # This one has its context before the GPU is full: with the in-process pager it keeps that.
        held = _said(stage, programs[0])["digest"]
        programs.append(one.run("full", [sys.executable, str(HERE / "filling_job.py")], pager))
        filled = _said(stage, programs[1])["bytes"]
        same = _ended(stage, programs[0])["digest"] == held
        wrong = _ended(stage, programs[1])["wrong_bytes"]
        moved = _moved(one.swaps())
    finally:
        for program in programs:
            program.end()
    both_ways = moved["out"] > 0 and moved["in"] >= moved["out"]
    stage.row(
        name, f"{filled // MIB} MiB filled, {wrong} bytes differ; the other's same: {same}",
        target="0 bytes, after a way out and in", passed=wrong == 0 and same and both_ways,
        moved_bytes=moved,
    )  # fmt: skip


def _said(stage: Stage, program: Program) -> dict[str, Any]:
    return program.line(min(STEP_S, stage.left_s))


def _ended(stage: Stage, program: Program) -> dict[str, Any]:
    program.say()
    return program.finish(min(STEP_S, stage.left_s))


def _moved(swaps: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the bytes that were moved each way."""
    return {
        way: sum(swap["bytes_moved"] for swap in swaps if swap["direction"] == way)
        for way in ("out", "in")
    }


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
        command = calibrated(stage, "driver", size, 3.0)
        alone = stage.run(command)["digest"]
        for pager in reversed(PAGERS):  # the default one first
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
