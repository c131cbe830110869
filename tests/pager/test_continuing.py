"""Tests that a program that Ctrl-Z stopped is continued to be held, and then stopped again.

It is not stopped if its user has entered ``fg`` in the meantime.
"""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import wait_until

from kiwi_core.gpu import processes
from kiwi_core.pager.continuing import continued

if TYPE_CHECKING:
    from collections.abc import Iterator

SHELL = """
import os, signal, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    while True:
        time.sleep(0.01)
        with open(sys.argv[1], "a") as file:
            file.write(".")
try:
    os.setpgid(job, job)
    os.kill(job, signal.SIGSTOP)
    print(job, flush=True)
    for line in sys.stdin:
        if line == "fg\\n":
            os.tcsetpgrp(0, job)
        os.kill(job, signal.SIGCONT)
        print("done", flush=True)
        signal.pause()  # (nobody but the foreground may read from the terminal)
finally:
    os.kill(job, signal.SIGKILL)
"""
"""What a shell with job control does, on a terminal of its own. Its job is stopped at first."""


class Shell:
    def __init__(self, progress: Path) -> None:
        """Start a job that keeps appending to the file ``progress``."""
        self.pid, self._terminal = pty.fork()
        if not self.pid:  # the child must not continue the test run
            os.execv(sys.executable, [sys.executable, "-S", "-c", SHELL, str(progress)])
        self._said = b""
        self.job = int(self._line())

    def say(self, command: str) -> None:
        os.write(self._terminal, command.encode() + b"\n")
        while self._line() != "done":
            pass

    def _line(self) -> str:
        while b"\n" not in self._said:
            self._said += os.read(self._terminal, 4096)
        line, _, self._said = self._said.partition(b"\n")
        return line.decode().strip()

    def close(self) -> None:
        os.kill(self.job, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path / "progress")
    yield shell
    shell.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_is_stopped_later_goes_on_too_and_is_stopped_again(shell: Shell) -> None:
    os.kill(shell.job, signal.SIGCONT)
    wait_until(lambda: state(shell.job) != "T", "it runs")
    ref = processes.ref_of(shell.job)
    assert ref is not None

    async def operation() -> None:
        async with continued([ref]):
            os.kill(shell.job, signal.SIGSTOP)
            wait_until(lambda: state(shell.job) == "T", "it is stopped")
            while state(shell.job) == "T":
                await asyncio.sleep(0.01)

    asyncio.run(operation())
    wait_until(lambda: state(shell.job) == "T", "it is stopped again")


@pytest.mark.parametrize(("command", "stays_stopped"), [("", True), ("fg", False), ("bg", True)])
def test_what_its_user_brought_to_the_foreground_runs_on(
    shell: Shell, tmp_path: Path, command: str, stays_stopped: bool
) -> None:
    """``bg`` leaves no trace in a running process: the process is stopped, and its user can
    continue it again."""
    wait_until(lambda: state(shell.job) == "T", "it is stopped")
    ref = processes.ref_of(shell.job)
    assert ref is not None

    async def operation() -> None:
        async with continued([ref]):
            wait_until(lambda: state(shell.job) != "T", "it goes on")
            if command:
                shell.say(command)

    asyncio.run(operation())
    if stays_stopped:
        wait_until(lambda: state(shell.job) == "T", "it is stopped again")
        os.kill(shell.job, signal.SIGCONT)
        wait_until(lambda: state(shell.job) != "T", "it can be continued")
    else:
        progress = tmp_path / "progress"
        wait_until(progress.exists, "it begins")
        before = progress.stat().st_size
        wait_until(lambda: progress.stat().st_size > before + 20, "it runs on")
