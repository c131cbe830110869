"""Client programs in their own processes, for tests of signals, forks and freezing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.client.scripted_daemon import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
from kiwi_core.client import Client, LeaseCancelled
from kiwi_core.errors import CallerError, KiwiError, PeerError
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, also with forks
path = Path(sys.argv[1])
"""


@contextmanager
def program(source: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Run ``source`` after the prelude, and kill it at the end if it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + source, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
