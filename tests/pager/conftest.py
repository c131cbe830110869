from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The tests of every backend import the contract and the programs under test from here.
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds import EmulatedWorld


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[EmulatedWorld]:
    from worlds import EmulatedWorld

    world = EmulatedWorld(tmp_path / "gpus")
    yield world
    world.close()
