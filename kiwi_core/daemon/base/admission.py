"""The accept loop, and the limits on connections that it enforces.

asyncio's own accept loop takes a whole backlog (1,024 connections) at a time and makes a transport
for each before anything else can happen. This one takes a few in a row, asks the kernel who
connected, and at once closes those over their user's share. That costs some ten microseconds, so
that a program that connects in a loop delays nobody.
"""

from __future__ import annotations

import asyncio
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.daemon.base.peers import peer_of
from kiwi_core.errors import NO_MORE, PeerError
from kiwi_core.peer_limits import ARRIVALS, CONNECTIONS, SILENT
from kiwi_core.units import NS_PER_MS
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import Error

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.message_turns import MessageTurns
    from kiwi_core.daemon.base.peers import Peer
    from kiwi_core.daemon.base.shares import Shares

log = structlog.get_logger(__name__)

ACCEPT_NS: Final = 1 * NS_PER_MS
"""Time for new connections before the loop serves the existing ones."""

TAKEN_MAX: Final = 8
"""New connections taken (and not closed at once) in a row; each costs about 200 µs more."""

SHORT_PAUSE_S: Final = 1.0
"""Pause after an accept failed for lack of descriptors or memory."""

FLOOD_PAUSE_S: Final = 0.003
"""Pause after a batch in which every connection was refused: some program connects in a loop. Its
connections then wait in the kernel, and take a quarter of the daemon's time; a newcomer behind a
full queue of a thousand waits for some 50 ms.
"""

OLD_NS: Final = 1000 * NS_PER_MS
"""A connection that has been silent this long makes way for a newer one of the same user."""


class Admission:
    """Counts the connections of each user. Call ``enter`` first, then ``connected``, ``greeted``
    once the hello has come, and ``left`` at the end."""

    def __init__(self, shares: Shares, turns: MessageTurns) -> None:
        self._shares = shares
        self._turns = turns
        self._silent: dict[int, dict[Connection, int]] = {}
        """For each user, the connections, oldest first, with the time of their arrival."""

    def enter(self, peer: Peer) -> None:
        """Raise ``PeerError("too-many-connections")`` if ``peer`` may not connect."""
        now_ns, arrived_ns = clock.now_ns(), time.monotonic_ns()  # rates are on the latter
        account = self._turns.account(peer.uid)
        if account.arrivals.empty_ns(arrived_ns):
            self._shares[ARRIVALS].refused += 1
            raise _full("You have opened too many connections to this daemon in a short time.")
        if not self._shares[CONNECTIONS].may(peer.uid):
            raise _full("You have as many connections to this daemon as you may have.")
        if not self._shares[SILENT].may(peer.uid) and not self._replace_oldest(peer.uid, now_ns):
            raise _full("Too many of your connections to this daemon have not said anything yet.")
        account.arrivals.spend(1, arrived_ns)
        account.connections += 1
        self._shares[CONNECTIONS].take(peer.uid)
        self._shares[SILENT].take(peer.uid)

    def connected(self, connection: Connection) -> None:
        self._silent.setdefault(connection.peer.uid, {})[connection] = clock.now_ns()

    def left(self, connection: Connection) -> None:
        self.greeted(connection)
        self.undo(connection.peer)

    def undo(self, peer: Peer) -> None:
        """Undo ``enter``."""
        self._turns.account(peer.uid).connections -= 1
        self._shares[CONNECTIONS].give_back(peer.uid)

    def never_connected(self, peer: Peer) -> None:
        self._shares[SILENT].give_back(peer.uid)
        self.undo(peer)

    def greeted(self, connection: Connection) -> None:
        uid = connection.peer.uid
        crowd = self._silent.get(uid, {})
        if crowd.pop(connection, None) is not None:
            self._shares[SILENT].give_back(uid)
        if not crowd:
            self._silent.pop(uid, None)

    def _replace_oldest(self, uid: int, now_ns: int) -> bool:
        for oldest, since_ns in self._silent.get(uid, {}).items():
            if now_ns - since_ns < OLD_NS:
                return False
            self.greeted(oldest)
            oldest.end_with(
                PeerError("silent", "No hello came; a newer connection takes the place.")
            )
            return True
        return False


class Door:
    """Accepts connections at ``sock``, which listens already, until ``close``."""

    def __init__(
        self, sock: socket.socket, admission: Admission, connection: Callable[[], Connection]
    ) -> None:
        self._sock = sock
        self._admission = admission
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._open()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def is_awaited(self) -> bool:
        """Return whether a client has connected and is not accepted yet."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0) or self._tasks)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        ends_ns = clock.now_ns() + ACCEPT_NS
        taken = 0
        while taken < TAKEN_MAX:
            if clock.now_ns() >= ends_ns:
                if not taken:
                    self._pause_for(FLOOD_PAUSE_S)
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_MORE:
                    raise
                log.error("no new connection taken", why=error.strerror)
                self._pause_for(SHORT_PAUSE_S)
                return
            taken += self._let_in(sock)

    def _pause_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(seconds, self._open)

    def _let_in(self, sock: socket.socket) -> bool:
        try:
            sock.setblocking(False)
            peer = peer_of(sock)
            self._admission.enter(peer)
        except PeerError as error:
            line = _LINES.get(error.message)
            if line is None:
                line = _LINES[error.message] = encode(Error.of(error, fatal=True))
            with suppress(OSError):
                sock.send(line)
            sock.close()
            return False
        except OSError:
            sock.close()
            return False
        task = self._loop.create_task(self._connect(sock, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _connect(self, sock: socket.socket, peer: Peer) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connection, sock)
        except OSError as error:
            log.error("connection not taken", why=error.strerror)
            sock.close()
            self._admission.never_connected(peer)


def _full(message: str) -> PeerError:
    return PeerError(
        "too-many-connections",
        message,
        "Close programs and notebooks that are no longer needed. Kiwi tries again by itself.",
    )


_LINES: Final[dict[str, bytes]] = {}
"""Encoded refusals by message, cached because they are sent often."""
