"""Fixtures: the bench as another process on an emulated GPU, which leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from leftovers import nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory_of_pytest(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Create it now, and not in the private directory of a test, which the test removes."""
    tmp_path_factory.getbasetemp()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Check that nothing that is started in it leaves a process or a file. (``tmp_path`` comes
    first, so that it is not inside.)"""
    with nothing_left(monkeypatch) as directory:
        yield directory
