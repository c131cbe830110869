"""Tests of programs that wait for the GPU at every second call and are suspended repeatedly.

The emulated driver (profile ``worst``) crashes a program that waits while it is checkpointed. Only
a gate that is shut first keeps such programs alive.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import ledger
import nbformat
import pagers
import pytest
import sync_cells
from cli_process import finish
from gpu_cells import PRELUDE
from kernels import clean_environment
from patience import die_with_the_test

from kiwi_core.preload import ready
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from daemon import Daemon
    from notebooks import Notebook
    from pagers import PagerUnderTest

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

pytestmark = pytest.mark.e2e

MIB_EACH = 72
"""Two of these do not fit."""

NBCLIENT = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
SEED = 12
FEW, MANY = 20, 170
"""Suspensions in one case. Three cases of ``MANY`` are more than 500 with each pager."""

WORST = {"KIWI_EMULATOR_DRIVER": "worst"}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    ready.ensure()


@pytest.fixture
def executed(stack: ExitStack) -> Callable[..., Executed]:
    def start(daemon: Daemon, how: str, stop: Path) -> Executed:
        one = Executed(daemon, how, stop)
        stack.callback(one.close)
        return one

    return start


class Executed:
    """A notebook that ``nbclient`` executes in its own process."""

    def __init__(self, daemon: Daemon, how: str, stop: Path) -> None:
        cells = [PRELUDE, sync_cells.SYNCHRONISING, sync_cells.make(MIB_EACH, 7)]
        cells += [sync_cells.loop(how, stop), sync_cells.VERDICT]
        self.directory = daemon.directory / "executed"
        self.directory.mkdir()
        source, self.result = self.directory / "in.ipynb", self.directory / "out.ipynb"
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nbformat.write(notebook, source)
        environment = pagers.into(clean_environment(self.directory) | daemon.env)
        self.process = subprocess.Popen(
            [sys.executable, "-c", NBCLIENT, str(source), str(self.result)],
            env=environment, cwd=self.directory, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_the_test,
        )  # fmt: skip

    def verdict(self) -> str:
        done = finish(self.process)
        assert done.code == 0, done.err
        last = json.loads(self.result.read_text())["cells"][-1]
        return "".join(itertools.chain(*(output.get("text", "") for output in last["outputs"])))

    def close(self) -> None:
        with self.process:
            self.process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.mark.timeout(300)
def test_programs_that_wait_at_every_second_call_are_suspended(
    pager: PagerUnderTest,
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    executed: Callable[..., Executed],
) -> None:
    """One kind of loop for each pager; the long version has all of them."""
    how = "plain" if pager.driver_moves else "pool"
    _suspended(how, pager, FEW, make_daemon, make_notebook, executed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", sync_cells.LOOPS)
def test_cells_survive_hundreds_of_suspensions(
    how: str,
    pager: PagerUnderTest,
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    executed: Callable[..., Executed],
) -> None:
    _suspended(how, pager, MANY, make_daemon, make_notebook, executed)


def _suspended(
    how: str,
    pager: PagerUnderTest,
    times: int,
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    executed: Callable[..., Executed],
) -> None:
    """One kernel is started as VS Code does, the other by nbclient; both run the same loop."""
    daemon = make_daemon(
        "1x128MiB", "--tq", "0.2", "--swap-floor", "0", "--policy", "round-robin", **WORST
    )
    stop = daemon.directory / "stop"
    ours = make_notebook(daemon, "A")
    for code in (PRELUDE, sync_cells.SYNCHRONISING, sync_cells.make(MIB_EACH, 1)):
        ours.check(code)
    cell = ours.start(sync_cells.loop(how, stop))
    theirs = executed(daemon, how, stop)

    def alive() -> None:
        assert ours.kernel.alive, ours.kernel.log()
        assert theirs.process.poll() is None, finish(theirs.process).err
        assert not ours.kernel.finished(cell), cell.traceback

    sessions = _until_suspended(daemon, times, alive)
    stop.touch()
    ours.finish(cell, timeout_s=120)
    assert ours.check(sync_cells.VERDICT).text.startswith("INTACT ")
    assert theirs.verdict().startswith("INTACT ")
    wanted = MovedBy.CHECKPOINT if pager.driver_moves else MovedBy.INPROCESS
    assert [(one.guarded, one.pager) for one in sessions] == [(True, wanted)] * 2
    _nobody_waits_for_more_than_a_turn(daemon)
    print(f"{how}, {pager}: {[one.suspensions for one in sessions]} suspensions")


def _until_suspended(
    daemon: Daemon, times: int, alive: Callable[[], None]
) -> tuple[SessionStatus, ...]:
    """Wait for this many suspensions in all. The quantum changes, so that nobody can foresee
    them."""
    chance, client = random.Random(SEED), daemon.client()
    count, changed_s = 0, time.monotonic()
    try:
        while True:
            alive()
            status: GpuStatus = client.status()
            now = sum(one.suspensions for one in status.sessions)
            if now >= times and all(one.suspensions >= times // 4 for one in status.sessions):
                return tuple(status.sessions)
            if now > count:
                count, changed_s = now, time.monotonic()
                client.set(tq_s=chance.uniform(0.1, 0.3))
            assert time.monotonic() - changed_s < 60, f"stands still: {status}\n{daemon.log()}"
            time.sleep(0.05)
    finally:
        client.close()


def _nobody_waits_for_more_than_a_turn(daemon: Daemon) -> None:
    """While one waits, the other one gets the GPU at most once. The test counts turns, because the
    clock of a busy machine proves nothing."""
    read = ledger.read(daemon.journal())
    turns = [
        sum(wait.from_ns <= hold.from_ns < wait.to_ns for hold in read.holds) for wait in read.waits
    ]
    assert max(turns) <= 1, turns
