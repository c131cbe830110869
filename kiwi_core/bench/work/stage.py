"""The role that owns the bench's private directory, and the daemon in it: whatever happens to the
conductor, both go when this process ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kiwi_core import emulator
from kiwi_core.client import Client
from kiwi_core.errors import CallerError, KiwiError
from kiwi_core.wire.messages import Role

READY_WITHIN_S: Final = 60.0
ENDS_WITHIN_S: Final = 30.0
"""A daemon brings everybody back before it leaves."""


WORKERS_END_WITHIN_S: Final = 65.0
"""More than the role that takes longest."""

LOG: Final = "workers.log"


class Stage:
    ENDS_WITHIN_S = ENDS_WITHIN_S + WORKERS_END_WITHIN_S + 5.0

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def directory(self) -> str:
        """A private one, with a short name (paths of sockets are limited)."""
        self._directory = Path(tempfile.mkdtemp(prefix="kiwi-bench-"))
        return str(self._directory)

    def emulate(self, sizes: str, copy_bytes_per_s: int) -> dict[str, str]:
        """Makes emulated GPUs; what to add to the environment of whoever shall see them."""
        assert self._directory is not None
        try:
            specs = emulator.parse_gpus(sizes)
            libraries = emulator.build()
        except (ValueError, RuntimeError) as error:
            raise CallerError("emulator", str(error)) from error
        state = self._directory / "emulated-gpus"  # where a daemon takes it over
        emulator.create_state(state, specs)
        emulator.set_copy_bandwidth(state, copy_bytes_per_s)
        return emulator.environment(state, libraries)

    def daemon(self, arguments: list[str], env: dict[str, str], gpu_uuid: str) -> str:
        """Starts a daemon; returns the socket of ``gpu_uuid`` when it answers."""
        assert self._directory is not None
        log = self._directory / "daemon.log"
        command = [sys.executable, "-m", "kiwi_core.cli", "daemon", *arguments]
        with log.open("ab") as file:
            self._daemon = subprocess.Popen(
                [*command, "--socket-dir", str(self._directory)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True,
            )  # fmt: skip
        socket = self._directory / f"{gpu_uuid}.sock"
        ends_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < ends_s and self._daemon.poll() is None:
            if socket.exists() and _answers(socket):
                return str(socket)
            time.sleep(0.05)
        words = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise CallerError(
            "no-daemon", "The bench's own daemon did not start. It said: " + " / ".join(words),
            "`kiwi doctor` says what this machine lacks.",
        )  # fmt: skip

    def end_daemon(self) -> None:
        if self._daemon is None:
            return
        self._daemon.terminate()
        try:
            self._daemon.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._daemon.pid, 9)
            self._daemon.wait()
        self._daemon = None

    def close(self) -> None:
        self.end_daemon()
        if self._directory is not None:
            _wait_unlocked(self._directory / LOG)
            shutil.rmtree(self._directory, ignore_errors=True)


def _wait_unlocked(log: Path) -> None:
    """Until the other workers have ended: an emulated GPU lives in the directory, and one of them
    may still have to bring another's memory back."""
    if not log.exists():
        return
    ends_s = time.monotonic() + WORKERS_END_WITHIN_S
    with log.open("ab") as file:
        while time.monotonic() < ends_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return


def _answers(socket: Path) -> bool:
    client = Client(socket, role=Role.OBSERVER, reconnect=False)
    try:
        client.connect()
    except (KiwiError, OSError):
        return False
    client.close()
    return True
