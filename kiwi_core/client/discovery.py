"""Finding the daemons of this machine: one socket per GPU, ``<UUID>.sock``, in one directory."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kiwi_core.errors import KiwiError, is_full

if TYPE_CHECKING:
    from pathlib import Path

_ASK_TIMEOUT_S = 2.0
"""For a daemon to say which index its GPU has; a hanging one must not hold up the others."""


def discover(socket_dir: Path, gpu: str | None = None) -> list[Path]:
    """The sockets in ``socket_dir`` that can be trusted, by name.

    ``gpu`` narrows them: a UUID, the beginning of one (with or without ``GPU-``), or an index
    (each daemon is asked; those that do not answer are left out). A missing directory has none.
    Raises ``PeerError`` where a daemon is full and cannot be asked (``errors.is_full``).
    """
    sockets = _trusted_sockets(socket_dir)
    if gpu is None:
        return sockets
    if gpu.isdecimal() and len(gpu) <= 3:
        return [path for path in sockets if _index(path) == int(gpu)]
    wanted = gpu.lower()
    return [
        path
        for path in sockets
        if path.stem.lower().startswith((wanted, f"gpu-{wanted}", f"mig-{wanted}"))
    ]


def _trusted_sockets(socket_dir: Path) -> list[Path]:
    try:
        root_owns = os.stat(socket_dir).st_uid == 0
        names = sorted(os.listdir(socket_dir))
    except OSError:
        return []
    return [
        socket_dir / name
        for name in names
        if name.endswith(".sock") and _is_trusted(socket_dir / name, root_owns)
    ]


def _is_trusted(path: Path, root_owns_dir: bool) -> bool:
    """A socket that only root or this user can have put there: another user's could tell this
    process which libraries to load."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and (found.st_uid in (0, os.getuid()) or root_owns_dir)


def _index(path: Path) -> int | None:
    from kiwi_core.client.client import Client
    from kiwi_core.wire.messages import Role

    try:
        with Client(path, role=Role.OBSERVER, connect_timeout_s=_ASK_TIMEOUT_S) as client:
            return client.connect().gpu_index
    except KiwiError as error:
        if is_full(error):
            raise
        return None
