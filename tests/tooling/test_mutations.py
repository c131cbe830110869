"""Tests that ``make mutations`` finds what it wants to break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.file)
def test_it_stands_once_in_its_file(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
