"""Tests on a real GPU that take two minutes and check that the numbers are plausible.

Run them with ``-m gpu`` on a GPU that nobody else uses. ``KIWI_BENCH_JSON`` may name existing
results of this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the rows by name, and the whole JSON."""
    if named := os.environ.get("KIWI_BENCH_JSON"):
        data = json.loads(Path(named).read_text())
        return {row["name"]: row for row in data["rows"]}, data
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "kiwi_core.cli", "bench", "--json", str(file)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(file.read_text())
    return {row["name"]: row for row in data["rows"]}, data


def test_nothing_is_missing(measured: Any) -> None:
    _, data = measured
    assert data["complete"]
    assert not data["emulated"]
    assert not data["others"]


def test_copies_are_those_of_a_bus(measured: Any) -> None:
    rows, _ = measured
    for way in ("out", "in"):
        pinned = rows[f"pinned_{way}"]
        assert 1 < pinned["spread"]["median"] < 1000  # PCIe Gen1 to NVLink-C2C
        if pinned["limit"] is not None:
            assert 0.1 < pinned["ratio"] < 1.05
        assert rows[f"pageable_{way}"]["ratio"] < 1.2


def test_a_driver_call_takes_time(measured: Any) -> None:
    rows, _ = measured
    assert 0.05 < rows["driver_call"]["spread"]["median"] < 100


def test_moves_are_no_faster_than_the_bus(measured: Any) -> None:
    rows, _ = measured
    for way in ("out", "in"):
        assert 0.005 < rows[f"page_{way}_checkpoint"]["ratio"] < 1.1
    switch = rows["switch_checkpoint"]
    assert switch["ratio"] > 0.9
    assert switch["spread"]["median"] >= rows["switch_checkpoint_in"]["spread"]["min"]
    assert 0.5 < rows["lease"]["ratio"] < 200
