"""Tests of ``kiwi suspend`` and ``kiwi resume`` with real notebooks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from daemon import wait_until
from notebooks import assert_books_agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_process import Result
    from daemon import Daemon
    from kernels import Cell
    from notebooks import Notebook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SAID = "suspended by its user until kiwi resume"


@pytest.fixture
def run(kiwi: Callable[..., Result]) -> Callable[..., str]:
    """Return a function that runs a command, which must succeed, and returns its output."""

    def do(daemon: Daemon, *args: str) -> str:
        result = kiwi(daemon, *args)
        assert (result.code, result.err) == (0, ""), daemon.log()
        return result.out

    return do


def times_linked(daemon: Daemon) -> int:
    return len(re.findall(r"\] linked ", daemon.log()))


def line(notebook: Notebook, cell: Cell) -> str:
    notebook.kernel.pump()
    return (["", *cell.displays()])[-1]


def test_a_cell_stands_still_until_it_is_resumed(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    run: Callable[..., str],
) -> None:
    """Nobody waits. Meanwhile another notebook has the GPU without any turn."""
    daemon = make_daemon("1x256MiB", "--tq", "600")
    a, b = make_notebook(daemon, "A", mib=150), make_notebook(daemon, "B", mib=150)
    enough = daemon.directory / "enough"
    cell = a.work(until=enough)
    a.wait_state("running")
    assert run(daemon, "suspend", a.id) == f"{a.id}: suspended until kiwi resume\n"
    a.wait_state("suspended")
    assert a.is_out()
    a.kernel.until(lambda: "kept out of the GPU" in line(a, cell), "the cell says so")
    assert line(a, cell).startswith("Suspended in mid-cell")
    assert "kiwi resume" in line(a, cell)
    shown = run(daemon, "status")
    assert f": {SAID}" in shown
    assert "A.ipynb" in shown
    own = b.check("%kiwi status").result
    assert own is not None
    assert SAID in own
    b.finish(b.work(steps=20))
    assert not cell.done
    assert a.state == "suspended"
    run(daemon, "resume", a.id)
    a.wait_state("running")
    enough.touch()
    a.finish(cell)
    a.kernel.until(lambda: not line(a, cell), "no line outlives its cell")
    a.assert_intact()
    assert_books_agree(daemon)


def test_an_idle_notebook_waits_with_its_next_cell(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    run: Callable[..., str],
) -> None:
    """CPU work continues, and the wait can be interrupted like any other."""
    daemon = make_daemon("1x256MiB")
    a = make_notebook(daemon, "A", mib=100)
    run(daemon, "suspend", a.id)
    a.wait_state("paged-out")
    own = a.check("%kiwi status").result
    assert own is not None
    assert "kept out of the GPU until `kiwi resume`" in own
    cell = a.work(steps=1)
    a.kernel.until(lambda: "kept out of the GPU" in line(a, cell), "the cell says so")
    a.kernel.interrupt()
    a.kernel.finish(cell)
    assert cell.error == "KeyboardInterrupt"
    assert a.check("print(1 + 1)").text == "2\n"
    again = a.work(steps=1)
    a.kernel.until(lambda: line(a, again), "it waits")
    run(daemon, "resume", a.id)
    a.finish(again)
    a.assert_intact()


def test_it_outlives_a_daemon_that_is_killed_but_not_one_that_is_told_to_end(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    run: Callable[..., str],
) -> None:
    daemon = make_daemon("1x256MiB")
    a = make_notebook(daemon, "A", mib=100)
    enough = daemon.directory / "enough"
    cell = a.work(until=enough)
    a.wait_state("running")
    run(daemon, "suspend", a.id)
    a.wait_state("suspended")
    linked = times_linked(daemon)  # before the kill: the next daemon may have linked it soon after
    pid = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != pid and s.sessions, "another daemon")
    assert SAID in run(daemon, "status")
    assert a.session.kept_out == "its user"
    assert a.is_out()
    assert not cell.done
    # A daemon that ends before the library has reconnected cannot tell it that the memory is back.
    wait_until(lambda: times_linked(daemon) > linked, "its library is back")
    assert daemon.terminate() == 0
    enough.touch()
    a.finish(cell)
    daemon.start()
    a.finish(a.work(steps=1))
    assert a.session.kept_out == ""
    a.assert_intact()


def test_a_session_that_leaves_or_restarts_is_not_stranded(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    run: Callable[..., str],
) -> None:
    daemon = make_daemon("1x256MiB")
    a, b = make_notebook(daemon, "A", mib=60), make_notebook(daemon, "B", mib=60)
    run(daemon, "suspend", a.id, b.id)
    a.wait_state("paged-out")
    a.check("%kiwi off")
    a.check("memory.step()")
    b.work(until=daemon.directory / "never")
    b.wait_state("waiting")
    b.kernel.restart()
    b.take(60)
    assert b.session.kept_out == ""
