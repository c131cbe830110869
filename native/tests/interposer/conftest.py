"""Fixtures: an emulated machine per test, without a daemon, and programs compiled once per run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from preload_world import Odd, World

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world(tmp_path: Path, library: Path) -> Iterator[World]:
    world = World(tmp_path, library)
    yield world
    world.close()


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Odd:
    return Odd(tmp_path_factory.mktemp("odd"), library)
