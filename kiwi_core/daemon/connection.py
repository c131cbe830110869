"""One connection: bytes to legal messages, messages to bytes, and a limit on both.

Never trusts its peer: a frame that is too long, malformed or out of turn gets an ``error`` and the
end of the connection; one that does not read what it is sent is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from kiwi_core.daemon.peers import Peer, peer_of
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.units import NS_PER_S
from kiwi_core.wire.framing import FrameReader, decode_client, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import Error

if TYPE_CHECKING:
    import socket

    from kiwi_core.config import Config
    from kiwi_core.wire.messages import ClientMessage, DaemonMessage

log = structlog.get_logger(__name__)


class Receiver(Protocol):
    """What a connection reports to. ``received`` may raise a ``KiwiError``: it is answered."""

    def connected(self, connection: Connection) -> None: ...
    def received(self, connection: Connection, message: ClientMessage) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...
    def turned_away(self, code: str) -> None: ...


FLUSH_WITHIN_S = 5.0
"""A connection that is being closed gets its last words across in this time, or never."""


class Connection(asyncio.Protocol):
    """``peer`` is known from the first moment; ``session`` is set by the receiver."""

    def __init__(self, receiver: Receiver, config: Config) -> None:
        self._receiver = receiver
        self._config = config
        self._reader = FrameReader(config.request_max_bytes)
        self._conversation = Conversation()
        self._transport: asyncio.Transport | None = None
        self._accepted = False
        self._choked = False
        self._lines: deque[bytes | PeerError] = deque()
        """Come, and not taken yet; at most what one read brings, since reading stops meanwhile."""
        self._silence: asyncio.TimerHandle | None = None
        self.peer = Peer(0, -1, -1)
        self.watching = False

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = cast("socket.socket", transport.get_extra_info("socket"))
        try:
            self.peer = peer_of(sock)
            self._receiver.connected(self)
        except KiwiError as error:
            self.end_with(error)
        except OSError:
            self.abort()
        else:
            self._accepted = True
            within_s = self._config.hello_within_ns / NS_PER_S
            self._silence = asyncio.get_running_loop().call_later(within_s, self._never_spoke)

    def data_received(self, data: bytes) -> None:
        line = None if self._lines or self._choked else self._reader.only_line(data)
        if line is not None:  # as nearly always: spare the waiter the rest
            self._attempt(line)
            return
        try:
            self._lines.extend(self._reader.feed(data))
        except PeerError as error:
            self._lines.append(error)  # after the good lines before it
        self._work()

    def pause_writing(self) -> None:
        """Its answers pile up: take nothing more from it until it has read them."""
        self._choked = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._choked = False
        asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Takes the lines that have come, as long as the answers are read."""
        while self._lines and not self._choked and not self.closed:
            self._attempt(self._lines.popleft())
        if not self._choked and self._transport is not None and not self.closed:
            self._transport.resume_reading()

    def _attempt(self, line: bytes | PeerError) -> None:
        """Takes ``line``; what it leads to, the others do not notice."""
        try:
            if isinstance(line, PeerError):
                raise line
            self._take(line)
        except PeerError as error:
            log.info("peer broke the protocol", code=error.code, pid=self.peer.pid)
            self.end_with(error)
        except Exception:
            # Whatever one client makes us stumble over must not cost the others their daemon.
            log.exception("message not handled", pid=self.peer.pid)
            self.end_with(PeerError("internal", "The daemon failed on this message."))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._heard()
        if self._accepted:
            self._accepted = False
            self._receiver.disconnected(self)

    # --- for the receiver -----------------------------------------------------------------------

    @property
    def choked(self) -> bool:
        """It has not read what it was sent; what is sent now only waits with the rest."""
        return self._choked

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, message: DaemonMessage) -> None:
        """Queues ``message``; a peer that has not read ``outbox_max_bytes`` is dropped."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Like ``send``, for a message that many get."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(line)
        if transport.get_write_buffer_size() > self._config.outbox_max_bytes:
            log.warning("peer does not read; dropped", pid=self.peer.pid)
            self.abort()

    def close(self) -> None:
        """Ends the connection once everything queued was sent, or soon if that is never."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_WITHIN_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- inside ---------------------------------------------------------------------------------

    def _never_spoke(self) -> None:
        self.end_with(PeerError("silent", "No hello came on this connection."))

    def _heard(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _take(self, line: bytes) -> None:
        message = decode_client(line)
        try:
            self._conversation.says(message)
            if self._silence is not None:
                self._heard()
            self._receiver.received(self, message)
        except CallerError as error:
            self.send(Error(code=error.code, message=error.message, remedy=error.remedy))

    def end_with(self, error: KiwiError) -> None:
        self._receiver.turned_away(error.code)
        self.send(Error(code=error.code, message=error.message, remedy=error.remedy, fatal=True))
        self.close()
