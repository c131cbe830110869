"""Tests of what importing the client costs every kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

COST = """
import json, sys
{before}
known = set(sys.modules)
{imports}
print(json.dumps(sorted(set(sys.modules) - known)))
"""
USE = "from kiwi_core.client import Client, LeaseCancelled, Ticket, discover"
FORBIDDEN = {
    "asyncio", "cuda", "pynvml", "logging", "subprocess", "importlib.metadata", "tempfile",
    "dataclasses_json", "structlog", "psutil", "traitlets", "IPython", "multiprocessing",
    "concurrent", "urllib.request", "http", "ssl", "kiwi_core.daemon", "kiwi_core.sched",
    "kiwi_core.gpu", "kiwi_core.pager",
}  # fmt: skip
OURS_MAX, OTHERS_MAX = 30, 3


def imported(imports: str, before: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COST.format(imports=imports, before=before)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    modules: list[str] = json.loads(done.stdout)
    return modules


def test_importing_loads_nothing_heavy() -> None:
    modules = imported(USE)
    heavy = [m for m in modules if m in FORBIDDEN or m.split(".")[0] in FORBIDDEN]
    assert heavy == []


def test_the_package_alone_is_next_to_nothing() -> None:
    modules = imported("import kiwi_core.client")
    assert modules == ["__future__", "kiwi_core", "kiwi_core.client"]


def test_importing_loads_few_modules() -> None:
    """Only the standard library's usual modules are loaded before, as in a kernel. The client's one
    dependency does not count. Each module costs about a millisecond."""
    kernel = (
        "import dataclasses, enum, pathlib, select, socket, struct, threading, weakref, msgspec"
    )
    modules = imported(USE, before=kernel)
    ours = [name for name in modules if name.startswith("kiwi_core")]
    assert len(ours) <= OURS_MAX, ours
    assert len(modules) - len(ours) <= OTHERS_MAX, sorted(set(modules) - set(ours))


def test_an_unknown_name_is_an_attribute_error() -> None:
    source = (
        "import kiwi_core.client as c\n"
        "try:\n    c.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=60)
