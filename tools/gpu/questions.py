"""A part of run_all.py: small questions to the driver, on whose answers steps of the work depend.

- Does an unmap wait for copies elsewhere in the context? Then a page-out should unmap after its
  last copy.
- Does a lower stack limit give memory of an idle context back? Then contexts that stay cost less.
- What do the calls of virtual memory cost?
- Do two moves by the driver, of two programs, overlap? Then contexts need not be taken one after
  the other.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from blocking_pager import BlockingPager
from paging import target_of
from stage import Ended, Stage, job_command

if TYPE_CHECKING:
    from kiwi_core.pager.api import Target

SMALL_BYTES = 1 << 24
"""Memory of a program of which mostly the context is moved."""


def run(stage: Stage) -> None:
    """Ask in a process of their own, which may hang or die; then move two programs."""
    with stage.attempt("the driver's answers"):
        _ask(stage)
    with stage.attempt("two moves at once"):
        _two_moves(stage)


def _ask(stage: Stage) -> None:
    script = str(Path(__file__).with_name("question_program.py"))
    program = stage.spawn([sys.executable, script, str(stage.total_bytes)])
    try:
        while True:
            said = program.line(stage.left_s / 2)
            name = said["question"].replace("_", " ")
            if "failed" in said:
                stage.row(name, said["failed"], passed=False)
            else:
                stage.row(name, said["answer"])
    except Ended:
        if status := program.status():
            raise RuntimeError(f"it ended with status {status}") from None
    finally:
        program.end()


def _two_moves(stage: Stage) -> None:
    """Page two small programs out one after the other, and at once."""
    with ExitStack() as stack:
        pager = BlockingPager(stage.uuid)
        stack.callback(pager.close)
        programs = [stage.spawn(job_command("hold", bytes=SMALL_BYTES)) for _ in range(2)]
        for program in programs:
            stack.callback(program.end)
        for program in programs:
            program.line(stage.left_s)
        targets = [target_of(program.pid) for program in programs]
        _both_ways(stage, pager, targets)  # the first move of all is slower
        alone_s = sum(_both_ways(stage, pager, [one]) for one in targets)
        at_once_s = _both_ways(stage, pager, targets)
    stage.row(
        "two moves at once, beside one after the other", round(at_once_s / alone_s, 3), unit="×",
        at_once_s=round(at_once_s, 3), one_after_the_other_s=round(alone_s, 3),
    )  # fmt: skip


def _both_ways(stage: Stage, pager: BlockingPager, targets: list[Target]) -> float:
    """Move all of ``targets`` out at the same time, then in; return the seconds of the way out."""
    from kiwi_core.pager.api import Moved

    until_ns = time.monotonic_ns() + int(max(1.0, stage.left_s) * 1e9)
    took_s = []
    for move in (pager.page_out, pager.page_in):
        began_s = time.monotonic()
        with ThreadPoolExecutor(len(targets)) as pool:
            outcomes = list(pool.map(lambda one, move=move: move(one, until_ns), targets))
        took_s.append(time.monotonic() - began_s)
        if not all(isinstance(outcome, Moved) for outcome in outcomes):
            raise RuntimeError(f"{outcomes}")
    return took_s[0]
