"""The claim on a GPU: one daemon per GPU and user, wherever its socket directory is.

A lock file is lost with its directory; the daemon lives on. So there is also an abstract Unix
socket (unix(7)), which no file system holds and the system frees when the daemon ends. Its name has
the PID namespace in it: a container may share the host's network namespace but not its processes.
Anybody can take any abstract name, so the name alone proves nothing: what counts is who listens.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.client.directory import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger(__name__)

BACKLOG: Final = 64
"""Only daemons that start ask here."""

TAKEN_MAX: Final = 8
"""Connections that are answered in a row. Every local user can connect."""

PAUSE_S: Final = 0.01
"""After that, before the next are taken: whoever connects in a loop takes some percent of the
daemon's time. A full queue takes eight pauses, less than a daemon that starts waits."""

ASK_WITHIN_S: Final = 0.5
"""For a place in the queue of the daemon that has the claim, and again for its answer; it may be
busy, then it is asked again."""

SILENT_ASKS: Final = 40
"""A name that is taken, but where nobody listens for so many looks of 50 ms, is no daemon's: one
listens microseconds after it has taken the name. Nor is one whose queue stays full for so many
times ``ASK_WITHIN_S``."""


class Claim:
    """``path`` is the socket at which this daemon can be reached."""

    def __init__(self, gpu_uuid: str, path: Path) -> None:
        self._name = f"\0kiwi/{os.getuid()}/{_pid_namespace()}/{gpu_uuid}"
        self._path = path
        self._socket: socket.socket | None = None
        self._answers: _Answers | None = None
        self._silent = 0
        self._given_up = False
        self.holder_pid = 0
        self.holder_path = ""
        """Where the daemon that has the claim can be reached; "" while it is leaving."""

    def try_take(self) -> bool:
        """Return whether this daemon may serve the GPU: false while another one of this user
        does."""
        if self._socket is not None or self._given_up:
            return True
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self._name)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and self._is_ours():
                return False
            self._go_on_without(error.strerror or str(error))
            return True
        sock.setblocking(False)
        self._socket, self.holder_path = sock, ""
        return True

    def _is_ours(self) -> bool:
        """Ask who has the name. A daemon of this user says where it is, and makes sure of it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                probe.setsockopt(socket.SOL_SOCKET, timeout, _timeval(ASK_WITHIN_S))
            # A full queue is waited for: with ``settimeout`` it would be an error at once.
            try:
                probe.connect(self._name)
            except OSError:  # its owner has just ended, or does not listen yet
                self._silent += 1
                return self._silent < SILENT_ASKS
            pid, uid = peer_of(probe)
            if uid != os.getuid():
                return False
            self._silent, self.holder_pid = 0, pid
            with suppress(OSError):
                self.holder_path = os.fsdecode(probe.recv(4096)).strip()
        return True

    def _go_on_without(self, why: str) -> None:
        """Somebody else has the name, or this system has none: the lock file has to do."""
        self._given_up = True
        log.warning("the lock in the socket directory is the only one", why=why)

    def serve(self, asked: Callable[[], bool]) -> None:
        """Answer daemons that start. ``asked`` returns whether this one can be reached, after it
        has made sure of that."""
        if self._socket is not None:
            self._answers = _Answers(self._socket, os.fsencode(self._path) + b"\n", asked)

    def close(self) -> None:
        """Give the claim up: the GPU is free for another daemon."""
        if self._answers is not None:
            self._answers.close()
        if self._socket is not None:
            self._socket.close()


class _Answers:
    """Answers this user's processes at ``sock``, which listens already, with ``line``, until
    ``close``.

    asyncio's own server takes the whole queue before anything else can happen, and calls the loop's
    exception handler when there is no descriptor left.
    """

    def __init__(self, sock: socket.socket, line: bytes, asked: Callable[[], bool]) -> None:
        self._sock, self._line, self._asked = sock, line, asked
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._open()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(PAUSE_S, self._open)
        with suppress(OSError):  # nobody is left, or no descriptor: tried again after the pause
            for _ in range(TAKEN_MAX):
                self._answer(self._sock.accept()[0])

    def _answer(self, one: socket.socket) -> None:
        with one, suppress(OSError):
            one.setblocking(False)
            if peer_of(one)[1] == os.getuid() and self._asked():
                one.send(self._line)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))


def _pid_namespace() -> int:
    """A daemon sees the processes of its own namespace only."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
