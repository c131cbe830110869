"""The role that owns the bench's private directory and the daemon in it. Both disappear when this
process ends, whatever happens to the conductor.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import kiwi_emulator as emulator
from kiwi_core.client.private_daemon import ENDS_WITHIN_S, PrivateDaemon
from kiwi_core.errors import CallerError

WORKERS_END_WITHIN_S: Final = 65.0
"""More than the slowest role takes to end."""

LOG: Final = "workers.log"


class Stage:
    ENDS_WITHIN_S = ENDS_WITHIN_S + WORKERS_END_WITHIN_S + 5.0

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._daemon: PrivateDaemon | None = None

    def directory(self) -> str:
        """Make a private directory with a short name (paths of sockets are limited)."""
        self._directory = Path(tempfile.mkdtemp(prefix="kiwi-bench-"))
        return str(self._directory)

    def emulate(self, sizes: str, copy_bytes_per_s: int) -> dict[str, str]:
        """Make emulated GPUs. Return what to add to the environment of processes that see them."""
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
        """Start a daemon; return the socket of ``gpu_uuid`` when it answers."""
        assert self._directory is not None
        log = self._directory / "daemon.log"
        self._daemon = PrivateDaemon("The bench's own", arguments, self._directory, log, env)
        return str(self._daemon.wait_ready(gpu_uuid))

    def end_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.end()
        self._daemon = None

    def close(self) -> None:
        self.end_daemon()
        if self._directory is not None:
            _wait_unlocked(self._directory / LOG)
            shutil.rmtree(self._directory, ignore_errors=True)


def _wait_unlocked(log: Path) -> None:
    """Wait until the other workers have ended: an emulated GPU lives in the directory, and one of
    them may still have to bring another's memory back."""
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
