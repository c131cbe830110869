"""Places kernels: asks the daemons how things are, chooses, and remembers whom it placed where."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kiwi_core import config
from kiwi_core.client import Client
from kiwi_core.client.own_gpus import own_sockets
from kiwi_core.errors import KiwiError
from kiwi_core.wire.messages import Role
from kiwi_jupyter.server_ext.placement import Placed, choose

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

WITHIN_S: Final = 2.0
"""Time for all daemons to answer, which takes milliseconds. On a busy machine a kernel's own start
takes about as long; a daemon that hangs must not cost more than that."""

ASKERS: Final = 16
"""Daemons asked at once: no machine has more GPUs. Threads end soon after a time-out."""

log = logging.getLogger("kiwi.placement")


class Placer:
    """``socket_dir`` is where the daemons' sockets are (``None``: the default place). Any thread
    may call; the work is done within ``within_s`` seconds or not at all."""

    def __init__(self, socket_dir: Path | None = None, within_s: float = WITHIN_S) -> None:
        self.socket_dir = socket_dir
        self._within_s = within_s
        self._lock = threading.Lock()
        self._placed: dict[str, tuple[str, float]] = {}
        self._askers = ThreadPoolExecutor(ASKERS, thread_name_prefix="kiwi-placement")

    async def place(self, kernel_id: str, env: Mapping[str, str]) -> str | None:
        """The UUID of the GPU for a kernel that is about to start with ``env``; ``None``: leave it
        alone, because its user has chosen, Kiwi is switched off in it, or there is no choice.
        Never raises for what is wrong with a daemon."""
        if is_chosen(env):
            return None
        gpus = await self._statuses()
        with self._lock:
            now_s = time.monotonic()
            placed = [
                Placed(kernel, uuid, now_s - at_s) for kernel, (uuid, at_s) in self._placed.items()
            ]
            gpu = choose(gpus, placed, kernel_id)
            if gpu is None:
                return None
            self._placed[kernel_id] = (gpu.uuid, now_s)
        kind = "EMULATED GPU" if gpu.emulated else "GPU"
        log.info("kernel %s is placed on %s %d (%s)", kernel_id, kind, gpu.index, gpu.uuid)
        return gpu.uuid

    def ended(self, kernel_id: str) -> None:
        """Kernel ``kernel_id`` is no more."""
        with self._lock:
            self._placed.pop(kernel_id, None)

    def close(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)

    async def _statuses(self) -> list[GpuStatus]:
        """Return the statuses of this server's GPUs whose daemons answer in time; none if there is
        only one daemon."""
        sockets = own_sockets(self.socket_dir or config.socket_dir())
        if len(sockets) < 2:
            return []
        asked = [asyncio.wrap_future(self._askers.submit(self._ask, path)) for path in sockets]
        answered, late = await asyncio.wait(asked, timeout=self._within_s)
        for each in late:
            each.cancel()
        if late:
            log.warning("%d of %d daemons did not answer in time", len(late), len(asked))
        return _usable([gpu for each in answered if (gpu := each.result()) is not None])

    def _ask(self, path: Path) -> GpuStatus | None:
        client = Client(
            path,
            role=Role.OBSERVER,
            client="placement",
            reconnect=False,
            connect_timeout_s=self._within_s,
        )
        try:
            with client:
                client.connect()
                return client.status(self._within_s)
        except KiwiError as error:
            log.debug("%s: %s", path, error)
            return None


def is_chosen(env: Mapping[str, str]) -> bool:
    """Return whether the choice is made: for a GPU, for none (an empty list), or against Kiwi."""
    return is_disabled(env) or VISIBLE in env or bool(env.get(config.ENV_GPU))


def is_disabled(env: Mapping[str, str]) -> bool:
    """Return whether Kiwi is switched off in kernels that have this environment."""
    return env.get(config.ENV_DISABLE, "").strip().lower() not in ("", "0", "false", "no")


def _usable(gpus: list[GpuStatus]) -> list[GpuStatus]:
    """Return the real GPUs, else the emulated ones, which must not hide real ones."""
    return [gpu for gpu in gpus if not gpu.emulated] or gpus
