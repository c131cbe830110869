"""Files and directories of a daemon: who owns them, who else may look, and only one daemon each."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from pathlib import Path

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path that the kernel takes (unix(7))."""


def prepare_directory(path: Path) -> None:
    """Creates ``path`` private to us, or checks the one that is there.

    Raises ``CallerError("unsafe-directory")`` if somebody else could have put sockets there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise CallerError(
            "no-directory",
            f"Cannot create {path}: {error.strerror}.",
            "Name another directory with --socket-dir or KIWI_SOCKET_DIR.",
        ) from error
    if not stat.S_ISDIR(info.st_mode):
        raise CallerError("unsafe-directory", f"{path} is not a directory (or is a link).")
    if info.st_uid not in (0, os.getuid()):
        raise CallerError("unsafe-directory", f"{path} belongs to another user.")
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise CallerError(
            "unsafe-directory", f"Everybody may write to {path}.", f"Run: chmod o-w {path}"
        )


class OneDaemonLock:
    """Held for the daemon's life; the file says who holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self, patience_s: float) -> None:
        """Raises ``CallerError("already-running")`` if another one still has it after
        ``patience_s`` (a daemon that was orphaned needs a moment to leave)."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        ends_at = time.monotonic() + patience_s
        while not self._try():
            if time.monotonic() > ends_at:
                holder = self._path.read_text().strip() or "unknown"
                raise CallerError(
                    "already-running",
                    f"A Kiwi daemon for this GPU is already running (pid {holder}).",
                    "Use it, or stop it first.",
                )
            time.sleep(0.05)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``; the caller holds the lock, so one that is there is stale.

    Others may connect only to a root daemon's: another user's processes are out of reach for any
    other, and credentials decide the rest.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise CallerError(
            "path-too-long",
            f"The socket's path {path} is longer than {SOCKET_PATH_MAX} bytes.",
            "Name a shorter directory with --socket-dir or KIWI_SOCKET_DIR.",
        )
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o666 if os.getuid() == 0 else 0o600)
    sock.listen(1024)
    sock.setblocking(False)
    return sock
