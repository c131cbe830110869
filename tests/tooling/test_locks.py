"""Tests that the locks in requirements/ install on every patch release of their Python."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kiwi_lock", ROOT / "scripts/lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_holds_for_the_first_patch_release_of_its_python(lock: Path) -> None:
    """Debian 12 has Python 3.11.2. A package that needs 3.11.5 ends the installation there."""
    assert writer().too_new(lock.stem.rpartition("-py")[2], lock.read_text()) == []


def test_the_figures_are_those_of_the_packages() -> None:
    """Of what is installed here in the locked version, on the Python that the tests run on."""
    compared = 0
    for name, version, wanted in writer()._LINE.findall(
        "".join(lock.read_text() for lock in LOCKS if lock.name.startswith("dev-"))
    ):
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version == version:
            assert wanted == (installed.metadata.get("Requires-Python") or "").replace(" ", "")
            compared += 1
    assert compared > 20


def test_a_package_that_needs_a_later_patch_release_is_named() -> None:
    text = "# head\nold==1.0  # Python >=3.8\nnew==2.0  # Python >=3.11.5\nany==3.0\n"
    assert writer().too_new("3.11", text) == ["new 2.0 needs Python >=3.11.5"]
