"""Tests of what a daemon's processes import at their start; each daemon starts four of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"structlog", "rich", "numpy", "cuda.core", "kiwi_core.sched.scheduler", "kiwi_core.pager"}


@pytest.mark.parametrize(
    ("process", "not_needed"),
    [
        ("kiwi_core.movers.__main__, cuda.bindings.driver, pynvml", HEAVY | {"asyncio", "logging"}),
        ("kiwi_core.daemon.supervisor", HEAVY),
        ("kiwi_core.daemon.__main__", {"rich.console", "numpy", "cuda.bindings"}),
    ],
)
def test_a_process_imports_only_what_it_needs(process: str, not_needed: set[str]) -> None:
    code = f"import sys, {process}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not_needed & set(done.stdout.split()) == set()
