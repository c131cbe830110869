"""The bench as its user runs it: another process, an emulated GPU, nothing left behind."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from typing import TYPE_CHECKING

import pytest
from leftovers import nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory_of_pytest(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make it now, not in the private directory of a test, which goes with the test."""
    tmp_path_factory.getbasetemp()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whatever is started in it, no process and no file of it may be left. (``tmp_path`` comes
    first: it shall not lie in there.)"""
    with nothing_left(monkeypatch) as directory:
        yield directory
