"""Tests that any process may be killed in any state with either pager: survivors lose nothing.

A mover is a worker process that calls the driver for the daemon. All of them are killed at once.
While the driver moves memory, another case kills only the one that makes the call.

CI runs each killed process in each state once, with alternating pagers (36 cases). ``make
blackbox`` runs all 72, and the two of the busy mover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from leftovers import nothing_left
from matrix_stage import KILLED, STATES, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator


class Arena:
    """One stage for many cases; a failed case is followed by a new stage."""

    def __init__(self, pager: str) -> None:
        self._pager = pager
        self._stage: Stage | None = None

    def play(self, state: str, who: str) -> None:
        stage = self._stage = self._stage or Stage(self._pager)
        try:
            stage.reach(state)
            stage.kill(who)
            stage.all_well(who)
            stage.ready_again()
        except BaseException as error:
            told = stage.described()
            self._throw_away()
            raise AssertionError(f"{error}\n{told}") from error

    def _throw_away(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    def end(self) -> None:
        """End in order; nothing may be left in the GPU."""
        try:
            if self._stage is not None:
                self._stage.leave_nothing()
        finally:
            self._throw_away()


@pytest.fixture(scope="class")
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch):
        arena = Arena(request.cls.PAGER)
        yield arena
        arena.end()


def cases(first: int) -> pytest.MarkDecorator:
    """Parametrise by state. CI runs every other case from number ``first`` on: the other pager runs
    those that this one omits. They are marked ``slow``."""
    return pytest.mark.parametrize(
        ("state", "who"),
        [
            pytest.param(state, who, marks=[pytest.mark.slow] if (row + column + first) % 2 else [])
            for column, state in enumerate(STATES)
            for row, who in enumerate(KILLED)
        ],
    )


# One class per pager: parallel test runs keep a class together, and so a stage.


@pytest.mark.timeout(240)
class TestCheckpoint:
    PAGER = "checkpoint"

    @cases(first=0)
    def test_survivors_lose_nothing(self, arena: Arena, state: str, who: str) -> None:
        arena.play(state, who)

    @pytest.mark.slow
    @pytest.mark.parametrize("state", ["paging-out", "paging-in"])
    def test_a_call_that_is_cut_short_loses_nothing(self, arena: Arena, state: str) -> None:
        arena.play(state, "busy-mover")


@pytest.mark.timeout(240)
class TestInProcess:
    PAGER = "inprocess"

    @cases(first=1)
    def test_survivors_lose_nothing(self, arena: Arena, state: str, who: str) -> None:
        arena.play(state, who)
