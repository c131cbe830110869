"""Tests of a GPU that is full to the last block: the driver cannot move anything out of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cuda_processes import Worker
from daemon import wait_until

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

NEEDS = "some tens of MiB of free GPU memory"


@contextmanager
def rest_taken(daemon: Daemon) -> Iterator[None]:
    """Let a program outside Kiwi take all memory that is free."""
    libraries = emulator.build()
    outsider = Worker(daemon.env | emulator.environment(daemon.state_path, libraries))
    try:
        outsider.do("init(); rest = alloc(ck(driver.cuMemGetInfo())[0])")
        yield
    finally:
        outsider.close()


def test_freeing_a_little_of_a_full_gpu_lets_the_others_in(start: Start, program: Program) -> None:
    daemon = start("1x128MiB", "--idle-after", "0.3")
    one = program(daemon, 60)
    one.worker.do("begin(); q = alloc(8 * MIB); client.end_burst()")
    with rest_taken(daemon):
        other = program(daemon)
        other.begin_take(50, 2)
        shown = daemon.wait_for(
            lambda s: next((x for x in s.sessions if x.pid == one.pid and x.problem), None), "seen"
        )
        assert shown.problem == "page-out-refused"
        for words in (NEEDS, "torch.cuda.empty_cache()", "Kiwi tries again"):
            assert words in shown.problem_text
        daemon.wait_for(
            lambda s: any(x.pid == other.pid and NEEDS in x.problem_text for x in s.sessions),
            "it is told what it waits for",
        )
        wait_until(lambda: any(NEEDS in text for _, text in one.notices()), "its user is told")
        one.worker.do("begin(); free(q); client.end_burst()")
        other.worker.answer()
        told = [text for _, text in one.notices() if NEEDS in text]
        assert len(told) == 1, "once, however often it was tried"
        assert other.intact()
        assert one.intact()
