from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The tests of every backend import the contract and the programs under test from here.
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worlds import EmulatedWorld, SharedWorlds


@pytest.fixture(scope="module")
def shared_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorlds]:
    from worlds import SharedWorlds

    worlds = SharedWorlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()


@pytest.fixture
def emulated(shared_worlds: SharedWorlds) -> Iterator[EmulatedWorld]:
    from worlds import EmulatedWorld

    with shared_worlds.lend(EmulatedWorld) as world:
        yield world
