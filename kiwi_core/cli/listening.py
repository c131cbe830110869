"""Who listens at a daemon's socket, and whether systemd started it."""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from kiwi_core.cli.common import CONNECT_TIMEOUT_S
from kiwi_core.client.directory import peer_of
from kiwi_core.errors import CallerError, KiwiError, PeerError
from kiwi_core.gpu import processes

if TYPE_CHECKING:
    from pathlib import Path


def listener(path: Path) -> processes.ProcessRef | None:
    """Return the process that listens at ``path``; ``None``: nobody, the socket is from a crash."""
    with closing(socket.socket(socket.AF_UNIX)) as asker:
        asker.settimeout(CONNECT_TIMEOUT_S)
        try:
            asker.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise PeerError(
                "no-answer", f"The daemon cannot be asked ({error}).", "See kiwi doctor."
            ) from error
        pid, _uid = peer_of(asker)
    if pid == 0:
        raise CallerError(
            "elsewhere", "Its daemon runs in another container.", "Run kiwi stop in that one."
        )
    return processes.ref_of(pid)


def service_of(pid: int) -> str:
    """Return the systemd unit of Kiwi that ``pid`` belongs to, or "". A unit would restart it."""
    with suppress(OSError), open(f"/proc/{pid}/cgroup") as file:
        for word in file.read().replace("\n", "/").split("/"):
            if word.startswith("kiwi") and word.endswith(".service"):
                return word
    return ""


def unit_of(path: Path) -> str:
    """Return the systemd unit of the daemon at ``path``; "" if it has none or does not answer."""
    try:
        ref = listener(path)
    except KiwiError:
        return ""
    return "" if ref is None else service_of(ref.pid)
