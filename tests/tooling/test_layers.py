"""Tests of which modules may import what, and what the pure core may not use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted([*(ROOT / "kiwi_core/sched").rglob("*.py"), *(ROOT / "kiwi_core/wire").rglob("*.py")])
IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "datetime", "logging", "multiprocessing", "os", "pathlib"),
        *("random", "secrets", "select", "socket", "structlog", "subprocess", "sys", "tempfile"),
        *("threading", "time", "uuid"),
    }
)
IMPURE_BUILTINS = frozenset({"open", "input", "print"})


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the top-level names of everything imported, at any depth of the module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_every_import_contract_is_kept() -> None:
    tool = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", tool, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_core_is_where_this_test_looks() -> None:
    assert len(CORE) > 5


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_knows_no_clock_no_randomness_no_world(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not imported_modules(tree) & IMPURE
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & IMPURE_BUILTINS


def test_the_scan_sees_what_it_must_not_miss() -> None:
    source = "def f():\n    from time import time\n    import os.path as p\n"
    assert imported_modules(ast.parse(source)) & IMPURE == {"time", "os"}
