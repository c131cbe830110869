"""Tests of notebooks that fit together, of many that do not, and of programs beside them."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import ledger
import pytest
from cli_process import Result, finish, start_kiwi
from daemon import wait_until
from gpu_cells import CPU, PRELUDE, take, work
from notebooks import Notebook, assert_books_agree, finish_all
from pagers import CHECKPOINT, IN_PROCESS
from replayed import differences

from kiwi_core.config import ENV_PAGER
from kiwi_core.sched import events as ev
from kiwi_core.states import MovedBy, Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from daemon import Daemon
    from kernels import Cell

    from kiwi_core.sched.replay import JournalEntry
    from kiwi_core.wire.messages import GpuStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SEED = 20260


@pytest.mark.usefixtures("pager")
def test_notebooks_that_fit_run_in_parallel(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi: Callable[..., Result],
) -> None:
    """With anti-thrash ``always`` they never overlap; with ``on`` and ``off`` they do, and neither
    is suspended. Each change is to another value, because an unchanged setting makes no journal
    entry."""
    daemon = make_daemon("1x256MiB", "--tq", "0.3")
    pair = a, b = make_notebook(daemon, "A", mib=60), make_notebook(daemon, "B", mib=60)
    for anti_thrash, together in (("always", False), ("on", True), ("off", True)):
        result = kiwi(daemon, "set", f"anti-thrash={anti_thrash}")
        assert result.code == 0, result.err
        _both_work(daemon, a, b, together)
        read = ledger.read(_since_last_setting(daemon.journal()))
        overlaps, stops = read.overlaps(), len(read.stopped)
        assert bool(overlaps) is together, (anti_thrash, overlaps)
        assert bool(stops) is not together, (anti_thrash, read.stopped)
        assert not [way for _, way, _ in read.moved if way == "out"], "nothing had to go out"
    for notebook in pair:
        notebook.assert_intact()
    assert_books_agree(daemon)


def _both_work(daemon: Daemon, a: Notebook, b: Notebook, together: bool) -> None:
    """Wait until both hold the GPU at once, or one was stopped for the other."""
    enough = daemon.directory / "enough"
    cells = {notebook: notebook.work(0.5, until=enough) for notebook in (a, b)}

    def shared() -> bool:
        status = daemon.status()
        assert together or len(status.holders) <= 1
        if together:
            return len(status.holders) == 2
        return len({s for s, _ in ledger.read(_since_last_setting(daemon.journal())).stopped}) == 2

    wait_until(shared, "they share")
    enough.touch()
    finish_all(cells)
    for notebook in cells:
        notebook.wait_state("idle", "paged-out")  # a turn outlives its cell
    enough.unlink()


def _since_last_setting(entries: list[JournalEntry]) -> list[JournalEntry]:
    changes = [n for n, e in enumerate(entries) if isinstance(e.event, ev.SettingsChanged)]
    return entries[changes[-1] :]


# --- ten ----------------------------------------------------------------------------------------

TEN_FOR_S = 60.0
TEN_TQ_S = 0.3
TEN_BURSTS = 3


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pager", [IN_PROCESS], ids=["both"], indirect=True)
@pytest.mark.usefixtures("pager")
def test_ten_notebooks_take_random_turns_for_a_minute(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    """Each has 30 % of the GPU: three fit, ten do not. Every other one has the library. On a busy
    machine they continue until each had its turns."""
    daemon = make_daemon("1x128MiB", "--tq", str(TEN_TQ_S))
    players = []
    for n in range(10):
        env = {ENV_PAGER: (CHECKPOINT, IN_PROCESS)[n % 2].name}
        players.append(_Player(make_notebook(daemon, f"n{n}", mib=38, **env), seed=SEED + n))
    expected = [MovedBy.CHECKPOINT, MovedBy.INPROCESS] * 5
    wait_until(
        lambda: [player.notebook.session.pager for player in players] == expected,
        "each is moved by its own pager",
    )
    stop_at_s = time.monotonic() + TEN_FOR_S

    def over() -> bool:
        few = [p for p in players if p.bursts < TEN_BURSTS]
        go_on = bool(few) or time.monotonic() < stop_at_s
        return not [p for p in players if p.play(go_on)]

    wait_until(over, "all ten had their turns, and come to an end", TEN_FOR_S + 200.0)
    finish_all({p.notebook: p.notebook.start("assert memory.intact()") for p in players}, 120.0)
    assert_books_agree(daemon)
    _turns_were_taken(daemon)


class _Player:
    """Run one random cell after another in a notebook; the same ones for the same seed."""

    def __init__(self, notebook: Notebook, seed: int) -> None:
        self.notebook = notebook
        self.bursts = 0
        self._random = random.Random(seed)
        self._cell: Cell | None = None
        self._thinks_until_s = 0.0

    def play(self, go_on: bool) -> bool:
        """Make one step without waiting; return false once the last cell is done."""
        if self._cell is not None:
            self.notebook.kernel.pump(0.001)
            if not self._cell.done:
                return True
            assert self._cell.status == "ok", self._cell.traceback
            self._cell = None
            self._thinks_until_s = time.monotonic() + self._random.choice((0.0, 0.1, 0.5, 2.0))
        if go_on and time.monotonic() >= self._thinks_until_s:
            self._cell = self.notebook.start(self._code())
        return go_on or self._cell is not None

    def _code(self) -> str:
        kind = self._random.choice(("cpu", "short", "short", "long"))
        if kind == "cpu":
            return CPU
        self.bursts += 1
        steps = self._random.randrange(1, 8) if kind == "short" else self._random.randrange(40, 160)
        return work(steps=steps, write=True)


def _turns_were_taken(daemon: Daemon) -> None:
    """The scheduler decides the same again; its tests hold the bounds of waits, on its clock."""
    journal = daemon.journal()
    read = ledger.read(journal)
    assert len(read.waits) >= TEN_BURSTS * 5
    assert read.stopped, "nobody was ever stopped"
    assert not [
        entry.event
        for entry in journal
        if isinstance(entry.event, ev.PageInRefused) and entry.event.reason is Reason.NO_ROOM
    ], "a move waited for room that nobody made"
    assert differences(daemon.records()) == 0


# --- kiwi run -----------------------------------------------------------------------------------

PROGRAM = f"""
{PRELUDE}
{take(75, 7)}
print("taken", flush=True)
while not os.path.exists(sys.argv[1]):
    memory.step(write=True)
    time.sleep(0.02)
