"""One connected socket that carries whole messages. No thread, no lock, no second try."""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from kiwi_core.client.directory import is_trusted, peer_of
from kiwi_core.client.patience import SLICE_S, Patience
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, PeerError, SilentDaemonError
from kiwi_core.wire.framing import FrameReader, decode_daemon, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import PROTOCOL, Error, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, DaemonMessage, Hello

BRIEFLY_S: Final = 0.005
"""How long a caller reads the socket itself before it leaves that to the client's thread: enough
for many round trips on an idle machine, and too short for a person to notice."""

_REQUEST_MAX_BYTES: Final = DEFAULTS.request_max_bytes
_CHUNK_BYTES: Final = 64 * 1024
# Plain integers, because each `|` of the enumeration's members costs a microsecond.
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

_SEND_TIMEOUT_S: Final = 5.0
"""A daemon that takes no bytes for this long counts as hung: its socket's buffer holds 1,000
messages."""


class _Outgoing:
    """The conversation up to the latest message to send, whose bytes are ``data``. One assignment
    replaces it with the next one, so a message is either in it or not."""

    __slots__ = ("conversation", "data", "last_request", "sent")

    def __init__(self, conversation: Conversation, data: bytes, last_request: int) -> None:
        self.conversation = conversation
        self.data = data
        self.last_request = last_request
        self.sent: list[int] = []
        """Number of bytes that each call of ``send`` took."""


class _Incoming:
    """What has arrived: ``chunks``, and the messages decoded from earlier chunks. One assignment
    replaces it with the next one, so chunks are either decoded or not."""

    __slots__ = ("chunks", "fault", "frames", "messages")

    def __init__(self, frames: FrameReader) -> None:
        self.chunks: list[bytes] = []
        self.messages: deque[DaemonMessage] = deque()
        self.fault: PeerError | None = None
        """The fault behind the last message; nothing can follow it."""
        self.frames = frames

    def decoded(self) -> _Incoming:
        """Decode the chunks into the next ``_Incoming``. All ``messages`` of this one are taken."""
        data = b"".join(self.chunks)
        if (line := self.frames.only_line(data)) is not None:  # nearly always
            incoming = _Incoming(self.frames)
            incoming._decode((line,))
        else:
            incoming = _Incoming(self.frames.copy())
            incoming._decode(incoming.frames.feed(data))
        return incoming

    def _decode(self, lines: Iterable[bytes]) -> None:
        try:
            for line in lines:
                self.messages.append(decode_daemon(line))
        except PeerError as fault:
            self.fault = fault


