"""Tests of a driver that refuses to move a program: its session gets plain words, others continue.

``tests/e2e/test_faults.py`` has the other faults of a driver, with notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daemon import wait_until

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


def _problem(daemon: Daemon, one: SessionProgram) -> str:
    session = daemon.session(one.pid)
    return session.problem if session else ""


def _problem_text(daemon: Daemon, one: SessionProgram, problem: str) -> str:
    session = daemon.session(one.pid)
    return session.problem_text if session and session.problem == problem else ""


def _works(one: SessionProgram) -> None:
    before = one.rounds()
    wait_until(lambda: one.rounds() > before, f"{one.name} goes on")


def test_a_process_that_cannot_be_moved_keeps_others_waiting_with_words(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "0.3")
    other, stubborn = program(daemon, 150), program(daemon, 150)
    faults = emulator.Faults(daemon.state_path)
    faults.set("checkpoint_fail", pid=stubborn.pid, count=-1)
    other.start_burst()
    # One look has both: a program in a burst is held between two attempts, and has no problem then.
    text = wait_until(lambda: _problem_text(daemon, stubborn, "page-out-refused"), "the problem")
    assert "could not be moved out" in text
    wait_until(lambda: any(kind == "page-out-refused" for kind, _ in stubborn.notices()), "told")
    wait_until(
        lambda: any(word[2] == "blocked-refused" and word[3] for word in other.waits()),
        "plain words while it waits",
    )
    faults.clear()
    wait_until(other.granted, "granted once it goes")
    other.stop_burst()
    assert stubborn.intact()
    assert other.intact()
    daemon.wait_for(lambda _: not _problem(daemon, stubborn), "the problem gone")


def test_a_lock_that_times_out_leaves_the_runner_running(start: Start, program: Program) -> None:
    daemon = start("1x256MiB", "--tq", "0.3", "--lock-timeout", "0.5")
    runner, other = program(daemon, 150), program(daemon, 150)
    emulator.Faults(daemon.state_path).set("lock_timeout", pid=runner.pid, count=1)
    runner.start_burst()
    wait_until(lambda: daemon.session(runner.pid).state.value == "running", "running")  # type: ignore[union-attr]
    other.start_burst()
    wait_until(other.granted, "granted in spite of the refusal")
    for one in (runner, other):
        _works(one)
        one.stop_burst()
    assert runner.intact()
    assert other.intact()
