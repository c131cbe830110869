"""Tests of programs that only count the GPUs and start others: nobody waits for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

LAUNCH = """
import subprocess, sys
from cuda.bindings import driver
assert driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1]
sys.exit(subprocess.call(sys.argv[1:]))
"""


@pytest.fixture(params=["checkpoint", "inprocess"])
def launched(request: pytest.FixtureRequest) -> Iterator[Callable[[Daemon], Worker]]:
    """Start, with ``kiwi run``, a program that counts the GPUs and starts the worker."""
    made: list[Worker] = []
    pager = request.param

    def start(daemon: Daemon) -> Worker:
        run = ("-m", "kiwi_core.cli", "run", "--pager", pager, "--name", "launched", "--")
        made.append(Worker(daemon.env, sys.executable, *run, sys.executable, "-c", LAUNCH))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_launcher_and_its_worker_take_turns_with_others(
    start: Start, program: Program, launched: Callable[[Daemon], Worker]
) -> None:
    daemon = start("1x128MiB", "--tq", "0.3")
    worker = launched(daemon)
    worker.do(f"init(); p = alloc({80 * MIB}); before = fill(p, 1, {80 * MIB})")
    other = program(daemon, 80)
    for _ in range(2):
        assert worker.get(f"digest(p, {80 * MIB}) == before")
        assert other.intact()


def test_a_notebook_that_asked_for_the_gpu_and_a_program_that_it_started(
    start: Start, program: Program
) -> None:
    """``torch.cuda.is_available()`` in the notebook, then ``!python train.py``."""
    daemon = start("1x128MiB", "--tq", "0.3")
    notebook = program(daemon)
    notebook.worker.do("begin(); ck(driver.cuInit(0)); client.end_burst()")
    other = program(daemon, 80)
    # After a second the scheduler goes by old numbers: a busy machine may need longer to read.
    daemon.wait_for(lambda _: daemon.resident_mib(other.pid) >= 80, "its memory is known")
    notebook.take(80, 3)
    for one in (other, notebook):
        assert one.intact()
