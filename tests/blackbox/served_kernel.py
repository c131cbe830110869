"""A kernel that a real Jupyter server has started, used as a front end uses it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from kernels import Kernel
from lab_kernels import answers
from patience import wait_until

if TYPE_CHECKING:
    from lab import Lab

STARTS_WITHIN_S = 120.0


class ServedKernel(Kernel):
    """The kernel of the notebook ``name``. The server restarts it by itself when it dies."""

    def __init__(self, server: Lab, name: str) -> None:
        self.directory = server.directory
        self._server = server
        self._cells = {}
        self.client = None
        made = server.rest(
            "POST", "api/sessions",
            {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}},
        )  # fmt: skip
        self.kernel_id = str(made["kernel"]["id"])
        self._pid = 0
        self.connect()

    @property
    def pid(self) -> int:
        return self._pid

    def connect(self) -> None:
        """Connect to the process that runs now, also after the server has restarted it."""
        try:
            self._pid = int(wait_until(self._running, "a running kernel", STARTS_WITHIN_S))
        except AssertionError as e:
            raise AssertionError(f"{e}; the server's log:\n{self.log()}") from e
        runtime = Path(self._server.env["JUPYTER_RUNTIME_DIR"])
        path = runtime / f"kernel-{self.kernel_id}.json"
        self.client = BlockingKernelClient(connection_file=str(path))
        self.client.load_connection_file()
        self.client.start_channels()
        wait_until(lambda: answers(self.client), "an answer of the kernel", STARTS_WITHIN_S)

    def _running(self) -> int:
        """Return its pid, or 0 while there is only the one that died."""
        assert self._server.process is not None
        for process in psutil.Process(self._server.process.pid).children():
            try:
                named = any(self.kernel_id in word for word in process.cmdline())
                if named and process.pid != self._pid:
                    return int(process.pid)
            except psutil.Error:
                continue
        return 0

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.hang_up()
        os.kill(self._pid, how)

    def hang_up(self) -> None:
        """End this front end; the kernel stays."""
        if self.client is not None:
            self.client.stop_channels()
            self.client.context.destroy(linger=0)
            self.client = None
        self._cells.clear()

    def stop(self) -> None:
        """Shut the kernel down, as the menu does."""
        self.hang_up()
        self._server.rest("DELETE", f"api/kernels/{self.kernel_id}")

    def log(self) -> str:
        return self._server.log()
