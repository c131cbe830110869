"""Tests of the documentation's site: each page has one place, and a broken link fails the build."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READMES = (ROOT / "emulator/README.md", ROOT / "native/README.md")
PAGES = {
    *(*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *READMES),
    *ROOT.glob("integrations/*/README.md"),
}


@cache
def navigation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kiwi_docs_navigation", DOCS / "navigation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    """The site has only pages that an index page lists, so a new page must be in such a table."""
    shown = {ROOT / f"{name}.md" for name in navigation().pages()}
    assert shown >= PAGES
    assert {each for each in shown if not each.is_file()} == set()


def test_every_page_has_one_place_in_the_navigation() -> None:
    listed = [name for names in navigation().listed().values() for name in names]
    assert len(listed) > 40
    assert sorted(listed) == sorted(set(listed))


def test_the_three_paths_are_in_every_header() -> None:
    listed = navigation().listed()
    paths = ["docs/users", "docs/admins", "docs/contributors", "docs/internals"]
    assert [name for name in listed[navigation().START] if name in paths] == paths
    assert set(listed["docs/internals"]) >= {"docs/protocol", "docs/preload"}


def test_every_picture_is_made_by_the_script_and_shown() -> None:
    made = set(re.findall(r'out / "([\w-]+\.png)"', (DOCS / "make_screenshots.py").read_text()))
    shown = {
        name for each in PAGES for name in re.findall(r"\]\(\S*images/(\S+)\)", each.read_text())
    }
    assert made == shown == {path.name for path in (DOCS / "images").iterdir()}


BROKEN = "[a](nowhere.md) [b](usage.md#nothing) [c](#nothing-here) [d](../docs/usage.md)\n"


@pytest.mark.timeout(120)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """Run the command of `make docs` on a site with one page that has three broken links and a good
    one."""
    for name in ("docs/conf.py", "docs/navigation.py", "docs/_templates/index.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in navigation().INDEX_PAGES:
        (tmp_path / f"{name}.md").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.md").write_text("# Index\n")
    rows = "| [x](faq.md) | |\n| [x](usage.md) | |\n"
    (tmp_path / "docs/README.md").write_text(f"# Index\n\n| | |\n| --- | --- |\n{rows}")
    (tmp_path / "docs/usage.md").write_text("# Usage\n")
    (tmp_path / "docs/faq.md").write_text(f"# Questions\n\n{BROKEN}")
    code, said = sphinx_says(tmp_path)
    assert code == 1
    found = re.findall(r"faq\.md:3: WARNING: .*?'([\w.#-]+)' \[", said)
    assert sorted(found) == ["nothing", "nothing-here", "nowhere.md"], said


def sphinx_says(site: Path) -> tuple[int, str]:
    """Run the Makefile's own command on another site."""
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/.kiwi-ready", "docs"],
        cwd=ROOT,
        env={name: v for name, v in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (line,) = [line for line in planned.stdout.splitlines() if "sphinx-build" in line]
    words = shlex.split(line)
    options = words[words.index(".venv/bin/sphinx-build") + 1 :]
    command = [sys.executable, "-m", "sphinx", *options]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stderr
