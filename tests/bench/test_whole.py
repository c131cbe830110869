"""Tests of the whole bench on an emulated GPU whose bus has a set speed."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benched import start_bench
from leftovers import nothing_left

from kiwi_core.bench.results import SCHEMA

RATE = 256 << 20
GB_PER_S = RATE / 1e9

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def measured() -> Any:
    """Return the JSON and the table; the run leaves nothing."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as results:
        file = Path(results) / "bench.json"
        with nothing_left(patch):
            bench = start_bench(
                "--emulate", "1x256MiB", "--emulate-copy-rate", "256MiB", "--json", str(file)
            )
            code, out, err = bench.finish()
        assert code == 0, out + err
        yield json.loads(file.read_text()), out, err


def rows(measured: Any) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in measured[0]["rows"]}


def test_everything_is_measured(measured: Any) -> None:
    data = measured[0]
    assert data["schema"] == SCHEMA
    assert data["complete"] is True
    assert data["emulated"] is True
    copies = {f"{kind}_{way}" for kind in ("pinned", "pageable") for way in ("out", "in")}
    moves = {"page_out", "page_in", "switch"}
    expected = {
        *copies, *(f"{name}_checkpoint" for name in moves), "driver_call", "round_trip", "lease",
    }  # fmt: skip
    assert expected <= set(rows(measured))
    assert data["left_out"] == []
    assert {"gpu", "gpu_bytes", "driver", "cpu", "cores", "ram_bytes", "kernel"} <= set(
        data["machine"]
    )
    assert data["remedies"] == []


def test_every_ratio_is_that_of_its_numbers(measured: Any) -> None:
    with_limit = [row for row in measured[0]["rows"] if row["limit"] is not None]
    assert len(with_limit) == 6
    for row in measured[0]["rows"]:
        spread = row["spread"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"], row
        assert spread["runs"] >= 1
        if row["limit"] is not None:
            assert row["ratio"] == pytest.approx(spread["median"] / row["limit"]["value"])
            assert row["limit"]["of"]
    found = rows(measured)
    pinned = found["pinned_out"]["spread"]["median"]
    assert found["page_out_checkpoint"]["limit"]["value"] == pytest.approx(pinned)
    bare = found["round_trip"]["spread"]["median"]
    assert found["lease"]["limit"]["value"] == pytest.approx(bare)


@pytest.mark.parametrize("way", ["out", "in"])
def test_the_speed_of_the_bus_is_found(measured: Any, way: str) -> None:
    """The emulator never copies faster than its set speed; a busy machine makes it slower."""
    for kind in ("pinned", "pageable"):
        median = rows(measured)[f"{kind}_{way}"]["spread"]["median"]
        assert 0 < median <= 1.02 * GB_PER_S, kind


def test_moves_are_seen_at_the_speed_of_the_bus(measured: Any) -> None:
    """Contexts count as moved, but the emulator need not copy them: a little more than the bus. A
    busy machine makes it slower by an unknown amount."""
    for name in ("page_out_checkpoint", "page_in_checkpoint"):
        assert 0 < rows(measured)[name]["spread"]["median"] <= 1.3 * GB_PER_S, name
    switch = rows(measured)["switch_checkpoint"]
    parts = [rows(measured)[f"switch_checkpoint_{way}"] for way in ("out", "in")]
    assert sum(part["spread"]["min"] for part in parts) <= switch["spread"]["max"]
    assert all(part["bytes"] > 20 << 20 for part in parts)


def test_it_uses_no_more_memory_than_announced(measured: Any) -> None:
    data, out, err = measured
    assert "Takes up to 128 MiB of 256 MiB free GPU memory (for some seconds 242 MiB)" in out
    assert data["uses"]["gpu_bytes"] == 128 << 20
    sizes = [row["bytes"] for row in data["rows"] if row["group"] in ("copies", "calls")]
    assert max(sizes) <= 128 << 20
    assert "switch between two programs, checkpoint" in err


def test_it_says_that_its_speeds_mean_nothing(measured: Any) -> None:
    _, out, _ = measured
    assert out.count("EMULATED GPU: its speeds mean nothing.") == 2


def test_nothing_personal_is_in_it(measured: Any) -> None:
    text = json.dumps(measured[0])
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
    assert "/tmp" not in text


PRELOADED = "backends.BACKENDS = (backends.INPROCESS,)"


def test_the_preloaded_library(alone: Path, tmp_path: Path) -> None:
    """It is measured, or omitted with a reason; the driver's speed never stands under its name."""
    file = tmp_path / "bench.json"
    words = ("--emulate", "1x256MiB", "--emulate-copy-rate", "256MiB", "--json", str(file))
    code, out, err = start_bench(*words, skip_limits=True, more=PRELOADED).finish()
    assert code == 0, out + err
    data = json.loads(file.read_text())
    found = {row["name"]: row for row in data["rows"]}
    if data["left_out"]:
        (left,) = data["left_out"]
        assert left["name"] == "page_inprocess"
        assert left["reason"]
        assert "page_out_inprocess" not in found
        return
    for name in ("page_out_inprocess", "page_in_inprocess"):
        assert 0 < found[name]["spread"]["median"] <= 1.1 * GB_PER_S, name
    assert found["switch_inprocess"]["spread"]["runs"] >= 1
