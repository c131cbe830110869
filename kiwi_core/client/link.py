"""One connected socket: whole messages in and out. No thread, no lock, no second try."""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.framing import FrameReader, decode_daemon, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import PROTOCOL, Error, Welcome

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, DaemonMessage, Hello

BRIEFLY_S: Final = 0.005
"""How long a caller reads the socket itself before it leaves that to the client's thread: many
round trips of an idle machine, and too short for a person to notice."""

_CHUNK_BYTES: Final = 64 * 1024
# As plain integers: each `|` of the enumeration's members costs a microsecond.
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

_SEND_TIMEOUT_S: Final = 5.0
"""A daemon that takes no bytes for this long hangs: its socket's buffer holds 1,000 messages."""


class Link:
    """A stream socket to a daemon.

    A ``KeyboardInterrupt`` may strike the main thread between any two steps. ``half_sent`` and
    ``half_read`` then say whether a message was cut in half or may be taken twice; such a link
    must be closed, and a new one carries on (its hello says what this process believes).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameReader(DEFAULTS.frame_max_bytes)
        self.talk = Conversation()
        self._chunks: deque[bytes] = deque()
        self._lines: deque[bytes] = deque()
        self._fault: PeerError | None = None
        self._sending = False
        # One system call for "wait a moment, then read": this is the fast path.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(BRIEFLY_S))

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def half_sent(self) -> bool:
        return self._sending

    @property
    def half_read(self) -> bool:
        """Something was fetched and not popped. Only who reads can ask."""
        return bool(self._chunks) or bool(self._lines)

    def send(self, message: ClientMessage) -> None:
        """Raises ``CallerError`` where ``message`` may not be sent now (nothing was sent), and
        ``PeerError`` "disconnected" where the daemon is gone or takes nothing."""
        data = encode(message, DEFAULTS.request_max_bytes)
        self._sending = True  # also stands for "talk says that it was said"
        try:
            self.talk.says(message)
        except PeerError as error:
            self._sending = False
            raise CallerError(error.code, error.message, error.remedy) from None
        try:
            self._send_all(data)
        except OSError as error:
            raise disconnected(str(error)) from error
        self._sending = False

    def _send_all(self, data: bytes) -> None:
        sent = self._send_some(data)
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        patience = Patience(_SEND_TIMEOUT_S)
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while rest:
            if not patience.tick():
                raise TimeoutError("the daemon does not read")
            poll.poll(SLICE_S * 1000)
            rest = rest[self._send_some(rest) :]

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data, _SEND_FLAGS)
        except BlockingIOError:
            return 0

    def fetch(self, *, wait: bool) -> bool:
        """Read what has arrived; with ``wait``, for ``BRIEFLY_S`` if need be. False: nothing came.

        Raises ``PeerError`` "disconnected" at the end of the stream.
        """
        flags = 0 if wait else _AT_ONCE
        try:
            # map + extend: no bytecode runs between reading and keeping, so that no interrupt can
            # throw away bytes that the kernel has already handed out.
            self._chunks.extend(map(self._sock.recv, (_CHUNK_BYTES,), (flags,)))
        except BlockingIOError:
            return False
        except OSError as error:
            raise disconnected(str(error)) from error
        if not self._chunks[-1]:
            raise disconnected("it closed the connection")
        return True

    def peek(self) -> DaemonMessage | None:
        """The oldest message fetched; it stays until ``pop``. Raises ``PeerError`` for garbage."""
        while self._chunks:
            self._split(self._chunks[0])
            self._chunks.popleft()
        if self._lines:
            return decode_daemon(self._lines[0])
        if self._fault is not None:
            raise self._fault
        return None

    @property
    def drained(self) -> bool:
        """``peek`` would have nothing, neither a message nor a fault."""
        return not self._lines and not self._chunks and self._fault is None

    def pop(self) -> None:
        self._lines.popleft()

    def _split(self, chunk: bytes) -> None:
        if (line := self._frames.only_line(chunk)) is not None:
            self._lines.append(line)
            return
        try:
            self._lines.extend(self._frames.feed(chunk))
        except PeerError as fault:
            self._fault = fault  # the good lines before it come first

    def close(self) -> None:
        """Close this process's end only: a forked child must not end its parent's connection."""
        self._sock.close()


def dial(path: Path, hello: Hello, patience: Patience) -> tuple[Link, Welcome]:
    """Connect and be welcomed. Raises ``PeerError`` or ``CallerError``, each with a remedy."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, path, patience)
        link = Link(sock)
        link.send(hello)
        return link, _await_welcome(link, patience)
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, path: Path, patience: Patience) -> None:
    # Bounds each wait for room in the daemon's queue of new connections.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SLICE_S))
    while not _connected(sock, path):
        if not patience.tick():
            raise no_daemon(path, "it accepts no connections")


def _connected(sock: socket.socket, path: Path) -> bool:
    try:
        sock.connect(str(path))
    except BlockingIOError:
        return False
    except PermissionError as error:
        raise CallerError(
            "refused",
            f"You may not use the Kiwi daemon's socket {path}.",
            "Ask the administrator of this machine to add you to the group that owns it.",
        ) from error
    except OSError as error:
        raise no_daemon(path, error.strerror or str(error)) from error
    return True


def _await_welcome(link: Link, patience: Patience) -> Welcome:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while (message := link.peek()) is None:
        if link.fetch(wait=False):
            continue
        if not patience.tick():
            raise PeerError(
                "no-daemon",
                "The Kiwi daemon accepted the connection but does not answer.",
                "Look at its log; if it hangs, stop it and start it again.",
            )
        poll.poll(patience.slice_s() * 1000)
    link.pop()
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


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
