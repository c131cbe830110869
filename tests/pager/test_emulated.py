"""The checkpoint pager on the emulated driver passes the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import PagerContract
from worlds import EmulatedWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[EmulatedWorld]:
    world = EmulatedWorld(tmp_path / "gpus")
    yield world
    world.close()


class TestEmulated(PagerContract):
    pass
