"""Tests of what Kiwi does with bindings that lack a call, and of what it asks of pip."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kiwi_core.cli.checks import gpu
from kiwi_core.cli.checks.finding import Level
from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver


@pytest.fixture
def no_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuda-bindings 13.0.0 and 13.0.1."""
    calls = vars(driver._bindings()).copy()
    del calls["cuCheckpointProcessRestore"]
    monkeypatch.setattr(driver, "_bindings", lambda: SimpleNamespace(**calls))


def test_the_installed_ones_lack_nothing() -> None:
    assert driver.bindings_gap() == ""


def test_nothing_is_moved_out_that_could_not_come_back(no_restore: None) -> None:
    with pytest.raises(GpuError, match="have no cuCheckpointProcessRestore") as refused:
        driver.lock(os.getpid(), 100)
    assert "pip install" in refused.value.remedy


def test_doctor_says_so(no_restore: None) -> None:
    (finding,) = (one for one in gpu.check() if one.area == "bindings")
    assert finding.level is Level.FAIL
    assert "cuCheckpointProcessRestore" in finding.text


def test_the_remedy_is_what_kiwi_asks_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (wanted,) = re.findall(r'^  "cuda-bindings(\S+),<14",$', text, re.MULTILINE)
    assert f"'cuda-bindings{wanted}'" in driver.BINDINGS_REMEDY
