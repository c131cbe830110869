"""Stop a process for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GUARD = """
import os, signal, sys
sys.stdin.read()
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def is_stopped(pid: int) -> bool:
    """Return whether all threads of ``pid`` are stopped. On a busy machine one may run on for a
    moment after the signal."""
    states = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


@contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """Stop ``pid`` during the block; yield what makes it go on earlier. It goes on afterwards, even
    if this test run is killed: a process that would end by itself cannot do so while it is
    stopped."""
    guard = subprocess.Popen(
        [sys.executable, "-S", "-c", _GUARD, str(pid)],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        guard.communicate()
