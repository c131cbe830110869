"""Kiwi's metrics on the Jupyter Server's own ``/metrics``.

The server answers a scrape in its event loop, from ``prometheus_client``'s default registry, so the
data must be there already: the extension keeps each daemon's last ``metrics`` and passes them on
here. The server's ``authenticate_prometheus`` says who may scrape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY

from kiwi_core.metrics.collector import KiwiCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry

    from kiwi_core.metrics.reading import GpuReading

_MARK: Final = "_kiwi_collector"
"""Attribute of a registry that remembers its collector. The registry outlives a reload of this
module, and an extension that is loaded twice."""


def register(
    ask: Callable[[], Iterable[GpuReading]], registry: CollectorRegistry = REGISTRY
) -> None:
    """Make each scrape show what ``ask()`` returns. It replaces an earlier ``ask``. Called by the
    extension when it starts.

    ``ask`` runs in the server's event loop and must return at once: the last data of each GPU, with
    ``metrics=None`` for one whose daemon is away. If it raises, Kiwi's metrics are missing from
    that scrape and the log says why.
    """
    unregister(registry)
    collector = KiwiCollector(ask)
    registry.register(collector)
    setattr(registry, _MARK, collector)


def unregister(registry: CollectorRegistry = REGISTRY) -> None:
    """Remove Kiwi's collector, if there is one. Called when the extension stops."""
    collector = getattr(registry, _MARK, None)
    if collector is not None:
        setattr(registry, _MARK, None)
        registry.unregister(collector)
