"""Tests of page-outs from a GPU that is full to the last block, which the driver refuses.

An H200 with driver 580.159.04 answered OUT_OF_MEMORY after 4 seconds. The program was unharmed, but
could not be moved any more. So Kiwi does not ask the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import moved, refused, soon_ns

from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from worlds import EmulatedWorld, RunningSession


@pytest.fixture
def session(emulated: EmulatedWorld) -> RunningSession:
    return emulated.start(8 * MIB)


def test_from_a_full_gpu_nothing_goes_out_and_once_it_is_not_full_it_does(
    emulated: EmulatedWorld, session: RunningSession
) -> None:
    before = session.digest()
    emulated.hold_outside(free_bytes=0)
    answer = refused(emulated.pager.page_out(session.target, soon_ns()), Reason.NO_ROOM)
    for words in ("The GPU is full", "some tens of MiB", "empty_cache()", "Kiwi tries again"):
        assert words in answer.detail
    assert emulated.state(session.pid) == "RUNNING"
    assert session.digest() == before
    emulated.hold_outside(free_bytes=4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=emulated.memory_bytes)
    moved(emulated.pager.page_in(session.target, soon_ns()))
    assert session.digest() == before


def test_what_was_suspended_stays_suspended(
    emulated: EmulatedWorld, session: RunningSession
) -> None:
    moved(emulated.pager.suspend(session.target, soon_ns()))
    emulated.hold_outside(free_bytes=0)
    refused(emulated.pager.page_out(session.target, soon_ns()), Reason.NO_ROOM)
    assert emulated.pager.observe(session.target).residency is Residency.SUSPENDED
    moved(emulated.pager.resume(session.target, soon_ns()))
    assert session.digest()


def test_the_driver_is_not_asked_before_more_is_free(
    emulated: EmulatedWorld, session: RunningSession
) -> None:
    emulated.hold_outside(free_bytes=0)
    emulated.faults.set("checkpoint_fail", count=-1)  # counts the checkpoints that are tried
    first = refused(emulated.pager.page_out(session.target, soon_ns()), Reason.NO_ROOM)
    assert refused(emulated.pager.page_out(session.target, soon_ns()), Reason.NO_ROOM) == first
    assert emulated.faults.hits("checkpoint_fail") == 0
    emulated.faults.clear("checkpoint_fail")
    emulated.hold_outside(free_bytes=4 * MIB)
    moved(emulated.pager.page_out(session.target, soon_ns()))


def test_the_same_answer_with_room_is_final(
    emulated: EmulatedWorld, session: RunningSession
) -> None:
    """So does a driver answer that cannot move the program at all, on MIG for instance."""
    emulated.faults.set("checkpoint_oom", pid=session.pid)
    answer = refused(emulated.pager.page_out(session.target, soon_ns()), Reason.UNSUPPORTED)
    assert "does not try again" in answer.detail
    assert refused(emulated.pager.page_out(session.target, soon_ns()), Reason.UNSUPPORTED) == answer
