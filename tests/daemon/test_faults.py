"""Tests of a driver that fails, hangs or has no room: one session gets plain words, others
continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker
from daemon import wait_until
from session_program import MIB

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


@pytest.fixture
def outsider() -> Iterator[Callable[[Daemon, int], Worker]]:
    """Start programs outside Kiwi that hold the given MiB of the GPU."""
    made: list[Worker] = []

    def make(daemon: Daemon, size_mib: int) -> Worker:
        worker = Worker(emulator.environment(daemon.state_path, emulator.build()))
        made.append(worker)
        worker.do(f"init(); held = alloc({size_mib * MIB})")
        return worker

    yield make
    for worker in made:
        worker.close()


def _problem(daemon: Daemon, one: SessionProgram) -> str:
    session = daemon.session(one.pid)
    return session.problem if session else ""


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
    daemon.wait_for(lambda s: _problem(daemon, stubborn) == "page-out-refused", "the problem")
    text = daemon.session(stubborn.pid).problem_text  # type: ignore[union-attr]
    assert "could not be moved out" in text
    wait_until(lambda: any(kind == "page-out-refused" for kind, _ in stubborn.told()), "told")
    wait_until(
        lambda: any(word[2] == "blocked-refused" and word[3] for word in other.words()),
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


def test_memory_held_outside_makes_a_restore_wait_with_words(
    start: Start, program: Program, outsider: Callable[[Daemon, int], Worker]
) -> None:
    daemon = start("1x256MiB", "--tq", "30")
    one = program(daemon, 150)
    one.worker.do("client.release()")
    daemon.wait_state(one.pid, "paged-out")
    outside = outsider(daemon, 180)
    one.start_burst()
    wait_until(lambda: any(word[2] == "blocked-outside" for word in one.words()), "plain words")
    blocked = next(word for word in one.words() if word[2])
    assert "outside Kiwi" in blocked[3]
    assert not one.granted()
    assert daemon.session(one.pid).state.value == "waiting"  # type: ignore[union-attr]
    small = program(daemon, 0)
    small.begin_take(10, 7)
    outside.close()
    wait_until(one.granted, "granted once there is room")
    one.stop_burst()
    assert one.intact()
    small.worker.answer()
    assert small.intact()


def test_ram_that_is_used_up_blocks_with_words_and_loses_nothing(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "0.3", "--host-budget", "170MiB")
    second, first = program(daemon, 100), program(daemon, 150)
    assert daemon.status().memory.host_budget_bytes == 170 * MIB
    daemon.wait_state(second.pid, "paged-out")
    second.start_burst()  # it fits only if the first one, which is larger, goes out too
    wait_until(lambda: _blocked(daemon, second), "plain words in the status")
    wait_until(lambda: _told(second, "blocked-host-memory"), "plain words to the one that waits")
    assert first.intact(), "it goes on as before"
    # Freed memory lets the next one in; here its process ends.
    first.kill()
    wait_until(second.granted, "granted")
    second.stop_burst()
    assert second.intact()
    assert "system RAM" in _told(second, "blocked-host-memory")[0]


def _told(one: SessionProgram, problem: str) -> list[str]:
    """Return the details of this problem that the program received while it waited."""
    return [word[3] for word in one.words() if word[2] == problem]


def _blocked(daemon: Daemon, one: SessionProgram) -> bool:
    session = daemon.session(one.pid)
    return session is not None and session.problem == "blocked-host-memory"


def test_a_driver_call_that_hangs_is_shown_and_the_others_go_on(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "0.5", "--lock-timeout", "1", "--stuck-after", "2")
    other, third, hung = program(daemon, 60), program(daemon, 20), program(daemon, 60)
    faults = emulator.Faults(daemon.state_path)
    faults.set("hang", pid=hung.pid, operation="checkpoint", count=1)
    hung.worker.do("client.release()")
    wait_until(lambda: faults.hanging() == 1, "the hang")
    for one in (other, third):
        one.start_burst()
        wait_until(one.granted, "others go on at once")
        _works(one)
    daemon.wait_for(lambda _: _problem(daemon, hung) == "stuck", "it is shown as stuck", 90)
    assert "hangs" in daemon.session(hung.pid).problem_text  # type: ignore[union-attr]
    for one in (other, third):
        _works(one)
        one.stop_burst()
    assert daemon.terminate() == 0, daemon.log()
    assert "stays paged out" in daemon.log() or "hangs" in daemon.log()
    faults.clear()
    daemon.start()
    assert hung.intact()
    assert other.intact()


def test_a_checkpoint_that_fails_half_way_leaves_both_processes_whole(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "0.3")
    other, parent = program(daemon, 150), program(daemon, 80)
    parent.worker.do(
        "from cuda_processes import Worker\n"
        "child = Worker({})\n"
        f"child.do('init(); p = alloc({60 * MIB}); contents = fill(p, 99, {60 * MIB})')\n"
    )
    child_pid = int(parent.worker.get("child.pid"))
    faults = emulator.Faults(daemon.state_path)
    faults.set("checkpoint_fail", pid=child_pid, count=2)
    other.start_burst()
    wait_until(lambda: faults.hits("checkpoint_fail") >= 1, "the failure")
    wait_until(lambda: any(kind == "page-out-refused" for kind, _ in parent.told()), "told")
    wait_until(other.granted, "granted in the end")
    other.stop_burst()
    assert other.intact()
    assert parent.intact()
    assert parent.worker.get(f"child.get('digest(p, {60 * MIB}) == contents')")
    parent.worker.do("child.close()")


def test_contents_that_are_lost_are_said_to_be_lost(start: Start, program: Program) -> None:
    daemon = start("1x256MiB", "--tq", "30")
    unlucky, other = program(daemon, 150), program(daemon, 150)
    daemon.wait_state(unlucky.pid, "paged-out")
    emulator.Faults(daemon.state_path).set("restore_fail", pid=unlucky.pid, count=1)
    unlucky.start_burst()
    lost = daemon.wait_state(unlucky.pid, "lost")
    assert "are lost" in lost.problem_text
    assert "Start it again" in lost.problem_text
    wait_until(lambda: any(kind == "lost" for kind, _ in unlucky.told()), "told")
    assert other.intact()
