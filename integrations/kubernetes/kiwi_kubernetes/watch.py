"""Asks the daemons of this node, again and again, which GPUs can be offered.

The kubelet moves no pod when a GPU is unavailable for a while; it only admits no new one. So a GPU
that was seen once stays in the list, as an unavailable one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.client import discover, gpu_placement
from kiwi_core.client.directory import why_no_sockets
from kiwi_core.gpu import mps
from kiwi_core.pager import unmovable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus

log = structlog.get_logger()

EVERY_S: Final = 1.0
"""Time between two requests to the daemons, which answer in a millisecond."""

GRACE_S: Final = 3.0
"""A daemon that has not answered for this long counts as gone: one that crashed is back within a
second, and on a busy machine a single answer may be late.
"""

MPS_EVERY_S: Final = 30.0
"""Time between two searches for MPS: each reads a file of every process."""

NO_ANSWER: Final = "its Kiwi daemon does not answer; look at the daemon's log on this node"


class Watch:
    """The GPUs that daemons in ``directory`` serve, or have served since this process began.

    ``root`` holds ``/proc``, and ``clock_s`` tells seconds that never go back; tests pass others.
    """

    def __init__(
        self, directory: Path, root: Path, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._root = root
        self._clock_s = clock_s
        self._silent_since_s: dict[str, float] = {}
        """Since when the daemon of a GPU has not answered; daemons that answer are not in it."""
        self._mps_looked_s: float | None = None
        self._mps = False
        self.why_not: dict[str, str] = {}
        """Why each GPU is not available now; empty: it is."""
        self._looked = False
        self._changed = asyncio.Event()

    async def look(self) -> list[GpuStatus]:
        """Ask all daemons. Return the statuses of the available GPUs."""
        statuses = await asyncio.to_thread(self._ask)
        self.take(statuses)
        return [gpu for gpu in statuses if not self.why_not[gpu.uuid]]

    def take(self, statuses: Iterable[GpuStatus]) -> None:
        """Record the answers of the daemons, and which ones have not answered."""
        now_s = self._clock_s()
        told = {gpu.uuid: gpu for gpu in statuses}
        self._look_for_mps(now_s)
        before = self.why_not
        for uuid in before:
            if uuid in told:
                self._silent_since_s.pop(uuid, None)
            else:
                self._silent_since_s.setdefault(uuid, now_s)
        self.why_not = {
            uuid: self._why_not(uuid, told.get(uuid), now_s) for uuid in {**before, **told}
        }
        if self.why_not != before or not self._looked:
            self._looked = True
            self._tell(before)

    async def changes(self) -> AsyncIterator[dict[str, str]]:
        """Yield ``why_not`` once the daemons were asked, and after each change. (A kubelet that
        gets an empty list from a plugin that was restarted admits no pod until the next one.)"""
        while True:
            changed = self._changed
            if self._looked:
                yield self.why_not
            await changed.wait()

    def _ask(self) -> list[GpuStatus]:
        return gpu_placement.statuses(discover(self._directory), gpu_placement.WITHIN_S)

    def _why_not(self, uuid: str, gpu: GpuStatus | None, now_s: float) -> str:
        if gpu is None:
            silent_s = now_s - self._silent_since_s[uuid]
            return NO_ANSWER if silent_s >= GRACE_S else self.why_not[uuid]
        if self._mps:
            return f"{mps.RUNS} {mps.REMEDY}"
        # The daemon sees MIG by NVML, which this process may lack, and warns of it.
        return next((text for text in gpu.errors if text.startswith(unmovable.MIG.sentence)), "")

    def _look_for_mps(self, now_s: float) -> None:
        if self._mps_looked_s is None or now_s - self._mps_looked_s >= MPS_EVERY_S:
            self._mps_looked_s, self._mps = now_s, mps.runs(self._root)

    def _tell(self, before: dict[str, str]) -> None:
        if not self.why_not:
            why = why_no_sockets(self._directory).strip()
            log.warning("no Kiwi daemon answers yet", directory=str(self._directory), why=why)
        for uuid, why in self.why_not.items():
            if before.get(uuid) != why:
                if why:
                    log.warning("GPU is not offered", gpu=uuid, why=why)
                else:
                    log.info("GPU is offered", gpu=uuid)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
