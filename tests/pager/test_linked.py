"""Tests that the in-process pager passes the contract, with scripted libraries and the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import PagerContract
from worlds import LinkedWorld, PreloadedWorld

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds import SharedWorlds


@pytest.fixture(params=[LinkedWorld, PreloadedWorld], ids=["scripted", "library"])
def world(request: pytest.FixtureRequest, shared_worlds: SharedWorlds) -> Iterator[LinkedWorld]:
    with shared_worlds.lend(request.param) as world:
        yield world


class TestLinked(PagerContract):
    pass
