"""A separate ``kiwi daemon`` for the demo or the bench, beside any other daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_core import interpreter
from kiwi_core.client.client import Client
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

READY_WITHIN_S: Final = 120.0
"""Includes the time to compile the emulated driver first."""

ENDS_WITHIN_S: Final = 30.0
"""A daemon pages everybody in before it ends."""

_LOOK_EVERY_S: Final = 0.05
_LOG_LINES: Final = 5

_GUARD: Final = """
import os, signal, sys
sys.stdin.buffer.read()
os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
"""The guard's program. The process that started it holds the other end of its standard input, and
the kernel closes that however the process ends. (Linux's parent-death signal follows the thread
that started a process, not the process.)"""


class Guard:
    """A small process that ends process ``pid`` with SIGTERM if this process dies without a call of
    ``end``, by SIGKILL for instance."""

    def __init__(self, pid: int) -> None:
        self._process = subprocess.Popen(
            interpreter.source(_GUARD, str(pid)),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, cwd=interpreter.DIRECTORY,
        )  # fmt: skip

    def end(self) -> None:
        """Stop guarding, because ``pid`` is about to end in order, or has. May be called twice."""
        self._process.kill()
        self._process.communicate()


class PrivateDaemon:
    """A daemon that starts when this object is created. It ends with ``end``, or when this process
    dies without calling that (by SIGKILL for instance). ``whose`` is for errors ("the demo's"); the
    sockets go to ``sockets``, and the output to ``log``.
    """

    def __init__(
        self,
        whose: str,
        arguments: Sequence[str],
        sockets: Path,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        self._whose = whose
        self._sockets = sockets
        self._log = log
        command = interpreter.module("kiwi_core.cli", "daemon", *arguments)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*command, "--socket-dir", str(sockets.absolute())],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True,
                cwd=interpreter.DIRECTORY,
            )  # fmt: skip
        try:
            self._guard = Guard(self._process.pid)
        except BaseException:
            self._process.terminate()
            raise

    def wait_ready(self, gpu: str = "GPU-*") -> Path:
        """Wait until the daemon of ``gpu`` (a UUID; by default any) answers; return its socket.

        Raises ``CallerError("no-daemon")`` with the last lines of its log.
        """
        ends_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < ends_s and self._process.poll() is None:
            for socket in self._sockets.glob(f"{gpu}.sock"):
                observer = Client(socket, role=Role.OBSERVER, reconnect=False)
                with suppress(KiwiError, OSError), observer:
                    observer.connect()
                    return socket
            time.sleep(_LOOK_EVERY_S)
        words = self._log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        raise CallerError(
            "no-daemon",
            f"{self._whose} daemon did not start. It said: " + " / ".join(words),
            "`kiwi doctor` says what this machine lacks.",
        )

    def end(self) -> None:
        """End the daemon, with time to page everybody in."""
        self._guard.end()
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped: still its number
            self._process.wait()
