"""Tests of Run All beside a training: the notebook's cells share a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ledger
import pytest
from notebooks import assert_books_agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CELLS = 10
NO_GRACE = "c.Kiwi.turn_grace_s = 0.0"
LONG_GRACE = "c.Kiwi.turn_grace_s = 5.0"
"""Longer than a busy kernel needs from one cell to the next; the benchmarks have the default."""


def run_all(notebook: Notebook) -> None:
    """Queue all cells at once, as Run All does."""
    cells = [notebook.start("memory.step()") for _ in range(CELLS)]
    for cell in cells:
        notebook.finish(cell)


def test_run_all_beside_a_training_is_few_turns(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    """B's ten cells take one or two turns; the same cells of C, which has no grace, take one turn
    each. So the training is stopped less often, and all contents survive. No two of the three fit
    together."""
    daemon = make_daemon("1x128MiB", "--tq", "5")
    a = make_notebook(daemon, "A", mib=76)
    b = make_notebook(daemon, "B", mib=76, config=LONG_GRACE)
    c = make_notebook(daemon, "C", mib=76, config=NO_GRACE)
    enough = daemon.directory / "enough"
    loop = a.work(until=enough)
    stops = []
    for notebook in (b, c):
        a.wait_state("running")
        before = a.session.suspensions
        run_all(notebook)
        stops.append(a.session.suspensions - before)
    books = ledger.read(daemon.journal())
    turns = [len(books.of(notebook.id)) for notebook in (b, c)]
    enough.touch()
    a.finish(loop)
    for notebook in (a, b, c):
        notebook.assert_intact()
    assert_books_agree(daemon)
    assert books.overlaps() == []
    assert turns[1] >= CELLS
    assert turns[0] <= turns[1] // 2, f"turns of B and C: {turns}"
    assert 1 <= stops[0] <= stops[1], f"the training was stopped for B and for C: {stops}"
