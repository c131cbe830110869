"""A part of run_all.py: do huge pages make the driver's own moves faster?

The driver's checkpoint keeps what it moves out in anonymous memory of the program, at 2 GB/s on an
H200, where the bus has 55. The machine's setting belongs to its administrator, so a program is
moved in three ways that each concern this program alone: without any huge pages (``prctl``), as the
machine is, and with a preloaded ``mmap`` that asks for huge pages (``advise_huge.c``). How much of
what was moved came to lie in huge pages tells whether a way did what it should.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocking_pager import BlockingPager
from paging import target_of
from stage import GIB, MIB, Skipped, Stage, job_command

if TYPE_CHECKING:
    from collections.abc import Callable

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE, EMULATED_SIZE = 4 * GIB, 32 * MIB
ROUNDS, EMULATED_ROUNDS = 3, 1
SEED = 9
WITHOUT_HUGE = """
import ctypes, os, sys
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run(stage: Stage) -> None:
    """Move a program a few times in each way, the ways in random order."""
    stage.row("the machine's transparent huge pages", setting())
    size = EMULATED_SIZE if stage.emulated else SIZE
    commands = {"without": _without, "as the machine is": job, "asked for": job}
    env: dict[str, dict[str, str]] = {}
    with stage.attempt("asked for"):
        env["asked for"] = {"LD_PRELOAD": str(library(stage))}
    if "asked for" not in env:
        del commands["asked for"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in commands}
    order = random.Random(SEED)
    for _ in range(EMULATED_ROUNDS if stage.emulated else ROUNDS):
        began_s = time.monotonic()
        for way in order.sample(list(commands), len(commands)):
            with stage.attempt(way):
                found[way].append(moved(stage, commands[way](size), env.get(way, {}), size))
        _tell(stage, found)
        if stage.left_s < 1.2 * (time.monotonic() - began_s):
            return


def setting() -> str:
    with suppress(OSError):
        return SETTING.read_text().strip()
    return "not known"


def job(size: int) -> list[str]:
    return job_command("hold", bytes=size)


def _without(size: int) -> list[str]:
    return [sys.executable, "-c", WITHOUT_HUGE, *job(size)[1:]]


def library(stage: Stage) -> Path:
    """Compile the preloaded ``mmap``."""
    from kiwi_core import compiled

    built = stage.work / "advise_huge.so"
    try:
        compiler = compiled.find_compiler()
    except compiled.Unavailable as error:
        raise Skipped("there is no C compiler") from error
    source = str(Path(__file__).with_name("advise_huge.c"))
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", "-o", str(built), source], check=True)
    return built


def moved(stage: Stage, command: list[str], more: dict[str, str], size: int) -> dict[str, float]:
    """Move a program out and in once; return GB/s each way, and the share of what went out that
    came to lie in huge pages."""
    with ExitStack() as stack:
        program = stage.spawn(command, stage.env | more)
        stack.callback(program.end)
        pager = BlockingPager(stage.uuid)
        stack.callback(pager.close)
        first = program.line(stage.left_s)
        target, before = target_of(program.pid), huge_bytes(program.pid)
        said = {"out": _gb_s(stage, lambda until: pager.page_out(target, until), size)}
        said["huge"] = (huge_bytes(program.pid) - before) / size
        said["in"] = _gb_s(stage, lambda until: pager.page_in(target, until), size)
        program.say("go\n")
        if program.finish(stage.left_s)["digest"] != first["digest"]:
            raise RuntimeError("its bytes changed")
    return said


def _gb_s(stage: Stage, move: Callable[[int], Any], size: int) -> float:
    from kiwi_core.pager.api import Moved

    outcome = move(time.monotonic_ns() + int(max(1.0, stage.left_s) * 1e9))
    if not isinstance(outcome, Moved):
        raise RuntimeError(f"{outcome}")  # noqa: TRY004
    return (outcome.bytes_moved or size) / outcome.elapsed_ns


def huge_bytes(pid: int) -> int:
    """Return the bytes of a process's anonymous memory that are in huge pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^AnonHugePages: *(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _tell(stage: Stage, found: dict[str, list[dict[str, float]]]) -> None:
    for way, runs in found.items():
        for direction in ("out", "in") if runs else ():
            gb_s = [round(one[direction], 3) for one in runs]
            base = [one[direction] for one in found["without"]]
            times = statistics.median(gb_s) / statistics.median(base) if base else None
            stage.row(
                f"{direction}, huge pages {way}", statistics.median(gb_s), unit="GB/s",
                all_gb_s=gb_s, times_without=times and round(times, 3),
                in_huge_pages=[round(one["huge"], 3) for one in runs],
            )  # fmt: skip
