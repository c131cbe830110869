"""Tests of which browser the tests use, and what they say without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import NoChromiumError, find_chromium


def program(directory: Path, name: str) -> str:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_that_is_there_is_taken(tmp_path: Path) -> None:
    chrome = program(tmp_path, "google-chrome")
    assert find_chromium({"PATH": str(tmp_path)}) == chrome
    chromium = program(tmp_path, "chromium")
    assert find_chromium({"PATH": str(tmp_path)}) == chromium


def test_the_one_that_is_named_goes_first(tmp_path: Path) -> None:
    program(tmp_path, "chromium")
    mine = program(tmp_path, "mine")
    assert find_chromium({"PATH": str(tmp_path), "KIWI_CHROMIUM": mine}) == mine


@pytest.mark.parametrize("named", [{}, {"KIWI_CHROMIUM": "/no/such/browser"}], ids=str)
def test_none_is_an_error_with_a_remedy(tmp_path: Path, named: dict[str, str]) -> None:
    """A skip would hide that nothing is tested."""
    with pytest.raises(NoChromiumError, match="apt-get install chromium"):
        find_chromium({"PATH": str(tmp_path), **named})
