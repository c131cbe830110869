"""The in-process pager with scripted libraries passes the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from contract import PagerContract
from worlds import LinkedWorld

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LinkedWorld]:
    world = LinkedWorld(tmp_path / "gpus")
    yield world
    world.close()


class TestLinked(PagerContract):
    pass
