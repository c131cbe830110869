"""One connection: bytes to legal messages, messages to bytes, and a limit on both.

It never trusts its peer. A frame that is too long, malformed or out of turn gets an ``error`` and
ends the connection; a peer that does not read what it is sent is dropped. ``message_turns``
decides when its messages are handled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

import structlog

from kiwi_core.daemon.base.peers import Peer, peer_of
from kiwi_core.errors import NO_MORE, CallerError, GpuError, KiwiError, PeerError
from kiwi_core.peer_limits import INBOX_BYTES, OUTBOX_BYTES, UNHANDLED_LINE_BYTES
from kiwi_core.units import KIB, NS_PER_S
from kiwi_core.wire.framing import FrameReader, decode_client, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import Error

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

    from kiwi_core.config import Config
    from kiwi_core.daemon.base.message_turns import MessageTurns
    from kiwi_core.wire.messages import ClientMessage, DaemonMessage

    Handlers = Mapping[type[ClientMessage], Callable[["Connection", Any], None]]
    """What handles a message of each type."""

log = structlog.get_logger(__name__)


class Receiver(Protocol):
    """The recipient of a connection's messages. Errors from ``received`` are answered (see
    ``_attempt``).
    """

    def connected(self, connection: Connection) -> None: ...
    def received(self, connection: Connection, message: ClientMessage) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...
    def turned_away(self, code: str) -> None: ...


FLUSH_WITHIN_S: Final = 5.0
"""Time for a closing connection to flush its last messages."""

UNREAD_BYTES: Final = 16 * KIB
"""If more bytes of answers than this wait beside those in the kernel's socket buffer, the daemon
does not read from the peer until the peer reads. Enough for some hundred ordinary answers. The peer
is dropped at ``Config.outbox_max_bytes``."""

_SHORT: Final = PeerError(
    "too-many-connections",
    "The daemon is short of descriptors or memory.",
    "Kiwi tries again by itself.",
)
"""Clients take this for a full daemon: they wait, and do not run without one."""

_TOO_MUCH: Final = PeerError(
    "too-much-unread",
    "Your programs have sent this daemon more than it may hold for you.",
    "Wait for answers before you ask more.",
)


class Connection(asyncio.Protocol):
    """A peer's connection. ``peer`` is known from ``connection_made`` on."""

    def __init__(self, receiver: Receiver, config: Config, turns: MessageTurns) -> None:
        self._receiver = receiver
        self._config = config
        self._turns = turns
        self._reader = FrameReader(config.request_max_bytes)
        self._conversation = Conversation()
        self._transport: asyncio.Transport | None = None
        self._accepted = False
        self.choked = False
        """True while the peer does not read; further messages are queued."""
        self._unread = b""
        """Received bytes that are not cut into lines yet. At most what one read brings, since
        reading stops meanwhile."""
        self._lines: deque[bytes | PeerError] = deque()
        """Received lines that are not handled yet; an error follows the good lines before it."""
        self._in_line = False
        """True while it waits for its turn, or sleeps until it may have one."""
        self._inbox = _Held(turns, INBOX_BYTES)
        self._outbox = _Held(turns, OUTBOX_BYTES)
        self._silence: asyncio.TimerHandle | None = None
        self.peer = Peer(0, -1, -1)
        self.watching = False

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES)
        sock = cast("socket.socket", transport.get_extra_info("socket"))
        try:
            self.peer = peer_of(sock)
            self.account = self._turns.account(self.peer.uid)
            self.bucket = self._turns.bucket()
            self._receiver.connected(self)
        except KiwiError as error:
            self.end_with(error)
        except OSError:
            self.abort()
        else:
            self._accepted = True
            self._listen_for_hello()

    def data_received(self, data: bytes) -> None:
        if self._in_line or self.choked:
            self._unread += data
            return
        line = self._reader.only_line(data)
        if line is not None:  # the usual case
            self._lines.append(line)
        else:
            self._unread += data
        now_ns = time.monotonic_ns()
        while self.ready() and self._turns.now(self, now_ns):  # the client waits
            began_cpu_ns = time.thread_time_ns()
            self.handle_next()
            now_ns = self._turns.paid(self, now_ns, began_cpu_ns)
        if self._lines or self._unread or self._reader.held_bytes:
            self._await_message_turn(len(data))

    def pause_writing(self) -> None:
        """Read nothing more from the peer until it has read its answers."""
        self.choked = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.choked = False
        self._outbox.now(self.peer.uid, 0)
        self._await_message_turn(len(self._unread))

    # --- its turn (see ``message_turns.Talker``) ------------------------------------------------

    def _await_message_turn(self, unread_bytes: int) -> None:
        if self._in_line or self.closed or self.choked:
            return
        assert self._transport is not None
        self._transport.pause_reading()
        held_bytes = unread_bytes + self._reader.held_bytes
        if not self._inbox.now(self.peer.uid, held_bytes):
            self.end_with(_TOO_MUCH)
            return
        self._in_line = True
        self._turns.add(self)

    def ready(self) -> bool:
        if self.choked or self.closed:
            return False
        while self._unread and not self._lines:
            some = self._unread[:UNHANDLED_LINE_BYTES]
            self._unread = self._unread[UNHANDLED_LINE_BYTES:]
            try:
                self._lines.extend(self._reader.feed(some))
            except PeerError as error:
                self._lines.append(error)  # after the good lines before it
        return bool(self._lines)

    def handle_next(self) -> None:
        self._attempt(self._lines.popleft())

    def caught_up(self) -> None:
        self._in_line = False
        if self.choked or self.closed:
            return  # the rest is handled once it has read its answers, or never
        self._inbox.now(self.peer.uid, self._reader.held_bytes)
        assert self._transport is not None
        self._transport.resume_reading()

    def _attempt(self, line: bytes | PeerError) -> None:
        """Handle ``line``; a failure ends this connection and does not affect others."""
        try:
            if isinstance(line, PeerError):
                raise line
            message = decode_client(line)
            try:
                self._conversation.accept(message)
                if self._silence is not None:
                    self._stop_hello_timer()
                self._receiver.received(self, message)
            except CallerError as error:
                self.send(Error.of(error))
        except PeerError as error:
            log.info("peer broke the protocol", code=error.code, pid=self.peer.pid)
            self.end_with(error)
        except Exception as error:
            # A fault that one client causes must not cost the others their daemon.
            # Short of descriptors or memory at the moment?
            short = isinstance(error, OSError) and error.errno in NO_MORE
            if short or (isinstance(error, GpuError) and error.code == "process-unreadable"):
                log.error("message refused in a shortage", why=str(error), pid=self.peer.pid)
                self.end_with(_SHORT)
                return
            log.exception("message not handled", pid=self.peer.pid)
            self.end_with(PeerError("internal", "The daemon failed on this message."))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._stop_hello_timer()
        self._unread = b""
        self._lines.clear()
        self._inbox.now(self.peer.uid, 0)
        self._outbox.now(self.peer.uid, 0)
        if self._accepted:
            self._accepted = False
            self._receiver.disconnected(self)

    # --- for the receiver -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, message: DaemonMessage) -> None:
        """Queue ``message``. A peer that leaves more than ``outbox_max_bytes`` unread is dropped,
        and so is one whose user leaves more than a share of ``OUTBOX_BYTES`` unread."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Like ``send``, for a message that many peers get."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(line)
        if self.choked:
            held_bytes = transport.get_write_buffer_size()
            within = held_bytes <= self._config.outbox_max_bytes
            if not within or not self._outbox.now(self.peer.uid, held_bytes):
                log.warning("peer does not read; dropped", pid=self.peer.pid)
                self.abort()

    def close(self) -> None:
        """End the connection once the queue is sent, at most ``FLUSH_WITHIN_S`` from now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_WITHIN_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- inside ---------------------------------------------------------------------------------

    def _listen_for_hello(self) -> None:
        def timed_out() -> None:
            if self._in_line:  # it has sent a message, whose turn has not come
                self._listen_for_hello()
            else:
                self.end_with(PeerError("silent", "No hello came on this connection."))

        within_s = self._config.hello_within_ns / NS_PER_S
        self._silence = asyncio.get_running_loop().call_later(within_s, timed_out)

    def _stop_hello_timer(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def end_with(self, error: KiwiError) -> None:
        self._receiver.turned_away(error.code)
        self.send(Error.of(error, fatal=True))
        self.close()


class _Held:
    """The bytes of one connection that count against its user's share."""

    __slots__ = ("_bytes", "_share")

    def __init__(self, turns: MessageTurns, name: str) -> None:
        self._share = turns.shares[name]
        self._bytes = 0

    def now(self, uid: int, held_bytes: int) -> bool:
        """Set the bytes held. Return false if they exceed the user's share: they then count as 0,
        and the caller ends the connection."""
        if held_bytes == self._bytes:
            return True
        self._share.give_back(uid, self._bytes)
        may = held_bytes < self._bytes or self._share.may(uid, held_bytes)
        self._bytes = held_bytes if may else 0
        self._share.take(uid, self._bytes)
        return may
