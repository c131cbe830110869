"""Keep the daemons' metrics up to date while somebody scrapes ``/metrics``.

A scrape is answered in the event loop and must not wait for a daemon. So it gets the last known
data, and the daemons are asked again and again until nobody has scraped for a while.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import KiwiError
from kiwi_core.metrics.reading import GpuReading
from kiwi_jupyter.server_ext.threads import in_thread

if TYPE_CHECKING:
    from kiwi_core.client import Client
    from kiwi_core.wire.messages import GpuStatus
    from kiwi_jupyter.server_ext.service import KiwiService

ASK_EVERY_S: Final = 5.0
"""Prometheus scrapes every 15 s or less often; numbers are never older than this."""

IDLE_S: Final = 180.0
"""The daemons are no longer asked after this time without a scrape: three of the longest usual
intervals.
"""

_ANSWER_S: Final = 2.0


class Scrapes:
    def __init__(self, service: KiwiService) -> None:
        self._service = service
        self._readings: list[GpuReading] = []
        self._scraped_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    def readings(self) -> list[GpuReading]:
        """Return readings for ``metrics.register``; none in the first scrape after a pause."""
        self._scraped_s = time.monotonic()
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._keep_asking())
        return self._readings

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _keep_asking(self) -> None:
        while time.monotonic() - self._scraped_s < IDLE_S:
            await self._service.settled()
            known = self._service.daemons.answering()
            self._readings = list(await asyncio.gather(*(_read(*one) for one in known)))
            await asyncio.sleep(ASK_EVERY_S)
        self._readings, self._asking = [], None


async def _read(gpu: GpuStatus, client: Client | None) -> GpuReading:
    reading = GpuReading(gpu.uuid, gpu.index, None)
    if client is None:
        return reading
    try:
        metrics = await in_thread(lambda: client.metrics(_ANSWER_S), "kiwi metrics")
    except KiwiError:
        return reading
    return GpuReading(gpu.uuid, gpu.index, metrics)
