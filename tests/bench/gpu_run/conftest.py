"""Fixtures: the parts of ``tools/gpu`` on the emulated driver, run as the script runs them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from typing import TYPE_CHECKING, Any

import pytest
from small_stage import GPU_SCRIPTS, end_all, small_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of the script; the modules import each other by their plain names."""
    monkeypatch.syspath_prepend(str(GPU_SCRIPTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(GPU_SCRIPTS)):
            del sys.modules[name]


@pytest.fixture
def stage(part: object, tmp_path: Path) -> Iterator[Any]:
    """A stage that may leave no program."""
    one = small_stage(tmp_path)
    yield one
    left = end_all(one)
    assert not left, f"cannot be ended: {left}"