class DaemonSocket:
    """A stream socket to a daemon.

    A ``KeyboardInterrupt`` may come in the main thread between any two steps. The next call
    finishes what it cut short: ``flush`` sends the rest of a message first, and ``messages`` has
    what was fetched but not taken.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.fileno: Callable[[], int] = sock.fileno
        """Returns -1 once it is closed."""
        self._outgoing = _Outgoing(Conversation(), b"", 0)
        self._incoming = _Incoming(FrameReader(DEFAULTS.frame_max_bytes))
        # One system call waits a moment and reads: this is the fast path.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(BRIEFLY_S))

    @property
    def conversation(self) -> Conversation:
        """The state of the conversation, which says which message may come next. Only the link
        changes it.
        """
        return self._outgoing.conversation

    @property
    def last_request(self) -> int:
        """The number of the last request that was sent."""
        return self._outgoing.last_request

    def send(self, message: ClientMessage, request: int = 0) -> None:
        """Send ``message``; ``request`` is its number if it is a request.

        Raises ``CallerError`` if ``message`` may not be sent now (nothing is sent), and
        ``PeerError`` "disconnected" if the daemon is gone or takes nothing.
        """
        self.flush()
        data = encode(message, _REQUEST_MAX_BYTES)
        before = self._outgoing
        conversation = before.conversation.copy()
        try:
            conversation.accept(message)
        except PeerError as error:
            raise CallerError(error.code, error.message, error.remedy) from None
        self._outgoing = _Outgoing(conversation, data, request or before.last_request)
        self.flush()

    def flush(self) -> None:
        """Send the rest of the latest message. Raises ``PeerError`` "disconnected"."""
        outgoing = self._outgoing
        if sum(outgoing.sent) == len(outgoing.data):
            return
        try:
            if not self._send_some(outgoing):
                self._send_rest(outgoing)
        except OSError as error:
            raise disconnected(str(error)) from error

    def _send_rest(self, outgoing: _Outgoing) -> None:
        patience = Patience(_SEND_TIMEOUT_S)
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while not self._send_some(outgoing):
            if not patience.tick():
                raise TimeoutError("the daemon does not read")
            poll.poll(SLICE_S * 1000)

    def _send_some(self, outgoing: _Outgoing) -> bool:
        """Send without blocking; true if the whole message is sent now."""
        rest = outgoing.data[sum(outgoing.sent) :]
        try:
            # map + extend: no bytecode runs between sending and recording it, so that an interrupt
            # cannot cause a part to be sent twice.
            outgoing.sent.extend(map(self._sock.send, (rest,), (_SEND_FLAGS,)))
        except BlockingIOError:
            return False
        return outgoing.sent[-1] == len(rest)

    def fetch(self, *, wait: bool) -> bool:
        """Read what has arrived, with ``wait`` for up to ``BRIEFLY_S``; false if nothing came.

        Raises ``PeerError`` "disconnected" at the end of the stream.
        """
        flags = 0 if wait else _AT_ONCE
        try:
            # As in _send_some: no interrupt can lose what the kernel has handed out.
            self._incoming.chunks.extend(map(self._sock.recv, (_CHUNK_BYTES,), (flags,)))
        except BlockingIOError:
            return False
        except OSError as error:
            raise disconnected(str(error)) from error
        if not self._incoming.chunks[-1]:
            raise disconnected("it closed the connection")
        return True

    def messages(self) -> deque[DaemonMessage]:
        """Return the fetched messages. The caller takes the oldest, if there is one, and calls
        again. Raises ``PeerError`` for garbage, after the good messages before it.
        """
        incoming = self._incoming
        if not incoming.messages and incoming.fault is None and incoming.chunks:
            self._incoming = incoming = incoming.decoded()
        if not incoming.messages and incoming.fault is not None:
            raise incoming.fault
        return incoming.messages

    def drained(self) -> bool:
        """Return whether ``messages`` would have nothing, neither a message nor a fault."""
        incoming = self._incoming
        return not incoming.messages and not incoming.chunks and incoming.fault is None

    def close(self) -> None:
        """Close this process's end only: a forked child must not end its parent's connection."""
        self._sock.close()


def dial(path: Path, hello: Hello, patience: Patience) -> tuple[DaemonSocket, Welcome]:
    """Connect and wait for the welcome. Raises ``PeerError`` (``SilentDaemonError`` at the end of
    ``patience``) or ``CallerError`` with a remedy."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, path, patience)
        _check_peer(sock, path)
        link = DaemonSocket(sock)
        return link, welcomed(link, path, hello, patience)
    except BaseException as error:
        sock.close()
        if isinstance(error, PeerError) and error.code == "disconnected":
            # The daemon was ending. The caller may start another one, as if none had answered.
            raise no_daemon(path, "it closed the connection at once") from error
        raise


def welcomed(link: DaemonSocket, path: Path, hello: Hello, patience: Patience) -> Welcome:
    """Send ``hello`` and wait for the answer. A daemon that refuses this process sends the reason
    and closes, perhaps before the hello is sent. The reason can still be read then.
    """
    try:
        link.send(hello)
    except PeerError as error:
        if error.code != "disconnected" or not link.fetch(wait=False):
            raise
    return _await_welcome(link, path, patience)


def _connect(sock: socket.socket, path: Path, patience: Patience) -> None:
    # This limits each wait for room in the daemon's queue of new connections.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SLICE_S))
    while not _connected(sock, path):
        if not patience.tick():
            raise SilentDaemonError(path, "accepts no connections")


def _connected(sock: socket.socket, path: Path) -> bool:
    try:
        sock.connect(str(path))
        # Fails if a signal cut the wait short, or a freeze: Python takes such a ``connect`` for a
        # success.
        sock.getpeername()
    except BlockingIOError:
        return False
    except PermissionError as error:
        raise CallerError(
            "refused",
            f"You may not use the Kiwi daemon's socket {path}.",
            "Ask the administrator of this machine to add you to the group that owns it.",
        ) from error
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return False
        raise no_daemon(path, error.strerror or str(error)) from error
    return True


def _check_peer(sock: socket.socket, path: Path) -> None:
    """Refuse another user's daemon at ``path``: its welcome would say which libraries to load."""
    _, uid = peer_of(sock)
    if not is_trusted(uid, path.parent):
        raise PeerError(
            "not-trusted",
            f"What answers at {path} belongs to another user (number {uid}), and is not trusted.",
            "Name a directory of your own in KIWI_SOCKET_DIR, or ask who administers this machine"
            " to start the daemon.",
        )


def _await_welcome(link: DaemonSocket, path: Path, patience: Patience) -> Welcome:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while not (messages := link.messages()):
        if link.fetch(wait=False):
            continue
        if not patience.tick():
            raise SilentDaemonError(path, "does not answer")
        poll.poll(patience.slice_s() * 1000)
    message = messages.popleft()
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
