"""The client is in every kernel: what importing it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

COST = """
import json, sys, time
{before}
known = set(sys.modules)
started = time.process_time()
{imports}
seconds = time.process_time() - started
print(json.dumps([seconds, sorted(set(sys.modules) - known)]))
"""
USE = "from kiwi_core.client import Client, LeaseCancelled, Ticket, discover"
FORBIDDEN = {
    "asyncio", "cuda", "pynvml", "logging", "subprocess", "importlib.metadata", "tempfile",
    "dataclasses_json", "structlog", "psutil", "traitlets", "IPython", "multiprocessing",
    "concurrent", "urllib.request", "http", "ssl", "kiwi_core.daemon", "kiwi_core.sched",
    "kiwi_core.gpu", "kiwi_core.pager",
}  # fmt: skip


def cost(imports: str, before: str = "") -> tuple[float, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", COST.format(imports=imports, before=before)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


def best_s(imports: str, before: str = "") -> float:
    """Processor time, the best of several: a busy machine only ever adds."""
    return min(cost(imports, before)[0] for _ in range(7))


def test_importing_loads_nothing_heavy() -> None:
    _, modules = cost(USE)
    heavy = [m for m in modules if m in FORBIDDEN or m.split(".")[0] in FORBIDDEN]
    assert heavy == []


def test_the_package_alone_is_next_to_nothing() -> None:
    _, modules = cost("import kiwi_core.client")
    assert modules == ["__future__", "kiwi_core", "kiwi_core.client"]


def test_importing_is_quick() -> None:
    """In a kernel, which has the standard library's usual modules in already; the client's one
    dependency is counted against itself, because it alone takes most of the time."""
    kernel = "import dataclasses, enum, pathlib, select, socket, struct, threading, weakref"
    assert best_s("import kiwi_core.client", before=kernel) < 0.030
    assert best_s(USE, before=f"{kernel}, msgspec") < 0.030


def test_an_unknown_name_is_an_attribute_error() -> None:
    source = (
        "import kiwi_core.client as c\n"
        "try:\n    c.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=60)
