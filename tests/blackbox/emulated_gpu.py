"""The emulated GPU, read and controlled through a process that has the emulator's API.

``EmulatedGpu`` runs this file as a script: one JSON request a line, one JSON answer a line. So the
tests themselves import nothing of Kiwi.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class EmulatedGpu:
    """``state`` is the file ``emulated-gpus`` in a daemon's socket directory."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, what: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"do": what, "state": str(self._state), **fields}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the emulator's API ended at {request}"
        return json.loads(line)

    def copy_at(self, bytes_per_s: int) -> None:
        """Set the speed of copies, page-outs and page-ins from now on; 0: as fast as memory."""
        self._ask("speed", bytes_per_s=bytes_per_s)

    def used_bytes(self) -> dict[int, int]:
        """Return each living process's GPU memory by pid, including paged-out memory."""
        return {int(pid): size for pid, size in self._ask("used").items()}

    def pager_environment(self) -> dict[str, str]:
        """Return the environment that preloads the in-process pager into a program that no Jupyter
        server starts. It also spares a server with a new home from compiling it."""
        return dict(self._ask("pager"))


def _answer(request: dict[str, Any]) -> Any:
    from pathlib import Path

    import kiwi_emulator as emulator
    from kiwi_core import preload

    state = Path(request["state"])
    if request["do"] == "speed":
        emulator.set_copy_bandwidth(state, request["bytes_per_s"])
        return None
    if request["do"] == "pager":
        library = preload.library()
        return {**preload.environment(library, {}), "KIWI_PRELOAD_LIBRARY": str(library)}
    return {
        process.pid: sum(
            sum(held.values())
            for held in (process.device_bytes, process.context_bytes, process.parked_bytes)
        )
        for process in emulator.books(state).processes
    }


def _serve() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
