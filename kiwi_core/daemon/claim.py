"""The claim on a GPU: one daemon per GPU and user, wherever its socket directory is.

A lock file goes with its directory, which ends with a login or an over-zealous cleaner of temporary
files; the daemon does not. So beside it there is a name that no file system holds: an abstract Unix
socket (unix(7)), which the system frees when the daemon ends. Abstract names belong to a network
namespace. A container with one of its own is a world of its own to a daemon, too; one that shares
the host's but not its processes is told apart by the PID namespace in the name.

Anybody can take any abstract name. So the name alone proves nothing: what counts is who listens.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

import structlog

from kiwi_core.client.directory import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger(__name__)

BACKLOG: Final = 64
"""Only daemons that start ask here."""

ASK_WITHIN_S: Final = 0.5
"""For the daemon that has the claim to say where it is; it may be busy, then it is asked again."""

SILENT_ASKS: Final = 40
"""A name that is taken, but where nobody listens for so many looks of 50 ms, is no daemon's: one
listens microseconds after it has taken the name."""


class Claim:
    """``path`` is the socket at which this daemon can be reached."""

    def __init__(self, gpu_uuid: str, path: Path) -> None:
        self._name = f"\0kiwi/{os.getuid()}/{_pid_namespace()}/{gpu_uuid}"
        self._path = path
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
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
            probe.settimeout(ASK_WITHIN_S)
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

    async def serve(self, asked: Callable[[], bool]) -> None:
        """Answer daemons that start. ``asked`` returns whether this one can be reached, after it
        has made sure of that."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Answer(self._path, asked), sock=self._socket, backlog=BACKLOG
        )

    def close(self) -> None:
        """Give the claim up: the GPU is free for another daemon."""
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()


class _Answer(asyncio.Protocol):
    def __init__(self, path: Path, asked: Callable[[], bool]) -> None:
        self._path, self._asked = path, asked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        with suppress(OSError):
            _, uid = peer_of(cast("socket.socket", stream.get_extra_info("socket")))
            if uid == os.getuid() and self._asked():
                stream.write(os.fsencode(self._path) + b"\n")
        stream.close()


def _pid_namespace() -> int:
    """A daemon sees the processes of its own namespace only."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
