"""A daemon for preloaded programs, with a real socket, Kiwi's own framing and scripted messages.

The daemon checks that each line that arrives is a message of the protocol, in the order that the
protocol prescribes.
"""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from socket_server import Connection, SocketServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage

T = TypeVar("T")

PATIENCE_S = 60.0
"""Limit for events that take milliseconds unless the machine is very busy."""


def eventually(condition: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """Wait for a true value of ``condition`` and return it; fail after a generous time."""
    until_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until_s, "this never came true"
        time.sleep(0.002)
    return value


class Peer(Connection):
    """The connection of one preloaded process."""

    def __init__(self, daemon: PagerDaemon, sock: socket.socket) -> None:
        super().__init__(daemon.faults, sock)
        self.daemon = daemon
        self.received: list[dict[str, Any]] = []
        self._ops = 0

    def say(self, kind: str, **fields: object) -> None:
        self.say_bytes(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def say_bytes(self, data: bytes) -> None:
        with suppress(OSError):  # the process has hung up, as it should after garbage
            self.sock.sendall(data)

    def begin(self, action: str, within_s: float = PATIENCE_S) -> int:
        """Send an order without waiting for its end."""
        self._ops += 1
        self.say("pager-do", op=self._ops, action=action, within_ns=round(within_s * 1e9))
        return self._ops

    def begin_and_see(self, action: str) -> None:
        """Send an order and wait until the process has read it: one that comes with the end of the
        connection may stay unread."""
        self.begin(action)

        def unread_bytes() -> int:
            told = fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(told, sys.byteorder)

        eventually(lambda: unread_bytes() == 0)

    def end(self, op: int) -> dict[str, Any]:
        """Wait for the end of the operation and return its outcome."""
        return eventually(lambda: next((m for m in self.of("pager-done") if m["op"] == op), {}))

    def do(self, action: str, within_s: float = PATIENCE_S) -> dict[str, Any]:
        return self.end(self.begin(action, within_s))

    def gate(self, *, open: bool) -> None:  # noqa: A002 (the field's name)
        """Open or close the gate, and wait until that is done: the answer to the unknown action
        that follows comes later."""
        self.say("gate", open=open)
        assert self.do("somersault")["outcome"] == "refused"

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in tuple(self.received) if message["type"] == kind]

    def await_received(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        return eventually(lambda: found if len(found := self.of(kind)) >= count else [])

    @property
    def state(self) -> dict[str, Any]:
        """Return the last state that the process sent."""
        return self.await_received("pager-state")[-1]

    def take(self, _message: ClientMessage, line: bytes) -> None:
        message: dict[str, Any] = json.loads(line)
        self.received.append(message)
        if message["type"] == "hello" and self.daemon.welcoming:
            self.welcome()
        if message["type"] == "ping" and self.daemon.welcoming and not self.daemon.deaf:
            self.say("pong")
        if message["type"] == "want-room" and self.daemon.grants_room is not None:
            granted = self.daemon.grants_room
            self.say("room", request=message["request"], granted=granted, detail="")

    def welcome(self) -> None:
        # In one write, as the daemon does: a program's first call finds the gate's final state.
        lines = [
            {
                "type": "welcome",
                "protocol": 1,
                "daemon": "kiwi scripted",
                "gpu_uuid": self.daemon.path.stem,
                "gpu_index": 0,
                "gpu_name": "Test GPU",
                "session": "k1",
                "emulation": {"libcuda": "/a", "libnvml": "/b", "env": {"A": "B"}},
                **self.daemon.decides,
            }
        ]
        if not self.daemon.opens:
            lines.append({"type": "gate", "open": False})
        self.say_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


class PagerDaemon(SocketServer[Peer]):
    """A scripted daemon. ``decides``: the fields of the welcome that say who owns the memory; none:
    the daemon is older than they are. ``opens``: whether the gate of a new peer is open. ``deaf``:
    the daemon answers no pings. ``grants_room``: the answer to each ``want-room``; ``None``: no
    automatic answer. ``turns_away``: the error that each new connection gets, which is closed
    before the daemon reads anything from it; ``turned_away`` counts them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.welcoming = True
        self.decides: dict[str, object] = {}
        self.opens = True
        self.deaf = False
        self.grants_room: bool | None = False
        self.turns_away: dict[str, Any] | None = None
        self.turned_away = 0

    def peer(self, number: int = 1) -> Peer:
        """Return connection ``number``, from 1, once it has sent its state."""
        peer = eventually(lambda: self.peers[number - 1] if len(self.peers) >= number else None)
        assert peer is not None
        peer.await_received("pager-state")
        return peer

    def accepted(self, sock: socket.socket) -> Peer | None:
        if self.turns_away is None:
            return Peer(self, sock)
        with sock:
            sock.sendall(json.dumps({"type": "error", **self.turns_away}).encode() + b"\n")
        self.turned_away += 1
        return None