print("intact" if memory.intact() else "DAMAGED", memory.steps, flush=True)
sys.exit(7)
"""


@pytest.mark.usefixtures("pager")
def test_a_program_shares_fairly_with_a_notebook(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook], stack: ExitStack
) -> None:
    """``kiwi run -- python script.py``: both make progress in turns, and the exit code is passed
    on. Ctrl-C, while the program waits and while it runs, leaves the GPU to the notebook."""
    daemon = make_daemon("1x128MiB", "--tq", "0.3", "--policy", "round-robin")
    script, enough = daemon.directory / "script.py", daemon.directory / "enough"
    script.write_text(PROGRAM)
    notebook = make_notebook(daemon, "A", mib=75)
    command = ("run", "--require", "--", sys.executable, str(script), str(enough))
    program = start_kiwi(*command, **daemon.env)
    stack.callback(_end, program)
    assert program.stdout is not None
    assert program.stdout.readline() == "taken\n"
    loop = notebook.work(until=enough)
    _both_were_stopped(daemon, notebook, program.pid, times=3)
    _ctrl_c_while_waiting(daemon, script, enough)
    enough.touch()
    result = finish(program)
    notebook.finish(loop)
    assert result.code == 7, result.err
    assert result.out.startswith("intact "), result.out
    notebook.assert_intact()
    _turns_alternate(daemon)
    enough.unlink()
    _ctrl_c_while_running(daemon, notebook, script, enough)
    notebook.assert_intact()
    assert_books_agree(daemon)


def test_a_program_that_is_suspended_before_it_uses_cuda_waits_once_it_has_a_context(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook], stack: ExitStack
) -> None:
    """The program works for longer than its quantum before it makes a context. The driver cannot
    hold a process without a context; the daemon holds it as soon as it has one."""
    daemon = make_daemon("1x128MiB", "--tq", "0.3")
    script, enough, go = (daemon.directory / name for name in ("script.py", "enough", "go"))
    wait = (
        "import os, sys, time\n"
        "from cuda.bindings import driver\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "driver.cuInit(0)\n"
        "driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])\n"
        "time.sleep(1.5)\n"
    )
    script.write_text(wait + PROGRAM)
    notebook = make_notebook(daemon, "A", mib=75)
    program = start_kiwi(
        "run", "--", sys.executable, str(script), str(enough), str(go), **daemon.env
    )
    stack.callback(_end, program)
    daemon.wait_state(program.pid, "running")
    loop = notebook.work(until=enough)

    def suspended(status: GpuStatus) -> bool:
        state = {session.pid: session.state.value for session in status.sessions}
        return state[program.pid] == "suspended" and status.holders == [notebook.id]

    daemon.in_a_long_turn(suspended, "the program is suspended")
    go.touch()
    time.sleep(3.0)  # nothing must happen, so there is no condition to wait for
    assert program.poll() is None, program.communicate()
    assert daemon.status().holders == [notebook.id]
    enough.touch()
    notebook.finish(loop)
    assert finish(program).code == 7


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        if process.poll() is None:
            process.kill()


def _both_were_stopped(daemon: Daemon, notebook: Notebook, pid: int, times: int) -> None:
    for one in (notebook.pid, pid):
        daemon.wait_for(
            lambda status, one=one: [  # type: ignore[misc]
                s for s in status.sessions if s.pid == one and s.suspensions >= times
            ],
            f"process {one} is stopped {times} times",
            60.0,
        )


def _turns_alternate(daemon: Daemon) -> None:
    read = ledger.read(daemon.journal())
    assert read.overlaps() == []
    stopped = [session for session, _ in read.stopped]
    assert len(set(stopped)) == 2
    assert all(one != other for one, other in itertools.pairwise(stopped)), stopped


def _ctrl_c_while_waiting(daemon: Daemon, script: Path, enough: Path) -> None:
    daemon_said = start_kiwi("set", "tq=60", **daemon.env)
    assert finish(daemon_said).code == 0
    waiter = start_kiwi(
        "run", "--require", "--", sys.executable, str(script), str(enough), **daemon.env
    )
    daemon.wait_state(waiter.pid, "waiting")
    waiter.send_signal(signal.SIGINT)
    result = finish(waiter)
    assert (result.code, result.out) == (130, ""), result.err
    daemon.wait_for(lambda s: all(x.pid != waiter.pid for x in s.sessions), "its place is free")
    assert finish(start_kiwi("set", "tq=0.3", **daemon.env)).code == 0


def _ctrl_c_while_running(daemon: Daemon, notebook: Notebook, script: Path, enough: Path) -> None:
    """The terminal sends the signal to the program, too."""
    program = start_kiwi(
        "run", "--require", "--", sys.executable, str(script), str(enough), **daemon.env
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "taken\n"
    os.killpg(program.pid, signal.SIGINT)
    result = finish(program)
    assert result.code == 130, result.err
    assert "KeyboardInterrupt" in result.err
    daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [notebook.pid], "it is gone")
