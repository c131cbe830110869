"""Tests that the table of what Kiwi's library takes in a program names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guest.md").read_text()


def rows() -> list[str]:
    _, _, rest = PAGE.partition("## What the library takes")
    table, _, _ = rest.partition("\n## ")
    _, _, *found = [line for line in table.splitlines() if line.startswith("|")]
    return found


def test_the_table_was_read() -> None:
    assert len(rows()) > 10


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_each_row_names_tests_that_are_there(row: str) -> None:
    *_, tests, _ = row.split("|")
    named = re.findall(r"`((?:native/)?tests/[^`:]+)::(\w+)`", tests)
    assert named, "no test holds this row"
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
