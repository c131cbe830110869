"""One connected socket that carries whole messages, and how to connect it.

It has no thread and no lock: one thread uses it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from kiwi_core.client.directory import is_trusted, peer_of
from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, PeerError, SilentDaemonError
from kiwi_core.wire.framing import FrameReader, decode_daemon, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import PROTOCOL, Error, Welcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, DaemonMessage, Hello

_CHUNK_BYTES: Final = 64 * 1024
_SEND_TIMEOUT_S: Final = 5.0
"""A daemon that takes no bytes for this long counts as hung: its socket's buffer holds 1,000
messages."""
_KNOCK_EVERY_S: Final = 0.05
"""Time between attempts while the daemon's queue of new connections is full."""

_sockets: WeakSet[DaemonSocket] = WeakSet()


class DaemonSocket:
    """A stream socket to a daemon, which does not block. A forked child closes its copy."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader(DEFAULTS.frame_max_bytes)
        self.fileno = sock.fileno
        self.conversation = Conversation()
        """What was sent until now. It says which message may come next."""
        self.unread: Iterator[DaemonMessage] = iter(())
        """Messages that came together with the welcome."""
        _sockets.add(self)

    def encode(self, message: ClientMessage) -> bytes:
        """Return the bytes of ``message``, and count it as sent: ``write`` them next.

        Raises ``CallerError`` if ``message`` may not be sent now; this changes nothing.
        """
        data = encode(message, DEFAULTS.request_max_bytes)
        try:
            self.conversation.accept(message)
        except PeerError as error:
            raise CallerError(error.code, error.message, error.remedy) from None
        return data

    def write(self, data: bytes) -> None:
        """Send ``data``. Raises ``PeerError`` "disconnected" if the daemon is gone or takes
        nothing."""
        patience = Patience(_SEND_TIMEOUT_S)
        while data:
            try:
                data = data[self._sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not patience.tick():
                    raise disconnected("the daemon does not read") from None
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                poll.poll(SLICE_S * 1000)
            except OSError as error:
                raise disconnected(str(error)) from error

    def read(self) -> Iterator[DaemonMessage]:
        """Yield the messages that have arrived; iterate to the end.

        Raises ``PeerError`` "disconnected" at the end of the stream, and for garbage, after the
        good messages before it.
        """
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise disconnected(str(error)) from error
        if not data:
            raise disconnected("it closed the connection")
        for line in self._frames.feed(data):
            yield decode_daemon(line)

    def close(self) -> None:
        """Close this process's end only: a forked child must not end its parent's connection."""
        self._sock.close()


def _close_in_child() -> None:
    for link in tuple(_sockets):
        link.close()


os.register_at_fork(after_in_child=_close_in_child)


def dial(path: Path, hello: Hello, patience: Patience) -> tuple[DaemonSocket, Welcome]:
    """Connect and wait for the welcome. Raises ``PeerError`` (``SilentDaemonError`` at the end of
    ``patience``) or ``CallerError`` with a remedy."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:  # this process has too many files open
        raise no_daemon(path, error.strerror or str(error)) from error
    try:
        link = DaemonSocket(sock)
        while True:
            try:
                sock.connect(str(path))
                break
            except BlockingIOError:
                if not patience.tick():
                    raise SilentDaemonError(path, "accepts no connections") from None
                time.sleep(_KNOCK_EVERY_S)
            except PermissionError as error:
                raise CallerError(
                    "refused",
                    f"You may not use the Kiwi daemon's socket {path}.",
                    "Ask the administrator of this machine to add you to the group that owns it.",
                ) from error
            except OSError as error:
                raise no_daemon(path, error.strerror or str(error)) from error
        _, uid = peer_of(sock)
        if not is_trusted(uid, path.parent):  # its welcome would say which libraries to load
            raise PeerError(
                "not-trusted",
                f"What answers at {path} belongs to another user (number {uid}), and is not"
                " trusted.",
                "Name a directory of your own in KIWI_SOCKET_DIR, or ask who administers this"
                " machine to start the daemon.",
            )
        return link, welcomed(link, path, hello, patience)
    except BaseException as error:
        sock.close()
        if isinstance(error, PeerError) and error.code == "disconnected":
            # The daemon was ending. The caller may start another one, as if none had answered.
            raise no_daemon(path, "it closed the connection at once") from error
        raise


def welcomed(link: DaemonSocket, path: Path, hello: Hello, patience: Patience) -> Welcome:
    """Send ``hello`` and wait for the answer."""
    data = link.encode(hello)
    with suppress(PeerError):
        # A daemon that refuses this process sends the reason and closes, perhaps before the hello
        # is sent. The reason can still be read then.
        link.write(data)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while (message := next(messages := link.read(), None)) is None:
        if not patience.tick():
            raise SilentDaemonError(path, "does not answer")
        poll.poll(patience.slice_s() * 1000)
    link.unread = messages
    if isinstance(message, Error):
        raise PeerError(message.code, message.message, message.remedy)
    if not isinstance(message, Welcome):
        raise PeerError("out-of-order", "The daemon began with something else than a welcome.")
    if message.protocol != PROTOCOL:
        raise PeerError(
            "protocol-version",
            f"The daemon speaks version {message.protocol} of Kiwi's protocol,"
            f" this process version {PROTOCOL}.",
            "Use the same version of Kiwi on both ends, then restart the older one.",
        )
    return message


def disconnected(why: str) -> PeerError:
    return PeerError(
        "disconnected",
        f"The connection to the Kiwi daemon is gone: {why}.",
        "It is made again by itself when the daemon is back.",
    )


def no_daemon(path: Path, why: str) -> PeerError:
    return PeerError(
        "no-daemon",
        f"No Kiwi daemon answers at {path}: {why}.",
        "Start one with `kiwi daemon`.",
    )
