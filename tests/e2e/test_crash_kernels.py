"""Tests that a kernel may be restarted or killed in each state: the other notebook continues."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import leftovers
import pytest
import two_notebooks
from daemon import wait_until
from notebooks import assert_books_agree
from pagers import CHECKPOINT, DEFAULT
from two_notebooks import SIZE_MIB, SLOW, STATES, VERY_SLOW, Arenas, Deathwatch, TwoNotebooks

if TYPE_CHECKING:
    from notebooks import Notebook
    from pagers import PagerUnderTest

pytestmark = pytest.mark.e2e

private_tmp, arenas = leftovers.module_tmp, two_notebooks.arenas

CASES = [
    *((CHECKPOINT, state, way) for way in ("kill", "restart") for state in STATES),
    # The states in which the library holds, moves, or has the memory.
    *((DEFAULT, state, "kill") for state in STATES if state not in ("waiting", "running")),
    *((DEFAULT, state, "restart") for state in ("suspended", "paging-in")),
]


@pytest.mark.host_goes_down
@pytest.mark.parametrize(("pager", "state", "way"), CASES, ids=str)
def test_the_other_notebook_goes_on(
    pager: PagerUnderTest, state: str, way: str, arenas: Arenas
) -> None:
    with arenas.of(pager) as pair:
        a, b = pair.a, pair.b
        pair.reach(state, SLOW if way == "kill" else VERY_SLOW)
        old_id = a.id
        watch = Deathwatch(a.pid)
        if way == "kill":
            a.kernel.kill(signal.SIGKILL)
        else:
            a.kernel.restart(now=False)
        died_s = watch.died_s()
        pair.speed(0)
        wait_until(lambda: pair.beat_s(b) > died_s, "B goes on; no quantum ends")
        pair.daemon.wait_for(
            lambda status: old_id not in {s.id for s in status.sessions}, "A's session ends"
        )
        if way == "kill":
            a.kernel.restart()
        pair.forget_work(a)
        assert_books_agree(pair.daemon)
        assert pair.end(b)[b].text == "worked\n"
        _new_kernel_works(pair, a)


def _new_kernel_works(pair: TwoNotebooks, a: Notebook) -> None:
    a.take(SIZE_MIB, seed=a.pid)
    assert a.session.name == "A.ipynb"
    pair.assert_all_well()
