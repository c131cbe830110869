"""Kiwi's metrics on the Jupyter Server's own ``/metrics``.

The server answers that in its event loop, from ``prometheus_client``'s default registry, so what is
asked at a scrape must be at hand: the extension keeps each daemon's last ``metrics`` and hands them
over here. Who may scrape is the server's ``authenticate_prometheus``.
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
    """Let each scrape show what ``ask()`` returns from now on, instead of an earlier ``ask``.
    Called by the extension when it starts.

    ``ask`` runs in the server's event loop and must return at once: what was last heard of each
    GPU, with ``metrics=None`` for one whose daemon is away. If it raises, Kiwi's metrics are
    missing from that scrape and the log says why.
    """
    unregister(registry)
    collector = KiwiCollector(ask)
    registry.register(collector)
    setattr(registry, _MARK, collector)


def unregister(registry: CollectorRegistry = REGISTRY) -> None:
    """Called when the extension stops; does nothing where there is nothing of Kiwi's."""
    collector = getattr(registry, _MARK, None)
    if collector is not None:
        setattr(registry, _MARK, None)
        registry.unregister(collector)
