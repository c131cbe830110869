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
    """``ask`` is called at each scrape, in the scrape's thread. If it raises, the others' metrics
    in the same registry are served all the same, and the log says why Kiwi's are not."""

    def __init__(self, ask: Callable[[], Iterable[GpuReading]]) -> None:
        self._ask = ask

    def collect(self) -> Iterable[Metric]:
        try:
            return list(families_of(self._ask()))
        except Exception:
            log.exception("Kiwi's metrics could not be collected")
            return []

    def describe(self) -> Iterable[Metric]:
        """Registering must not ask anybody: only the names."""
        return list(families_of(()))
