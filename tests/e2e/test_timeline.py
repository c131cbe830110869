"""Tests of the promised timeline: two notebooks that do not fit together take turns."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import ledger
import pytest
from daemon import wait_until
from gpu_cells import CPU, CPU_PRINTS
from notebooks import Notebook, assert_books_agree
from truth import TruthWatcher

from kiwi_core.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from cli_process import Result
    from daemon import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TURN_S, LONG_TURN_S = 1.0, 600.0

WAIT_WORDS = re.compile(
    r"Waiting for the GPU: 1st in line(, A\.ipynb has it)?(, [^,]+)?"
    r"(, (about |up to )?\d[^,]*|, any moment)?"
    r"|[^,]+, ((about |up to )?\d.*|any moment)"
    r"|Suspended in mid-cell.*"
)


@pytest.mark.usefixtures("pager")
def test_two_notebooks_take_turns_and_lose_no_byte(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi: Callable[..., Result],
) -> None:
    daemon = make_daemon("1x256MiB", "--tq", f"{TURN_S:g}")
    a, b = make_notebook(daemon, "A"), make_notebook(daemon, "B")
    with TruthWatcher(daemon) as truth:
        _only_cpu_work(daemon, a)
        a.take(150, 1)
        b.take(150, 2)
        enough = daemon.directory / "enough"
        loop = a.work(until=enough)
        a.wait_state("running")
        _a_cpu_cell_of_b_runs_at_once(daemon, b)
        for number in range(3):
            _b_waits_for_its_turn(daemon, a, b, number)
            _status_agrees(daemon, kiwi, a, b)
        _a_suspension_is_watched(daemon.directory / "seen", b, truth)
        a.wait_state("running")
        enough.touch()
        a.finish(loop)
        a.assert_intact()
        b.assert_intact()
        _no_more_overlap(daemon, a)
    truth.assert_right()
    assert {"running", "paged-out", "suspended"} <= {state.value for state in truth.seen}
    assert_books_agree(daemon)
    _the_journal_agrees(daemon, kiwi, a, b)


def _only_cpu_work(daemon: Daemon, a: Notebook) -> None:
    """1. A does CPU work, B idles. Nobody holds the GPU."""
    assert a.check(CPU).text == CPU_PRINTS
    status = daemon.status()
    assert (status.holders, status.sessions) == ([], [])


def _a_cpu_cell_of_b_runs_at_once(daemon: Daemon, b: Notebook) -> None:
    """A holds the GPU and B is paged out; the cell does not even request the GPU."""
    before = b.session
    assert before.state == "paged-out"
    asked = _requests(daemon, b)
    assert b.check(CPU).text == CPU_PRINTS
    assert b.check("values = [len(str(n)) for n in range(10)]; sum(values)").result == "10"
    assert b.session.state == "paged-out"
    assert _requests(daemon, b) == asked


def _requests(daemon: Daemon, notebook: Notebook) -> int:
    events = (entry.event for entry in daemon.journal())
    return sum(getattr(event, "burst", 0) > 0 and event.session == notebook.id for event in events)


def _b_waits_for_its_turn(daemon: Daemon, a: Notebook, b: Notebook, number: int) -> None:
    """3. to 5. B waits and sees its place, A is suspended in mid-cell, B runs and gives up early, A
    continues."""
    a.wait_state("running")
    a_stopped, b_turns = a.session.suspensions, _turns(daemon, b)
    # However slow the machine is, A's turn lasts until B has said all that it says.
    _set_turn(daemon, LONG_TURN_S)
    cell = b.start(f"memory.step(write=True)\nprint('step', {number})")
    b.wait_state("waiting")
    b.kernel.until(
        lambda: cell.done or any(map(_foretells, cell.displays())), "B says how long it waits"
    )
    _set_turn(daemon, TURN_S)
    b.finish(cell)
    lines = b.waits_seen(cell)
    assert all(WAIT_WORDS.fullmatch(line) for line in lines), lines
    assert any("A.ipynb has it" in line for line in filter(_foretells, lines)), lines
    assert not [output for output in cell.outputs() if "data" in output], "nothing of it is saved"
    assert cell.text == f"step {number}\n"
    # On a machine so slow that B's turn is over before its cell, B gets another one.
    daemon.wait_for(
        lambda _: a.session.suspensions - a_stopped == _turns(daemon, b) - b_turns > 0,
        "A is stopped once for each turn of B",
    )


def _turns(daemon: Daemon, notebook: Notebook) -> int:
    return len(ledger.read(daemon.journal()).of(notebook.id))


def _foretells(line: str) -> bool:
    return re.search(r"about|up to|any moment", line) is not None


def _set_turn(daemon: Daemon, tq_s: float) -> None:
    """Set the length of all turns, that of the current one, too."""
    with daemon.client() as client:
        client.set(tq_s=tq_s)


def _status_agrees(daemon: Daemon, kiwi: Callable[..., Result], a: Notebook, b: Notebook) -> None:
    """A continues in the middle of its cell, and ``kiwi status --json`` says so."""
    a.wait_state("running")
    result = kiwi(daemon, "status", "--json")
    assert result.code == 0, result.err
    (gpu,) = json.loads(result.out)["gpus"]
    sessions: dict[str, dict[str, Any]] = {s["name"]: s for s in gpu["sessions"]}
    assert {name: s["state"] for name, s in sessions.items()} == {
        "A.ipynb": "running",
        "B.ipynb": "paged-out",
    }
    assert (gpu["holders"], gpu["queue"]) == ([a.id], [])
    assert (sessions["A.ipynb"]["pid"], sessions["B.ipynb"]["pid"]) == (a.pid, b.pid)
    assert sessions["A.ipynb"]["resident_bytes"] > 150 << 20
    assert sessions["B.ipynb"]["paged_out_bytes"] == gpu["memory"]["paged_out_bytes"] > 150 << 20
    assert (gpu["emulated"], gpu["scheduler"]["tq_s"]) == (True, TURN_S)


def _a_suspension_is_watched(seen: Path, b: Notebook, truth: TruthWatcher) -> None:
    """B and A take turns until the watcher has seen A suspended: B's other cells are too short."""
    cell = b.work(until=seen)
    wait_until(lambda: SessionState.SUSPENDED in truth.seen, "the watcher sees it")
    seen.touch()
    b.finish(cell)


def _no_more_overlap(daemon: Daemon, a: Notebook) -> None:
    """6. No more overlap: A, brought back once more, runs unhindered, for longer than a quantum."""
    a.assert_intact()
    before = a.session
    a.finish(a.work(1.5 * TURN_S))
    after = a.session
    assert (after.suspensions, after.waited_s) == (before.suspensions, before.waited_s)
    assert daemon.status().queue == []


def _the_journal_agrees(
    daemon: Daemon, kiwi: Callable[..., Result], a: Notebook, b: Notebook
) -> None:
    read = ledger.read(daemon.journal())
    assert read.overlaps() == []
    assert read.stops(a.id) >= 3
    ends_ns = {at_ns for session, at_ns in read.stopped if session == b.id}
    stopped = [hold for hold in read.of(b.id) if hold.to_ns in ends_ns]
    assert all(hold.seconds >= TURN_S for hold in stopped), "B gives up early"
    (journal,) = (daemon.directory / "state").glob("*.journal")
    replayed = kiwi(daemon, "replay", str(journal), "--summary")
    assert replayed.code == 0, replayed.out + replayed.err
    assert "The scheduler of this version decides the same." in replayed.out
