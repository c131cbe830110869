"""Tests of the bench with the in-process pager: it times moves once memory is pinned for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benched import start_bench
from leftovers import nothing_left

from kiwi_core.bench.moves import pinned_note
from kiwi_core.units import MIB

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON."""
    file: Path = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch):
        bench = start_bench(
            "--emulate", "1x256MiB", "--json", str(file), skip_limits=True,
            more="backends.BACKENDS = (backends.INPROCESS,)",
        )  # fmt: skip
        code, out, err = bench.finish()
    assert code == 0, out + err
    return dict(json.loads(file.read_text()))


def test_rows_say_how_much_was_pinned(measured: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in measured["rows"]}
    for name in ("page_out_inprocess", "page_in_inprocess"):
        row = rows[name]
        # How much is pinned while the bench waits depends on the machine.
        assert 0 < row["pinned_bytes"] <= row["bytes"]
        too_little = row["pinned_bytes"] < row["bytes"]
        assert ("pinned" in row["title"]) is too_little, "only where something is to be said"
    assert rows["lease"]["pinned_bytes"] is None
    assert "switch_inprocess" in rows
    assert not measured["left_out"]


def test_too_little_is_said_in_the_title() -> None:
    assert pinned_note(64 * MIB, None) == pinned_note(64 * MIB, 64 * MIB) == ""
    assert "only 16 MiB of it" in pinned_note(64 * MIB, 16 * MIB)
