"""The claim on a GPU: one daemon per GPU and user, whatever its socket directory.

A lock file disappears with its directory, while the daemon lives on. So the claim is an abstract
Unix socket (unix(7)), which is in no file system, and which the system frees when the daemon ends.
Its name contains the PID namespace: a container may share the host's network namespace but not its
processes. Anybody can take any abstract name, so the daemon checks who listens at it.
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
"""Only starting daemons connect here."""

TAKEN_MAX: Final = 8
"""Connections answered in a row. Every local user can connect."""

PAUSE_S: Final = 0.01
"""Pause before the next ones: a program that connects in a loop takes some percent of the daemon's
time. A full queue takes eight pauses, less than a starting daemon waits."""

ASK_WITHIN_S: Final = 0.5
"""Wait for a place in the queue of the daemon that has the claim, and again for its answer. It may
be busy; then it is asked again."""

SILENT_ASKS: Final = 40
"""After this many attempts (50 ms apart) at a name at which nobody listens, the name belongs to no
daemon: a daemon listens microseconds after it has taken the name. The same holds for a queue that
stays full for this many times ``ASK_WITHIN_S``.
"""


class GpuClaim:
    """The claim of the daemon that can be reached at the socket ``path``."""

    def __init__(self, gpu_uuid: str, path: Path) -> None:
        self._name = f"\0kiwi/{os.getuid()}/{_pid_namespace()}/{gpu_uuid}"
        self._path = path
        self._socket: socket.socket | None = None
        self._answers: _Answers | None = None
        self._silent = 0
        self._given_up = False
        self.daemon_pid = 0
        self.daemon_path = ""
        """Socket of the daemon that has the claim; "" while that daemon is leaving."""

    def try_take(self) -> bool:
        """Return whether this daemon may serve the GPU; false while another one of this user
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
            # Another program has the name, or this system has no abstract sockets.
            self._given_up = True
            why = error.strerror or str(error)
            log.warning("the lock in the socket directory is the only one", why=why)
            return True
        sock.setblocking(False)
        self._socket, self.daemon_path = sock, ""
        return True

    def _is_ours(self) -> bool:
        """Ask the owner of the name. A daemon of this user checks its address, then sends it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            within = struct.pack("ll", int(ASK_WITHIN_S), int(ASK_WITHIN_S % 1 * 1_000_000))
            for timeout in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                probe.setsockopt(socket.SOL_SOCKET, timeout, within)
            # Wait for a place in a full queue: with ``settimeout``, ``connect`` would fail at once.
            try:
                probe.connect(self._name)
                # Fails if the wait was interrupted (this process was stopped or frozen meanwhile):
                # Python takes such a ``connect`` for a success.
                probe.getpeername()
            except OSError:  # its owner has just ended, or does not listen yet
                self._silent += 1
                return self._silent < SILENT_ASKS
            pid, uid = peer_of(probe)
            if uid != os.getuid():
                return False
            self._silent, self.daemon_pid = 0, pid
            with suppress(OSError):
                self.daemon_path = os.fsdecode(probe.recv(4096)).strip()
        return True

    def serve(self, asked: Callable[[], bool]) -> None:
        """Answer starting daemons. ``asked`` makes sure that this daemon can be reached, and
        returns whether it can."""
        if self._socket is not None:
            self._answers = _Answers(self._socket, os.fsencode(self._path) + b"\n", asked)

    def close(self) -> None:
        """Give up the claim: another daemon may take the GPU."""
        if self._answers is not None:
            self._answers.close()
        if self._socket is not None:
            self._socket.close()


class _Answers:
    """Answers this user's processes at ``sock``, a listening socket, with ``line``, until
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
        # no connection is left, or no descriptor: tried again after the pause
        with suppress(OSError):
            for _ in range(TAKEN_MAX):
                one, _ = self._sock.accept()
                with one, suppress(OSError):
                    one.setblocking(False)
                    if peer_of(one)[1] == os.getuid() and self._asked():
                        one.send(self._line)


def _pid_namespace() -> int:
    """Return the inode of the PID namespace; 0 if unknown. A daemon sees only processes in it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
