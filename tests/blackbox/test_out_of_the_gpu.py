"""Tests that a paged-out program comes back, whatever happens to it and the GPU meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kiwi_box import GREEDY, ON_THE_GPU, running_box

if TYPE_CHECKING:
    from kiwi_box import KiwiBox, Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


TRIES_FOR_S = 10.0
"""Long enough for several attempts, with the pauses between them."""

ARGS = ("--idle-after", "0.5", "--tq", "600")

LOCK = (
    ON_THE_GPU
    + """
arguments = driver.CUcheckpointLockArgs()
arguments.timeoutMs = 60000
ck(driver.cuCheckpointProcessLock({pid}, arguments))
print("locked", flush=True)
"""
)
"""What another tool may do, and what a daemon leaves that is killed at the wrong moment."""


def is_out(session: dict[str, Any]) -> bool:
    return bool(session["state"] == "paged-out" and session["paged_out_bytes"] > 0)


def two_of_which_the_second_is_out(box: KiwiBox) -> tuple[Program, Program]:
    first, second = (box.program(name, "--pager", "inprocess") for name in ("first", "second"))
    for program, mib in ((first, 120), (second, 160)):
        assert program.get(f"take({mib})") == "None"
        program.wait_rests()
    assert first.get("intact()") == "True"
    first.wait_rests()
    box.wait_session("second", is_out, "the second is out")
    return first, second


def test_room_taken_by_a_program_outside() -> None:
    """While nothing fits, no program continues; once the outside program has ended, all do."""
    with running_box("1x256MiB", *ARGS) as box:
        first, second = two_of_which_the_second_is_out(box)
        hog = box.outside(GREEDY)
        assert hog.answer() == "full"
        second.ask("intact()")
        # The first makes room in vain, unless a reading has shown already that this would not do.
        with pytest.raises(AssertionError):  # while the scheduler keeps trying
            second.answer(TRIES_FOR_S)
        hog.kill()
        assert second.answer(120.0) == "True"
        assert first.get("intact()", 120.0) == "True"
        assert second.get("intact()", 120.0) == "True"


def test_locked_by_somebody_else() -> None:
    """The driver holds it: its library would not answer an order to move the rest."""
    with running_box("1x256MiB", *ARGS) as box:
        first, second = two_of_which_the_second_is_out(box)
        tool = box.outside(LOCK.format(pid=second.get_pid()))
        assert tool.answer() == "locked"
        tool.kill()
        third = box.program("third", "--pager", "inprocess")
        assert third.get("take(200)", 120.0) == "None"
        # The third has its room from the first; what the second holds besides can still be on its
        # way.
        box.wait_session("second", is_out, "the second is out")
        for program in (second, first, third):
            assert program.get("intact()", 120.0) == "True"
