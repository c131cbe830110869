"""Kiwi's metrics in a ``prometheus_client`` registry."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from kiwi_core.metrics.families import families_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from kiwi_core.metrics.reading import GpuReading

log = logging.getLogger(__name__)


class KiwiCollector(Collector):
    """Collects Kiwi's metrics. It calls ``ask`` at each scrape, in the scrape's thread. If ``ask``
    raises, other metrics in the registry are served anyway, and the log says why Kiwi's are not."""

    def __init__(self, ask: Callable[[], Iterable[GpuReading]]) -> None:
        self._ask = ask

    def collect(self) -> Iterable[Metric]:
        try:
            return list(families_of(self._ask()))
        except Exception:
            log.exception("Kiwi's metrics could not be collected")
            return []

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values: registering must not ask the daemons."""
        return list(families_of(()))
