"""The life of a keeper: answers daemons, and ends with the program that it is for.

One thread for each connection, a few at most. Without anything out and without a word from a daemon
for long, it ends, too: then nobody needs it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError, PeerError
from kiwi_core.pager.keeper import messages
from kiwi_core.pager.keeper.messages import Aim, End, Failed, In, Look, Out, Reserve, Trim

if TYPE_CHECKING:
    from kiwi_core.pager.keeper.messages import Reply, Request
    from kiwi_core.pager.keeper.mover import Mover
    from kiwi_core.pager.keeper.record import Place

CONNECTIONS_MAX: Final = 16
"""A daemon and the one before it have a thread for each operation; nobody else may connect."""

REQUEST_WITHIN_S: Final = 5.0
"""For whoever connects to say what it wants: an idle connection holds a place for nothing."""

SILENCE_S: Final = 120.0
"""A daemon that lives says a word every few seconds."""

_POLL_MS: Final = 1000
_CREDENTIALS: Final = struct.Struct("3i")


class Server:
    def __init__(self, place: Place, mover: Mover, *, silence_s: float = SILENCE_S) -> None:
        self._place = place
        self._mover = mover
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._told_to_end = False
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def serve(self, listener: socket.socket, pidfd: int) -> None:
        """Until the program ends, or nobody needs it; does not return."""
        threading.Thread(target=self._mover.work_in_background, daemon=True).start()
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(_POLL_MS)]
            if pidfd in ready:
                self._end()
            if self._told_to_end or time.monotonic() - self._heard_s > self._silence_s:
                self._end_if_idle()
            if listener.fileno() in ready:
                self._accept(listener)

    def told_to_end(self) -> None:
        """By a signal: what it keeps is not its own, so it ends only if it keeps nothing."""
        self._told_to_end = True

    def _end(self) -> None:
        """At once, whatever is under way: the program is gone, or nothing is out."""
        self._place.leave()
        os._exit(0)

    def _end_if_idle(self) -> None:
        self._told_to_end = False
        if self._mover.idle and self._mover.close():
            self._end()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if not _may_speak(connection) or not self._room.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
        except RuntimeError:  # too many threads just now: what it keeps must outlive that
            self._room.release()
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(REQUEST_WITHIN_S)
                while (request := messages.receive_request(connection)) is not None:
                    self._heard_s = time.monotonic()
                    messages.send(connection, self._answer(request))
                    if isinstance(request, End):
                        self._end_if_idle()
        except (PeerError, OSError):
            pass  # it speaks no more; what it asked for is done all the same
        finally:
            self._room.release()

    def _answer(self, request: Request) -> Reply:
        try:
            return self._done(request) or self._mover.state()
        except GpuError as error:
            return Failed(error.code, error.message, error.remedy, error.driver_code)

    def _done(self, request: Request) -> Failed | None:
        if isinstance(request, Out):
            return self._mover.out()
        if isinstance(request, In):
            return self._mover.bring_in()
        if isinstance(request, Aim):
            self._mover.aim(request.size_bytes)
        elif isinstance(request, Reserve):
            self._mover.reserve(request.size_bytes)
        elif isinstance(request, Trim):
            self._mover.trim()
        else:
            assert isinstance(request, Look | End)
        return None


def _may_speak(connection: socket.socket) -> bool:
    """Only this user, and root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (0, os.getuid())
