"""Tests of a page-in that was ordered before a reading showed too little room for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

Start = Callable[..., "Daemon"] if TYPE_CHECKING else object
Program = Callable[..., "SessionProgram"] if TYPE_CHECKING else object


def test_a_session_that_grew_unseen_goes_out_while_the_pager_waits_for_room(
    start: Start, program: Program
) -> None:
    """Without protection, a page-in relies on the books for free memory. A neighbour that takes
    memory without a turn, just before, holds what the page-in needs."""
    daemon = start("1x256MiB", "--anti-thrash", "off")
    one, other = program(daemon, 150), program(daemon, 10, guarded=False)
    for _ in range(2):  # afterwards their needs are known
        assert one.intact()
        assert other.intact()
    while not _goes_out_for_a_page_in(daemon, one, other):
        """The daemon has seen the growth before the page-in was ordered."""


def _goes_out_for_a_page_in(daemon: Daemon, one: SessionProgram, other: SessionProgram) -> bool:
    """Let ``other`` grow unseen and ``one`` come back; return whether that needed a page-out."""
    before = len(daemon.journal())
    one.worker.do("client.release()")
    daemon.wait_state(one.pid, "paged-out")
    daemon.wait_state(other.pid, "idle")
    other.worker.do("more = alloc(140 << 20)")
    assert one.intact()
    assert other.intact()
    other.worker.do("begin(); free(more); client.end_burst()")
    entries = daemon.journal()[before:]
    refused = (i for i, entry in enumerate(entries) if isinstance(entry.event, ev.PageInRefused))
    # On a slow machine the pager gives up before the memory is out; the order came before that.
    in_time = entries[: next(refused, None)]
    orders = [action for entry in in_time for action in entry.actions]
    return any(isinstance(order, PageOut) and "on its way" in order.cause for order in orders)
