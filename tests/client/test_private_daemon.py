"""Tests that a private daemon ends with the process that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemon import wait_until

PROGRAM = """
import os, sys, time
from pathlib import Path
from kiwi_core.client.private_daemon import PrivateDaemon
place = Path(sys.argv[1])
arguments = ["--emulate", "1x64MiB"]
daemon = PrivateDaemon("The test's", arguments, place, place / "log", dict(os.environ))
daemon.wait_ready()
print(daemon._process.pid, daemon._guard._process.pid, flush=True)
if sys.argv[2] == "end":
    daemon.end()
else:
    time.sleep(600)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a short directory, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="kw-") as path:
        yield Path(path)


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_daemon_and_its_guard_end_with_their_starter(place: Path, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(place), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 2, (place / "log").read_text()
        if how == "kill":
            assert all(map(psutil.pid_exists, pids))
            starter.kill()
        wait_until(lambda: not any(map(_runs, pids)), "the daemon and its guard end", 60.0)
    assert not list(place.glob("*.sock")), "it has left as it does when it is asked to"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
