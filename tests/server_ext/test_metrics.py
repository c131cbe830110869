"""Tests of Kiwi's metrics among those of the Jupyter Server, on its own ``/metrics``."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import HTTPClientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon

MIB = 1 << 20
Samples = dict[tuple[str, str], float]


def samples(text: str) -> Samples:
    """Return the samples by name and GPU."""
    return {
        (sample.name, sample.labels["gpu"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "gpu" in sample.labels
    }


@pytest.fixture
def scraped(jp_fetch: Any, kiwi: Any) -> Callable[..., Any]:
    """``await scraped(condition)`` returns the first scrape that satisfies the condition."""

    async def scrape(condition: Callable[[Samples], bool]) -> Samples:
        ends_at_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_at_s:
            text = (await jp_fetch("metrics")).body.decode()
            assert "python_info" in text  # the server's own samples are always there
            if condition(found := samples(text)):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"not in {PATIENCE_S} s:\n{text}")

    return scrape


async def test_the_servers_scrape_has_each_gpu(
    scraped: Callable[..., Any],
    daemon: Daemon,
    program: Callable[..., Any],
) -> None:
    program(daemon, 64, name="secret.ipynb")
    uuid = daemon.status().uuid
    held = ("kiwi_memory_resident_bytes", uuid)
    found = await scraped(lambda found: found.get(held, 0) >= 64 * MIB)
    assert found["kiwi_up", uuid] == 1
    assert found["kiwi_memory_total_bytes", uuid] == 256 * MIB
    assert found["kiwi_lease_wait_seconds_count", uuid] >= 0


async def test_it_asks_for_a_login(jp_fetch: Any, kiwi: Any) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch("metrics", headers={"Authorization": "token wrong"})
    assert refused.value.code == 403


async def test_a_token_as_prometheus_sends_it(jp_fetch: Any, kiwi: Any, jp_serverapp: Any) -> None:
    token = jp_serverapp.identity_provider.token
    answer = await jp_fetch("metrics", headers={"Authorization": f"token {token}"})
    assert answer.code == 200


async def test_a_daemon_that_hangs_holds_up_nobody(
    scraped: Callable[..., Any], jp_fetch: Any, daemon: Daemon
) -> None:
    status = daemon.status()
    up = ("kiwi_up", status.uuid)
    await scraped(lambda found: found.get(up) == 1)
    os.kill(status.daemon_pid, signal.SIGSTOP)
    try:
        for _ in range(10):
            await jp_fetch("metrics")  # answered, although the daemon answers nothing
        await scraped(lambda found: found.get(up) == 0)
    finally:
        os.kill(status.daemon_pid, signal.SIGCONT)
    await scraped(lambda found: found.get(up) == 1)
