"""A daemon for preloaded programs, with a real socket, Kiwi's own framing and scripted messages.

The daemon checks that each line that arrives is a message of the protocol, in the order that the
protocol prescribes.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kiwi_core.errors import KiwiError
from kiwi_core.wire.framing import FrameReader, decode_client
from kiwi_core.wire.legality import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


class Peer:
    """The connection of one preloaded process."""

    def __init__(self, daemon: PagerDaemon, sock: socket.socket) -> None:
        self.daemon = daemon
        self.sock = sock
        self.heard: list[dict[str, Any]] = []
        self.ended = False
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
        return [message for message in tuple(self.heard) if message["type"] == kind]

    def await_heard(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        return eventually(lambda: found if len(found := self.of(kind)) >= count else [])

    @property
    def state(self) -> dict[str, Any]:
        """Return the last state that the process sent."""
        return self.await_heard("pager-state")[-1]

    def drop(self) -> None:
        with suppress(OSError):  # the process was quicker
            self.sock.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        frames, talk = FrameReader(), Conversation()
        try:
            while data := self.sock.recv(65536):
                for line in frames.feed(data):
                    talk.says(decode_client(line))
                    self._take(json.loads(line))
        except OSError:
            pass
        except KiwiError as error:
            self.daemon.faults.append(error)
        finally:
            self.ended = True
            self.sock.close()

    def _take(self, message: dict[str, Any]) -> None:
        self.heard.append(message)
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
            }
        ]
        if not self.daemon.opens:
            lines.append({"type": "gate", "open": False})
        self.say_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


class PagerDaemon:
    """A scripted daemon. ``opens``: whether the gate of a new peer is open. ``deaf``: the daemon
    answers no pings. ``grants_room``: the answer to each ``want-room``; ``None``: no automatic
    answer. ``turns_away``: the error that each new connection gets, which is closed before the
    daemon reads anything from it; ``turned_away`` counts them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.welcoming = True
        self.opens = True
        self.deaf = False
        self.grants_room: bool | None = False
        self.turns_away: dict[str, Any] | None = None
        self.turned_away = 0
        self.peers: list[Peer] = []
        self.faults: list[KiwiError] = []
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._spawn(lambda listener=self._listener: self._accept(listener))

    def stop(self) -> None:
        """Stop as after kill -9: all connections end, and the socket's file stays and refuses."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for peer in self.peers:
            peer.drop()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._threads.clear()

    def peer(self, number: int = 1) -> Peer:
        """Return connection ``number``, from 1, once it has sent its state."""
        peer = eventually(lambda: self.peers[number - 1] if len(self.peers) >= number else None)
        assert peer is not None
        peer.await_heard("pager-state")
        return peer

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            if self.turns_away is not None:
                with sock:
                    sock.sendall(json.dumps({"type": "error", **self.turns_away}).encode() + b"\n")
                self.turned_away += 1
                continue
            peer = Peer(self, sock)
            self.peers.append(peer)
            self._spawn(peer.serve)
