"""Checks of the socket directory and its owner. Whoever can put a socket there can pose as a
daemon, and a daemon says which libraries a program loads.

``native/src/link/place.c`` has the same rules.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kiwi_core.client.handed_in import trusted_uids
from kiwi_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that do not follow a link: everybody may put one into the temporary directory."""

STOPPED_NAME: Final = "stopped"
"""File that ``kiwi stop`` leaves in the socket directory, so that no daemon starts by itself."""

LEFT_SUFFIX: Final = ".left"
"""Of a file beside the socket of a daemon that has ended: a line for each program whose memory it
could not bring back. Its successor removes the file."""

ASK_ADMIN: Final = "Ask who administers this machine to start it (`systemctl start kiwi`)."

_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
LEFT_LATELY_S: Final = 60.0
"""A daemon that ended less than this ago is probably being restarted."""

Signs = frozenset[tuple[str, int, int]]
"""Name, inode and time of files."""

_UCRED: Final = struct.Struct("3i")


def is_trusted(uid: int, path: Path) -> bool:
    """Return whether this process may trust user ``uid`` who answers in the directory ``path``."""
    return uid in (0, os.getuid()) or uid in _trusted_in(path)


def _trusted_in(path: Path) -> frozenset[int]:
    try:
        with opened(path) as directory:
            return trusted_uids(directory)
    except OSError:
        return frozenset((0, os.getuid()))


def why_unsafe(path: Path) -> str:
    """Return how others could put sockets into the directory ``path``; "" if they cannot. Raises
    ``OSError`` if it is missing."""
    return _why_unsafe(os.lstat(path), _trusted_in(path))


def _why_unsafe(found: os.stat_result, trusted: frozenset[int]) -> str:
    """Return how others could put sockets into the directory of ``found``; "" if they cannot.

    The sticky bit of /tmp does not help: others cannot remove a socket, but can create one of that
    name before the daemon does.
    """
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory (a link is not followed)"
    if found.st_uid not in trusted:
        return "belongs to another user"
    if found.st_mode & _WRITABLE:
        return "can be written by others"
    return ""


def may_start_in(path: Path) -> bool:
    """Return whether this user may start a daemon in ``path``: root's directory is for root's
    daemon."""
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return True


def why_stopped(path: Path) -> PeerError | None:
    """Return the error for whoever looks for a daemon where ``kiwi stop`` has ended it."""
    if not os.path.exists(path / STOPPED_NAME):
        return None
    return PeerError(
        "no-daemon",
        f"Kiwi was stopped with `kiwi stop` (in {path}): nobody shares the GPU out.",
        "Start it with `kiwi daemon`, or let notebooks do that again with `kiwi stop --undo`."
        if may_start_in(path)
        else ASK_ADMIN,
    )


def why_no_sockets(path: Path) -> str:
    """Return why no socket in ``path`` is used, as a sentence that follows another one; "" if the
    directory is safe.
    """
    try:
        why = why_unsafe(path)
    except OSError:
        return ""
    return f" Nothing in that directory is used, because it {why}." if why else ""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open the directory ``path``: the descriptor stays the same, even if the name changes. Raises
    ``OSError``, also for a link."""
    descriptor = os.open(path, _FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def trusted_sockets(path: Path) -> list[str]:
    """Return the names of the sockets in ``path`` that only a trusted user can have put there, in
    order. The result is empty if the directory is missing, or if others can write to it.
    """
    try:
        with opened(path) as directory:
            trusted = trusted_uids(directory)
            if _why_unsafe(os.fstat(directory), trusted):
                return []
            names = sorted(name for name in os.listdir(directory) if name.endswith(".sock"))
            return [name for name in names if _is_trusted_socket(name, directory, trusted)]
    except OSError:
        return []


def signs_of_a_daemon(path: Path) -> Signs:
    """Return what shows that ``path`` has a daemon, had one lately or will have one. Two calls
    return the same value if nothing has changed.

    A daemon that was killed leaves its socket. One that was stopped removes it, but the time of its
    lock says when that was. Root's directory shows that root's daemon belongs there.
    """
    signs: set[tuple[str, int, int]] = set()
    try:
        with opened(path) as directory:
            place, trusted = os.fstat(directory), trusted_uids(directory)
            if _why_unsafe(place, trusted):
                return frozenset()
            for name in os.listdir(directory):
                found = os.lstat(name, dir_fd=directory)
                if name.endswith(".sock"):
                    shows = stat.S_ISSOCK(found.st_mode) and found.st_uid in trusted
                else:
                    is_lock = name.endswith(".lock") and name.startswith(("GPU-", "MIG-"))
                    shows = is_lock and -1 < time.time() - found.st_mtime < LEFT_LATELY_S
                if shows:
                    signs.add((name, found.st_ino, found.st_mtime_ns))
            if place.st_uid != os.getuid():
                signs.add((".", place.st_ino, 0))
    except OSError:  # it, or a file in it, has just gone
        pass
    return frozenset(signs)


def _is_trusted_socket(name: str, directory: int, trusted: frozenset[int]) -> bool:
    try:
        found = os.lstat(name, dir_fd=directory)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in trusted


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of ``sock`` (``SO_PEERCRED``, unix(7)). The kernel
    knows them, wherever the path leads. For a client that is the process that listens there."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _gid = _UCRED.unpack(raw)
    return pid, uid
