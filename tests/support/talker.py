"""A raw connection to a daemon's socket, to send any bytes and read the answers."""

from __future__ import annotations

import json
import select
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HELLO: dict[str, Any] = {"type": "hello", "protocol": 1, "role": "observer", "client": "test"}


class Talker:
    def __init__(self, path: Path, *, timeout_s: float = 30.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._timeout_s = timeout_s
        try:
            self.socket.connect(str(path))  # blocking: waits if too many connect at once
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(timeout_s)
        self._rest = b""

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say(self, kind: str, **fields: Any) -> None:
        self.raw(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def hello(self, **fields: Any) -> dict[str, Any]:
        """Send a hello and return the welcome or the error."""
        self.raw(json.dumps({**HELLO, **fields}).encode() + b"\n")
        answer = self.hear()
        assert answer is not None, "closed without a word"
        return answer

    def hear(self) -> dict[str, Any] | None:
        """Return the next message; ``None`` once the daemon has closed."""
        while b"\n" not in self._rest:
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def until(self, kind: str) -> dict[str, Any]:
        """Return the next message of that type."""
        while (message := self.hear()) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"closed before any {kind!r}")

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.say(kind, **fields)
        answer = self.hear()
        assert answer is not None, f"closed instead of an answer to {kind}"
        return answer

    def drain(self) -> None:
        """Discard all received data except an unfinished line."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(1 << 20):
                self._rest = (self._rest + data).rpartition(b"\n")[2]
        except BlockingIOError:
            pass
        finally:
            self.socket.settimeout(self._timeout_s)

    def pour(self, data: bytes) -> None:
        """Send all of ``data`` and discard the answers meanwhile: a daemon whose answers are not
        read stops reading, and each side would wait for the other."""
        left = memoryview(data)
        while left:
            readable, writable, _ = select.select([self.socket], [self.socket], [], self._timeout_s)
            if not readable and not writable:
                raise TimeoutError("the daemon neither takes nor says anything")
            self.drain()
            if writable:
                self.socket.setblocking(False)
                try:
                    left = left[self.socket.send(left) :]
                except BlockingIOError:
                    pass
                finally:
                    self.socket.settimeout(self._timeout_s)

    def last_words(self) -> dict[str, Any] | None:
        """Return the last message before the daemon closes."""
        last = None
        while (message := self.hear()) is not None:
            last = message
        return last

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
