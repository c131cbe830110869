"""The address of a daemon: its socket, and the directory and the lock that go with it.

A directory in XDG_RUNTIME_DIR goes with its user's last login, and one in the temporary directory
may be cleaned away, while the daemon and its notebooks go on. So a daemon checks whether clients
can still find it, and makes its address again if not.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.daemon.base.directories import prepare_directory, sockets_mode
from kiwi_core.daemon.base.sockets import OneDaemonLock, listen
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.daemon.base.admission import Door

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 1.0
"""Longest extra wait of a notebook that opens meanwhile; each look is four system calls."""


@dataclass(eq=False, repr=False)
class Address:
    """Holds ``lock`` and listens at a socket with ``serve``. ``restored`` is called after the
    address was made again, and while the daemon's other files are not ``complete``: a program that
    removes a directory file by file may remove them after that. ``taken`` is called when another
    daemon has taken the address meanwhile.
    """

    _path: Path
    _lock: OneDaemonLock
    _serve: Callable[[socket.socket], Door]
    complete: Callable[[], bool]
    restored: Callable[[], None]
    taken: Callable[[], None]
    _door: Door | None = None
    _identity: tuple[int, int] | None = None
    _directory: int = -1
    _waits: bool = False
    """True while the address cannot be made again, which is logged once."""
    _look: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def open(self) -> None:
        """Listen. Raise ``CallerError`` on failure."""
        sock = listen(self._path)
        self._identity = _identity(self._path)
        # While somebody has a lock on the directory, systemd-tmpfiles spares it and its contents
        # (tmpfiles.d(5), "Age").
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        with suppress(OSError):
            self._directory = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        before, self._door = self._door, self._serve(sock)
        if before is not None:
            before.close()

    def is_awaited(self) -> bool:
        """Return whether a client has connected and is not accepted yet."""
        return self._door is not None and self._door.is_awaited()

    def close(self, *, comes_back: bool = True) -> None:
        """Stop accepting and remove the socket. ``comes_back``: this daemon is probably being
        restarted, so programs that start in the next seconds wait for it."""
        if self._closed:
            return
        self._closed = True  # before Python 3.12, wait_for can swallow the cancellation of keep
        if comes_back:
            self._lock.leave()
        if _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        if self._door is not None:
            self._door.close()

    def is_found(self) -> bool:
        """Return whether programs find this daemon now. Makes ``keep`` look at once."""
        self._look.set()
        return self._is_there()

    async def keep(self) -> None:
        """Make the address again whenever it is gone, until cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_EVERY_S)
            self._look.clear()
            if self._closed:
                continue
            if self._is_there():
                if not self.complete():
                    self.restored()
                continue
            try:
                prepare_directory(self._path.parent, sockets_mode())
                if not self._lock_again():
                    path = str(self._path)
                    log.warning("another daemon serves the GPU at this address", path=path)
                    self.taken()
                    continue
                self.open()
            except CallerError as error:
                # The runtime directory comes back with its user's next login.
                if not self._waits:
                    log.warning("the socket is gone and cannot be made again yet", why=str(error))
                self._waits = True
                continue
            self._waits = False
            log.warning("the socket was gone; made again", path=str(self._path))
            self.restored()

    def _lock_again(self) -> bool:
        if not self._lock.is_in_place():
            lock = OneDaemonLock(self._path.with_suffix(".lock"))
            if not lock.try_acquire():
                return False
            self._lock.close()
            self._lock = lock
        return True

    def _is_there(self) -> bool:
        return (
            self._identity is not None
            and _identity(self._path) == self._identity
            and self._lock.is_in_place()
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
