"""Fixtures: programs whose memory the library owns, without a daemon; tests call the pager."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from preload_world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cuda_processes import Worker

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture
def world(tmp_path: Path, library: Path) -> Iterator[World]:
    world = World(tmp_path, library, "1x64MiB")
    yield world
    world.close()


@pytest.fixture
def program(world: World) -> Callable[..., Worker]:
    """Start a program that has a context and the names of ``owner_calls``."""

    def start(**environment: str) -> Worker:
        setup = "init(); from owner_calls import *"
        return world.worker(setup, PYTHONPATH=str(SUPPORT), **environment)

    return start
