"""Tests of programs that somebody else checkpoints (cuda-checkpoint, CRIU, the program itself).

Kiwi does not bring back what it has not taken out, and keeps the room for it: a restore that finds
no room fails for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from answering import works
from cuda_processes import Worker
from daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon
    from preloaded_program import PreloadedProgram
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

WORDS = "checkpointed by a program outside Kiwi"


@pytest.fixture
def controller() -> Iterator[Callable[[Daemon], Worker]]:
    """Start a program outside Kiwi that makes the driver's checkpoint calls."""
    made: list[Worker] = []

    def start(daemon: Daemon) -> Worker:
        made.append(Worker(daemon.cuda_env | {"KIWI_DISABLE": "1"}))
        made[-1].do("init()")
        return made[-1]

    yield start
    for one in made:
        one.close()


def state_of(controller: Worker, pid: int) -> str:
    return str(controller.get(f"checkpoint_of({pid}).state"))


@pytest.mark.parametrize("running", [False, True], ids=["idle", "running"])
def test_it_stays_out_until_its_owner_brings_it_back(
    start: Start, program: Program, controller: Callable[[Daemon], Worker], running: bool
) -> None:
    daemon = start("1x128MiB", "--tq", "0.3", "--swap-floor", "0")
    other, small, one = program(daemon, 80), program(daemon, 8), program(daemon, 60)
    outside = controller(daemon)
    if running:
        one.start_burst()
        wait_until(one.granted, "it runs")
    daemon.wait_for(lambda s: any(x.pid == one.pid for x in s.sessions), "it was seen to run")
    outside.do(f"suspend({one.pid})")
    other.start_burst()
    told = lambda s: any(x.pid == other.pid and WORDS in x.problem_text for x in s.sessions)  # noqa: E731
    daemon.wait_for(told, "the one that needs its room is told")
    small.start_burst()
    works(small)
    small.stop_burst()
    assert state_of(outside, one.pid) == "checkpointed", "nobody brought it back"
    outside.do(f"resume({one.pid})")
    if running:
        works(one)
        one.stop_burst()
    works(other)
    other.stop_burst()
    for each in (one, other):
        assert each.intact()


def test_memory_that_a_library_owns(
    start: Start,
    preloaded: Callable[..., PreloadedProgram],
    controller: Callable[[Daemon], Worker],
) -> None:
    daemon = start("1x128MiB")
    other, one = preloaded(daemon), preloaded(daemon)
    other.take(80, 2)
    one.take(80, 1)
    outside = controller(daemon)
    daemon.wait_state(one.pid, "idle")
    outside.do(f"suspend({one.pid})")
    other.send("intact = digest(p, size) == before", "exec")
    told = lambda s: any(x.pid == other.pid and WORDS in x.problem_text for x in s.sessions)  # noqa: E731
    daemon.wait_for(told, "the one that needs its room is told")
    assert state_of(outside, one.pid) == "checkpointed"
    outside.do(f"resume({one.pid})")
    other.answer()
    assert other.get("intact")
    assert one.intact()
