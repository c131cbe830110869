"""Shared parts of the benchmarks of the server extension and the sidebar: a Jupyter server beside a
daemon, and a crowd of session programs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import common  # noqa: F401  (its paths lead to what tests share)
import psutil
from browser import running_browser
from daemon import running_daemon, wait_until
from lab import running_lab
from sharing_stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["crowd", "running_browser", "running_daemon", "running_stage"]

HERE = Path(__file__).parent

HOLD_MS = 100
"""Time for which each burst of the crowd holds the GPU."""


@contextmanager
def running_stage(
    sizes: str, *daemon_args: str, lab_options: Sequence[str] = ()
) -> Iterator[Stage]:
    with (
        running_daemon(sizes, *daemon_args) as daemon,
        running_lab(daemon.env, options=lab_options) as lab,
    ):
        yield Stage(daemon, lab)


@contextmanager
def crowd(
    stage: Stage, count: int, rate: float, seconds: float, hold_ms: int = HOLD_MS
) -> Iterator[None]:
    """Run ``count`` programs (``sessions.py``) that together take the GPU ``rate`` times a second,
    until the block ends, which must be within ``seconds``."""
    others = len(stage.daemon.status().sessions)
    program = subprocess.Popen(
        [sys.executable, "-S", str(HERE / "sessions.py"), str(stage.daemon.sockets()[0]),
         str(count), str(rate), str(seconds), str(hold_ms)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    try:
        wait_until(
            lambda: len(stage.daemon.status().sessions) == others + count, "all sessions", 120
        )
        if rate:  # else they only stay connected
            program.stdin.write("go\n")
            program.stdin.flush()
        yield
    finally:
        for process in [*psutil.Process(program.pid).children(), psutil.Process(program.pid)]:
            process.kill()
        program.communicate()
        wait_until(lambda: len(stage.daemon.status().sessions) == others, "an empty GPU", 60)
