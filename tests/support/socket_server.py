"""The sockets and threads of the scripted daemons, without the meaning of any message."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from patience import PATIENCE_S

from kiwi_core.errors import KiwiError
from kiwi_core.wire.framing import FrameReader, decode_client
from kiwi_core.wire.legality import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage


class Connection:
    """One accepted connection, whose lines must be legal messages of a client."""

    def __init__(self, faults: list[KiwiError], sock: socket.socket) -> None:
        self.sock = sock
        self.ended = False
        self._faults = faults

    def drop(self) -> None:
        with suppress(OSError):  # the other end was quicker
            self.sock.shutdown(socket.SHUT_RDWR)

    def take(self, message: ClientMessage, line: bytes) -> None:
        raise NotImplementedError

    def serve(self) -> None:
        frames, talk = FrameReader(), Conversation()
        try:
            while data := self.sock.recv(65536):
                for line in frames.feed(data):
                    message = decode_client(line)
                    talk.accept(message)
                    self.take(message, line)
        except OSError:
            pass
        except KiwiError as error:
            self._faults.append(error)
        finally:
            self.ended = True
            self.sock.close()


C = TypeVar("C", bound=Connection)


class SocketServer(Generic[C]):
    """Listens at ``path``. ``faults`` collects what clients did wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.peers: list[C] = []
        self.faults: list[KiwiError] = []
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def accepted(self, sock: socket.socket) -> C | None:
        """Return the connection to serve, or ``None`` if it was turned away."""
        raise NotImplementedError

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
            if (peer := self.accepted(sock)) is not None:
                self.peers.append(peer)
                self._spawn(peer.serve)
