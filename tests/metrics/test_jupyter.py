"""Tests of the metrics on a Jupyter Server's own ``/metrics``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from samples import Scrape, away, reading

from kiwi_jupyter.server_ext import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.metrics.reading import GpuReading


@pytest.fixture
def registry() -> CollectorRegistry:
    """Return a registry that, like the default one, describes what it is given."""
    return CollectorRegistry(auto_describe=True)


def scraped(registry: CollectorRegistry) -> Scrape:
    return Scrape(prometheus_client.generate_latest(registry).decode())


def test_what_is_asked_is_shown(registry: CollectorRegistry) -> None:
    known: list[GpuReading] = []
    metrics.register(lambda: known, registry)
    assert scraped(registry).names() == set()
    known += [reading(), away()]
    seen = scraped(registry)
    assert seen("kiwi_up", gpu="GPU-a") == 1
    assert seen("kiwi_up", gpu="GPU-b") == 0
    assert seen("kiwi_queue_length") == 2


def test_the_last_one_to_register_is_asked(registry: CollectorRegistry) -> None:
    metrics.register(lambda: [reading(holders=1)], registry)
    metrics.register(lambda: [reading(holders=2)], registry)
    assert scraped(registry)("kiwi_lease_holders") == 2


def test_a_reloaded_module_takes_over(registry: CollectorRegistry) -> None:
    metrics.register(lambda: [reading(holders=1)], registry)
    again = importlib.reload(metrics)
    again.register(lambda: [reading(holders=2)], registry)
    assert scraped(registry)("kiwi_lease_holders") == 2
    again.unregister(registry)
    assert scraped(registry).names() == set()


def test_unregistering_what_is_not_there(registry: CollectorRegistry) -> None:
    metrics.unregister(registry)
    metrics.register(list, registry)
    metrics.unregister(registry)
    metrics.unregister(registry)


def test_an_error_does_not_take_the_servers_metrics_with_it(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[GpuReading]:
        raise RuntimeError("upstream is upset")

    prometheus_client.Gauge("terminals", "The server's.", registry=registry).set(4)
    metrics.register(broken, registry)
    assert "terminals 4.0" in scraped(registry).text
    assert "upstream is upset" in caplog.text


@pytest.fixture
def _leave_the_default_registry_clean() -> Iterator[None]:
    yield
    metrics.unregister()


@pytest.mark.usefixtures("_leave_the_default_registry_clean")
def test_the_default_is_the_registry_that_the_server_shows() -> None:
    metrics.register(lambda: [reading()])
    text = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
    assert Scrape(text)("kiwi_up", gpu="GPU-a") == 1
    assert "python_info" in text
