"""Tests of a daemon that is killed in each state, alone or with its supervisor, or told to leave.

Two notebooks lose nothing, and their cells show only what their users have to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gpu_cells
import leftovers
import pytest
import two_notebooks
from checks import unharmed
from daemon import PATIENCE_S
from notebooks import assert_books_agree
from pagers import CHECKPOINT, DEFAULT
from two_notebooks import PATIENT, STATES, Arenas

from kiwi_core.sched.events import MemoryObserved, SessionJoined

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from kernels import Cell
    from notebooks import Notebook
    from pagers import PagerUnderTest

pytestmark = pytest.mark.e2e

SHORT_CELL = "memory.step(write=True)\nprint('done')"


private_tmp, arenas = leftovers.module_tmp, two_notebooks.arenas

CASES = [
    *((CHECKPOINT, state, who) for who in ("child", "all") for state in STATES),
    # The states in which the library moves memory, or keeps what the next daemon has to know.
    *((DEFAULT, state, "child") for state in ("suspended", "paging-out", "paging-in")),
    *((DEFAULT, state, "all") for state in ("paged-out", "paging-in")),
]


@pytest.mark.parametrize(("pager", "state", "who"), CASES, ids=str)
def test_a_killed_daemon_loses_nothing(
    pager: PagerUnderTest, state: str, who: str, arenas: Arenas
) -> None:
    with arenas.of(pager) as pair:
        a, b, daemon = pair.a, pair.b, pair.daemon
        pair.reach(state)
        working = pair.working()
        if who == "child":
            old = daemon.kill_child()
            pair.speed(0)
            daemon.wait_for(lambda status: status.daemon_pid != old, "a new daemon")
        else:
            daemon.kill_all()
            pair.speed(0)
            daemon.start()
        pair.set(0.3)
        for notebook in working:
            pair.wait_beat(notebook)
        for notebook, cell in pair.end(*working).items():
            assert cell.text == "worked\n", f"{notebook.name}: {cell.outputs()}"
            assert _only_waited(cell.outputs()), f"{notebook.name}: {cell.outputs()}"
        for notebook in (b, a, b):
            assert notebook.check(SHORT_CELL).text == "done\n"
        pair.assert_all_well()


def _only_waited(outputs: list[dict[str, object]]) -> bool:
    """Return whether a notebook would save exactly what the cell printed."""
    return all(output.get("name") == "stdout" for output in outputs)


BRIEF_S = 1.0
"""Grace of a notebook whose daemon is away."""


@pytest.mark.usefixtures("pager")
def test_a_daemon_that_leaves_brings_back_whom_it_can(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x128MiB", "--tq", "0.3")
    a = make_notebook(daemon, "A", mib=72, config=PATIENT)
    b = make_notebook(daemon, "B", mib=72, config=PATIENT)
    stop = daemon.directory / "stop"

    # B is out in mid-cell, and A has the GPU: B has to stay out, and nothing else happens.
    b_cell = b.work(until=stop, write=True)
    b.wait_state("running")
    a_cell = a.work(until=stop, write=True)
    daemon.in_a_long_turn(lambda _: (a.state, b.state) == ("running", "suspended"), "A's turn")
    assert daemon.terminate() == 0
    assert "session stays paged out; nothing is lost" in daemon.log()
    stop.touch()
    a.finish(a_cell)
    assert b.is_out()

    # A continues without Kiwi, and says so.
    again = daemon.directory / "again"
    a.kernel.set_daemon_grace(BRIEF_S)
    a_cell = a.work(until=again, write=True)
    a.kernel.until(lambda: without_a_daemon(a_cell), "A says that it goes on without a daemon")
    assert not b.kernel.finished(b_cell)

    # The next daemon brings B back, though A is in the middle of a cell; A continues afterwards.
    daemon.start()
    b.finish(b_cell)
    a.wait_state("running")
    again.touch()
    a.finish(a_cell)
    a.kernel.set_daemon_grace(PATIENCE_S)
    cell = a.check(gpu_cells.INTACT)
    assert (cell.text, without_a_daemon(cell)) == ("INTACT\n", False), cell.outputs()
    assert b.state == "paged-out"

    # B is out and idle, and A's memory is free: B is brought back.
    a.check("check(cuda.cuMemFree(memory.address))")
    assert daemon.terminate() == 0
    assert not b.is_out()
    b.kernel.set_daemon_grace(BRIEF_S)
    cell = b.check(gpu_cells.INTACT)
    assert (cell.text, without_a_daemon(cell)) == ("INTACT\n", True), cell.outputs()

    b.kernel.set_daemon_grace(PATIENCE_S)
    daemon.start()
    daemon.wait_for(lambda status: sum(s.connected for s in status.sessions) == 2, "both are back")
    b.assert_intact()
    assert_books_agree(daemon)
    daemon.stop()
    unharmed(daemon)


@pytest.mark.usefixtures("pager")
def test_a_session_that_stays_out_gets_a_notice(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x128MiB")
    b = make_notebook(daemon, "B", mib=72, config=PATIENT)
    a = make_notebook(daemon, "A", mib=72, config=PATIENT)
    assert b.session.state.value == "paged-out"
    assert daemon.terminate() == 0
    for notebook in (a, b):
        notebook.kernel.set_daemon_grace(BRIEF_S)
    cell = b.start(gpu_cells.INTACT)
    b.kernel.until(
        lambda: "stays in system RAM" in cell.stream("stderr"), "the words in the notebook"
    )
    assert "`kiwi daemon`" in cell.stream("stderr")
    a.assert_intact()
    assert not b.kernel.finished(cell)
    daemon.start()
    b.finish(cell)
    assert cell.text.endswith("INTACT\n")
    # A left Kiwi with the old daemon and joined again. The daemon reads A's memory at once, so that
    # it does not count as memory outside Kiwi until the next periodic reading: B waits for that
    # room.
    events = [entry.event for entry in daemon.journal()]
    joined = [isinstance(e, SessionJoined) and e.session == a.id for e in events]
    since = len(joined) - joined[::-1].index(True)
    looks = [event for event in events[since:] if isinstance(event, MemoryObserved)]
    assert any(a.id in look.resident_bytes for look in looks[:2])


def without_a_daemon(cell: Cell) -> bool:
    return any(
        "runs without waiting for the GPU" in text for text in (cell.text, cell.stream("stderr"))
    )
