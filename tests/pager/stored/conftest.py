from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stored_world import StoredWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., StoredWorld]]:
    made: list[StoredWorld] = []

    def make(gpus: str = "1x64MiB", *, hashing: bool = False) -> StoredWorld:
        made.append(StoredWorld(tmp_path / f"gpus{len(made)}", gpus, hashing=hashing))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., StoredWorld]) -> StoredWorld:
    return make_world()
