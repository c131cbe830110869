"""Other device plugins on this node that hand out NVIDIA's GPUs."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path("/var/lib/kubelet/device-plugins")
"""The kubelet's directory of the sockets of device plugins."""

_SOCKETS: Final = "nvidia*.sock"
"""NVIDIA's plugin serves nvidia-gpu.sock, or nvidia-RESOURCE.sock; that of Google's clusters serves
nvidiaGPU-TIME.sock."""


def served(path: Path) -> bool:
    """Return whether a process serves the socket ``path``."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


def of_nvidia(directory: Path) -> list[str]:
    """Return the names of the sockets in ``directory`` that such plugins serve. A directory that
    this process may not read has none."""
    return sorted(path.name for path in directory.glob(_SOCKETS) if served(path))
