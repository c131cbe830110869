"""The sockets of a daemon, and the lock that allows one daemon only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import time
from typing import TYPE_CHECKING

import structlog

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.daemon.base.claim import GpuClaim

log = structlog.get_logger(__name__)

SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket, in bytes (unix(7))."""

BACKLOG = 1024
"""Connections that may wait to be accepted: after a restart all clients connect at once."""

RUNS_AFTER_S = 2.0
"""Another daemon that has the lock, and answers on its socket, for this long is not leaving."""

LOOK_EVERY_S = 0.05
"""Interval of looks while waiting for an earlier daemon to leave."""


NO_LOCKS_REMEDY = (
    "This file system has no locks (some network mounts, FUSE). Name a directory on a local one "
    "with --socket-dir or KIWI_SOCKET_DIR, such as one in /run/user or /tmp."
)


class OneDaemonLock:
    """A lock that the daemon has for its life; the file names the daemon's pid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Return false while another process holds it. Raises ``CallerError("no-lock")``."""
        try:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES) and self._fd >= 0:
                return False
            opened = self._fd >= 0
            self.close()
            raise CallerError(
                "no-lock",
                f"Cannot lock {self._path}: {error.strerror}.",
                NO_LOCKS_REMEDY
                if opened
                else "Remove it, or name another directory with --socket-dir or KIWI_SOCKET_DIR.",
            ) from error
        with contextlib.suppress(OSError):  # on a full disk the file is empty; it still locks
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        return True

    def leave(self) -> None:
        """Set the file's time: the daemon leaves now, and programs that start in the next seconds
        wait for the next one."""
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def is_in_place(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def daemon_pid(self) -> str:
        with contextlib.suppress(OSError):
            return self._path.read_text(errors="replace").strip()
        return ""


def already_running(lock: OneDaemonLock, claim: GpuClaim, socket_path: Path) -> CallerError:
    pid = claim.daemon_pid or lock.daemon_pid() or "unknown"
    elsewhere = claim.daemon_path and claim.daemon_path != str(socket_path)
    directory = os.path.dirname(claim.daemon_path) if elsewhere else ""
    return CallerError(
        "already-running",
        f"A Kiwi daemon for this GPU is already running (pid {pid}"
        + (f", its socket is {claim.daemon_path})." if elsewhere else ")."),
        f"Use it: set KIWI_SOCKET_DIR={directory}; or stop it first."
        if elsewhere
        else "Use it, or stop it first.",
    )


async def alone(
    claim: GpuClaim, lock: OneDaemonLock, socket_path: Path, stop: asyncio.Event
) -> bool:
    """Wait for an earlier daemon to leave, however long; return false if ``stop`` is set.

    Take the claim before the lock: a running daemon whose directory was removed still has its
    claim, and takes the lock in the new directory. Raises ``CallerError("already-running")`` if the
    other daemon does not leave at all.
    """
    answered_since_s: float | None = None
    while not (claim.try_take() and lock.try_acquire()):
        if stop.is_set():
            return False
        now_s = time.monotonic()
        if not (claim.daemon_path or answers(socket_path)):
            if answered_since_s is not None:
                log.info("waiting for an earlier daemon to leave")
            answered_since_s = None
        elif answered_since_s is None:
            answered_since_s = now_s
        elif now_s - answered_since_s > RUNS_AFTER_S:
            raise already_running(lock, claim, socket_path)
        await asyncio.sleep(LOOK_EVERY_S)
    return True


def answers(path: Path) -> bool:
    """Return whether a process accepts connections at the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``. The caller holds the lock: an old one is stale.

    Other users may connect only to a root daemon's socket, where credentials decide the rest; any
    other daemon cannot reach their processes.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise CallerError(
            "path-too-long",
            f"The socket's path {path} is longer than {SOCKET_PATH_MAX} bytes.",
            "Name a shorter directory with --socket-dir or KIWI_SOCKET_DIR.",
        )
    try:
        return _listening(path)
    except OSError as error:
        raise CallerError(
            "no-socket",
            f"Cannot listen at {path}: {error.strerror}.",
            "Remove what is there, or name another directory with --socket-dir or KIWI_SOCKET_DIR.",
        ) from error


def _listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        os.fchmod(sock.fileno(), 0o600)  # what bind makes has this mode from the beginning
        sock.bind(str(path))
        path.chmod(0o666 if os.getuid() == 0 else 0o600)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
