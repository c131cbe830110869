"""Tests of which browser the tests use, and what they say without one."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import browser
import pytest
from browser import NoChromiumError, find_chromium


def program(directory: Path, name: str) -> str:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that has no browser of its own."""
    (tmp_path / "checkout/scripts").mkdir(parents=True)
    finder = shutil.copy(browser.FINDER, tmp_path / "checkout/scripts")
    monkeypatch.setattr(browser, "FINDER", finder)
    return tmp_path / "checkout"


def test_the_first_that_is_there_is_taken(tmp_path: Path, checkout: Path) -> None:
    (checkout / ".browser").mkdir()
    unpacked = program(checkout / ".browser", "chromium")
    assert find_chromium({"PATH": str(tmp_path)}) == unpacked
    chrome = program(tmp_path, "google-chrome")
    assert find_chromium({"PATH": str(tmp_path)}) == chrome
    chromium = program(tmp_path, "chromium")
    assert find_chromium({"PATH": str(tmp_path)}) == chromium


def test_the_one_that_is_named_goes_first(tmp_path: Path) -> None:
    program(tmp_path, "chromium")
    mine = program(tmp_path, "mine")
    assert find_chromium({"PATH": str(tmp_path), "KIWI_CHROMIUM": mine}) == mine


@pytest.mark.parametrize("named", [{}, {"KIWI_CHROMIUM": "/no/such/browser"}], ids=str)
def test_none_is_an_error_with_a_remedy(
    tmp_path: Path, checkout: Path, named: dict[str, str]
) -> None:
    """A skip would hide that nothing is tested."""
    with pytest.raises(NoChromiumError, match="apt-get install chromium"):
        find_chromium({"PATH": str(tmp_path), **named})


@pytest.mark.timeout(300)
def test_without_root_debians_packages_are_unpacked(checkout: Path) -> None:
    """The script itself takes a screenshot with what it has unpacked."""
    done = subprocess.run(["bash", browser.FINDER, "--unpack"], capture_output=True, text=True)
    if platform.freedesktop_os_release()["ID"] != "debian":
        assert done.returncode, "Ubuntu's package is a snap: nothing to unpack"
        return
    assert done.returncode == 0, done.stderr
    assert find_chromium({"PATH": ""}) == str(checkout / ".browser/chromium")
