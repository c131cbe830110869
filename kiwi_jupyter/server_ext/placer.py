"""Places the kernels of this server, and withdraws placements of kernels that never used the
GPU.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.client import gpu_placement
from kiwi_core.client.own_gpus import own_sockets

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger("kiwi.placement")


class Placer:
    """The placer. ``socket_dir`` is where the daemons' sockets are (``None``: the default place).
    Any thread may call; daemons get ``within_s`` seconds to answer.
    """

    def __init__(
        self, socket_dir: Path | None = None, within_s: float = gpu_placement.WITHIN_S
    ) -> None:
        self.socket_dir = socket_dir
        self._within_s = within_s
        self._lock = threading.Lock()
        self._placed: dict[str, Path | None] = {}
        """The socket of the daemon that expects each kernel; ``None`` while it is chosen."""

    async def place(self, kernel_id: str, env: Mapping[str, str]) -> str | None:
        """Return the UUID of the GPU for a kernel that is about to start with ``env``. Return
        ``None`` to leave the kernel alone: its user has chosen, Kiwi is switched off in it, or
        there is no choice. Faults of a daemon raise nothing.
        """
        if is_chosen(env):
            return None
        directory = self.socket_dir or config.socket_dir()
        await asyncio.to_thread(self._forget, kernel_id)
        with self._lock:
            self._placed[kernel_id] = None
        try:
            gpu = await asyncio.to_thread(self._choose, directory, kernel_id)
        except BaseException:  # cancelled: the thread goes on, and sees that it is not wanted
            await self.ended(kernel_id)
            raise
        if gpu is None:
            return None
        kind = "EMULATED GPU" if gpu.emulated else "GPU"
        log.info("kernel %s is placed on %s %d (%s)", kernel_id, kind, gpu.index, gpu.uuid)
        return gpu.uuid

    def _choose(self, directory: Path, kernel_id: str) -> GpuStatus | None:
        gpu = gpu_placement.place(own_sockets(directory), kernel_id, within_s=self._within_s)
        socket = directory / f"{gpu.uuid}.sock" if gpu is not None else None
        with self._lock:
            wanted = kernel_id in self._placed
            if wanted and socket is None:
                del self._placed[kernel_id]
            elif wanted:
                self._placed[kernel_id] = socket
        if socket is not None and not wanted:
            gpu_placement.expect(socket, kernel_id, 0)
        return gpu

    async def launched(self, kernel_id: str, pid: int, name: str) -> None:
        """Tell the daemon that expects the kernel which process it is, and what it is called."""
        await asyncio.to_thread(self._introduce, kernel_id, pid, name)

    def _introduce(self, kernel_id: str, pid: int, name: str) -> None:
        with self._lock:
            socket = self._placed.get(kernel_id)
        if socket is not None:
            gpu_placement.expect(
                socket, kernel_id, gpu_placement.EXPECTED_FOR_S, pid=pid, name=name
            )

    async def ended(self, kernel_id: str) -> None:
        """Withdraw the placement of kernel ``kernel_id``, which has ended."""
        await asyncio.to_thread(self._forget, kernel_id)

    def _forget(self, kernel_id: str) -> None:
        with self._lock:
            socket = self._placed.pop(kernel_id, None)
        if socket is not None:
            gpu_placement.expect(socket, kernel_id, 0)


def is_chosen(env: Mapping[str, str]) -> bool:
    """Return whether the user has chosen: a GPU, none (an empty list), or not to use Kiwi."""
    return config.is_disabled(env) or VISIBLE in env or bool(env.get(config.ENV_GPU))
