"""Anybody may be killed, in any state, with either pager: who lives loses nothing.

CI runs each killed process in each state once, the pagers in turn (36 cases); ``make blackbox``
runs all 72.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from leftovers import nothing_left
from matrix_stage import KILLED, STATES, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGERS = ("checkpoint", "inprocess")


class Arena:
    """One stage for many cases, until the pager changes or a case fails."""

    def __init__(self) -> None:
        self._pager = ""
        self._stage: Stage | None = None

    def stage(self, pager: str) -> Stage:
        if pager != self._pager:
            self.end()
        if self._stage is None:
            self._stage = Stage(pager)
        self._pager = pager
        return self._stage

    def throw_away(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    def end(self) -> None:
        """In good order; nothing may be left in the GPU."""
        try:
            if self._stage is not None:
                self._stage.leave_nothing()
        finally:
            self.throw_away()


@pytest.fixture(scope="module")
def private_tmp() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch) as directory:
        yield directory


@pytest.fixture(scope="module")
def arena(private_tmp: Path) -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.end()


def cases() -> Iterator[object]:
    """By pager and state. What CI leaves out is marked ``slow``."""
    for number, pager in enumerate(PAGERS):
        for column, state in enumerate(STATES):
            for row, who in enumerate(KILLED):
                elsewhere = (row + column + number) % 2
                marks = [pytest.mark.xdist_group(pager)]
                marks += [pytest.mark.slow] if elsewhere else []
                yield pytest.param(pager, state, who, marks=marks)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("pager", "state", "who"), list(cases()))
def test_who_lives_loses_nothing(arena: Arena, pager: str, state: str, who: str) -> None:
    stage = arena.stage(pager)
    try:
        stage.reach(state)
        stage.kill(who)
        stage.all_well(who)
        stage.ready_again()
    except BaseException as error:
        told = stage.described()
        arena.throw_away()
        raise AssertionError(f"{error}\n{told}") from error
