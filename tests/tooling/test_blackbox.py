"""Tests that the black-box tests know no more than a user, and of the page on security."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLACKBOX = ROOT / "tests" / "blackbox"
SUPPORT = ROOT / "tests" / "support"
PAGE = (ROOT / "docs" / "security.md").read_text()
OURS = {"kiwi_core", "kiwi_jupyter", "kiwi_emulator"}
OTHER_SIDE = {
    "emulated_gpu": "_answer runs in a process of its own, which the tests talk to",
    "kernels": "_with_pager is for tests of other suites, which say KIWI_PAGER and no more",
}
"""Modules with a function that imports Kiwi, and why the tests still do not."""


def imported(path: Path) -> set[str]:
    """Return the top-level names that the module imports, except those for type checkers only."""
    found: set[str] = set()
    for node in ast.walk(without_typing(ast.parse(path.read_text()), path.stem)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def without_typing(tree: ast.Module, module: str) -> ast.Module:
    kept = [node for node in tree.body if not is_left_out(node, module)]
    return ast.Module(kept, [])


def is_left_out(node: ast.stmt, module: str) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return f"{node.name} " in OTHER_SIDE.get(module, "")
    return False


def reached(path: Path) -> set[Path]:
    """Return the module, and the tests' own modules that it imports directly or indirectly."""
    found, todo = set(), [path]
    while todo:
        one = todo.pop()
        found.add(one)
        for name in imported(one):
            near = (BLACKBOX / f"{name}.py", SUPPORT / f"{name}.py")
            todo += [path for path in near if path.exists() and path not in found]
    return found


@pytest.mark.parametrize("path", sorted(BLACKBOX.glob("*.py")), ids=lambda path: path.stem)
def test_black_box_tests_import_nothing_of_kiwi(path: Path) -> None:
    for module in reached(path):
        assert not imported(module) & OURS, f"{path.name} imports Kiwi by {module.name}"


def parties() -> list[str]:
    """Return the lines of the table of what each party can do."""
    _, _, rest = PAGE.partition("## What each party can do")
    table, _, _ = rest.partition("\n## ")
    _, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    return rows


def test_the_table_was_read() -> None:
    assert len(parties()) > 10


@pytest.mark.parametrize("row", parties(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_each_row_names_tests_that_are_there(row: str) -> None:
    *_, tests, _ = row.split("|")
    named = re.findall(r"`((?:native/)?tests/[^`]+)`", tests)
    assert named, "no test holds this row"
    for name in named:
        assert re.search(r"^\s*def test_\w+", (ROOT / name).read_text(), re.MULTILINE), name


def test_every_black_box_test_is_named() -> None:
    for path in BLACKBOX.glob("test_*.py"):
        assert f"`tests/blackbox/{path.name}`" in PAGE, path.name
