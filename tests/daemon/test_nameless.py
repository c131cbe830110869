"""Tests of machines whose NVML does not show what each program has in the GPU: unknown is not 0.

Two that do not fit take turns all the same, by what their libraries count; a program without a
library gets the GPU alone; and the status says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from answering import turn

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from preloaded_program import PreloadedProgram
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

QUIRKS = ["no_process_rows", "no_process_sizes"]
TEXT = "NVML does not show"


@pytest.fixture(params=QUIRKS)
def daemon(request: pytest.FixtureRequest, start: Start) -> Daemon:
    made = start("1x256MiB", "--tq", "1")
    emulator.set_quirk(made.state_path, request.param)
    return made


@pytest.mark.parametrize("guarded", [True, False], ids=["gate", "no library"])
def test_two_that_do_not_fit_take_turns(daemon: Daemon, program: Program, guarded: bool) -> None:
    one = program(daemon, 150, guarded=guarded)
    daemon.wait_for(lambda _: daemon.resident_mib(one.pid) >= 150, "its memory is known")
    daemon.wait_for(lambda s: any(TEXT in error for error in s.errors), "and it is said")
    other = program(daemon, 150, guarded=guarded)
    for _ in range(2):
        assert one.intact()
        assert other.intact()


def test_two_that_fit_run_side_by_side_by_their_libraries_counts(
    daemon: Daemon, program: Program
) -> None:
    one, other = program(daemon, 60), program(daemon, 60)
    turn(one)  # it went out if the other was read before its library had connected
    for each in (one, other):
        daemon.wait_for(lambda _, each=each: 60 <= daemon.resident_mib(each.pid) < 90, "known")
    for each in (one, other):
        each.start_burst()
    daemon.wait_for(lambda s: len(s.holders) == 2, "both run")
    for each in (one, other):
        each.stop_burst()
        assert each.intact()


def test_memory_that_libraries_own(
    daemon: Daemon, preloaded: Callable[..., PreloadedProgram]
) -> None:
    one, other = preloaded(daemon), preloaded(daemon)
    one.take(150, 1)
    daemon.wait_for(lambda _: daemon.resident_mib(one.pid) >= 150, "its memory is known")
    other.take(150, 2)
    assert one.intact()
    assert other.intact()
