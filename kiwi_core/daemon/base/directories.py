"""The directories of a daemon: owner, mode, and the lock for programs that choose between GPUs."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from kiwi_core.client.directory import why_unsafe
from kiwi_core.config import PLACING_LOCK
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from pathlib import Path


def prepare_directory(path: Path, mode: int = 0o700) -> None:
    """Create ``path`` with ``mode``, or check the existing one.

    Raises ``CallerError``: "unsafe-directory" if somebody else could have put sockets there,
    "no-directory" if it cannot be made or written to.
    """
    try:
        _make(path, mode)
        why = why_unsafe(path)
    except OSError as error:
        raise CallerError(
            "no-directory",
            f"Cannot create {path}: {error.strerror}.",
            "Name another directory with --socket-dir or KIWI_SOCKET_DIR (for the state: "
            "--state-dir or KIWI_STATE_DIR).",
        ) from error
    if why:
        raise CallerError(
            "unsafe-directory",
            f"{path} {why}: a user who can put files there could pose as the daemon.",
            f"Run `chmod go-w {path}` if it is for Kiwi alone; else name another one with "
            "--socket-dir or KIWI_SOCKET_DIR (for the state: --state-dir or KIWI_STATE_DIR).",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise CallerError(
            "no-directory",
            f"The daemon may not write to {path}.",
            "Name another directory with --socket-dir or --state-dir.",
        )


def _make(path: Path, mode: int) -> None:
    """Make ``path`` with ``mode`` if it is missing, and its missing parents, which everybody may
    search, whatever the umask."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        try:
            each.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process was faster: the caller checks the directory
        each.chmod(mode if each == path else 0o755)


def sockets_mode() -> int:
    """Return the mode of a socket directory. Everybody may list a root daemon's directory: it
    serves all users, and the credentials of each connection decide what they may do.
    """
    return 0o755 if os.getuid() == 0 else 0o700


def make_placing_lock(directory: Path) -> None:
    """Create the file that programs of all users lock while they choose between GPUs."""
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):  # without it programs choose all the same
        file = os.open(directory / PLACING_LOCK, flags, 0o644)
        with contextlib.suppress(OSError):
            os.fchmod(file, 0o644)  # whatever the umask is
        os.close(file)
