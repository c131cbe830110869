"""Find the daemons of this machine: one socket per GPU, ``<UUID>.sock``, in one directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.client.directory import trusted_sockets
from kiwi_core.errors import KiwiError, SilentDaemonError, is_full

if TYPE_CHECKING:
    from pathlib import Path

_ASK_TIMEOUT_S = 2.0
"""Time for a daemon to say the index of its GPU; one that hangs must not hold up the others."""


def discover(socket_dir: Path, gpu: str | None = None) -> list[Path]:
    """Return the sockets in ``socket_dir`` that can be trusted, sorted by name.

    ``gpu`` selects some: a UUID, the beginning of one (with or without ``GPU-``), or an index
    (each daemon is asked; a crashed one is left out). A missing directory has none. Raises
    ``PeerError`` if no daemon has the index and one cannot be asked, because it is full
    (``errors.is_full``) or does not answer (``SilentDaemonError``): that one may have the index.
    """
    sockets = [socket_dir / name for name in trusted_sockets(socket_dir)]
    if gpu is None:
        return sockets
    if not (gpu.isdecimal() and len(gpu) <= 3):
        wanted = gpu.lower()
        beginnings = (wanted, f"gpu-{wanted}", f"mig-{wanted}")
        return [path for path in sockets if path.stem.lower().startswith(beginnings)]

    from kiwi_core.client.client import Client
    from kiwi_core.wire.messages import Role

    found, unknown = [], None
    for path in sockets:
        try:
            with Client(path, role=Role.OBSERVER, connect_timeout_s=_ASK_TIMEOUT_S) as client:
                if client.connect().gpu_index == int(gpu):
                    found.append(path)
        except KiwiError as error:
            if is_full(error) or isinstance(error, SilentDaemonError):
                unknown = error
    if unknown is not None and not found:
        raise unknown
    return found
