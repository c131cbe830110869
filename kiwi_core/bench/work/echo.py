"""The role that answers each line at once: the far end of a bare round trip."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Echo:
    ENDS_WITHIN_S = 5.0

    def __init__(self) -> None:
        self._server = socket.socket(socket.AF_UNIX)

    def serve(self, path: str, answer: str) -> None:
        """Listen at ``path``, with blocking ``recv`` and ``send`` and nothing else."""
        self._server.bind(path)
        self._server.listen(1)
        threading.Thread(target=self._answer, args=(answer.encode(),), daemon=True).start()

    def _answer(self, line: bytes) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            while connection.recv(4096):
                connection.sendall(line)

    def close(self) -> None:
        self._server.close()
