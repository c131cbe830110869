"""Tests that the in-process pager passes the contract, with scripted libraries and the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import PagerContract
from worlds import LinkedWorld, PreloadedWorld

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[LinkedWorld, PreloadedWorld], ids=["scripted", "library"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LinkedWorld]:
    world = request.param(tmp_path / "gpus")
    yield world
    world.close()


class TestLinked(PagerContract):
    pass
