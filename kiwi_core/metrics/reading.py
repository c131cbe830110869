"""The readings of GPUs: asks the daemons of several at once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.client import Client
from kiwi_core.errors import KiwiError
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kiwi_core.wire.metrics import GpuMetrics

STEP_S: Final = 1.5
"""Limit for connecting, and again for the answer. A working daemon takes milliseconds, and a scrape
must end long before Prometheus gives up on it (10 s).
"""


@dataclass(frozen=True)
class GpuReading:
    """``metrics`` is ``None`` while the GPU's daemon does not answer."""

    uuid: str
    index: int
    metrics: GpuMetrics | None


@dataclass(frozen=True)
class GpuPlace:
    """A GPU and the socket of its daemon."""

    uuid: str
    index: int
    socket: Path


def ask_daemons(places: Sequence[GpuPlace]) -> list[GpuReading]:
    """Ask all daemons at once, each on a connection of its own. Return the readings in the order of
    ``places``, within little more than two ``STEP_S``. A daemon that is away raises no error."""
    found: dict[str, GpuMetrics] = {}

    def ask(place: GpuPlace) -> None:
        metrics = _ask(place.socket)
        if metrics is not None:
            found[place.uuid] = metrics

    threads = [
        threading.Thread(target=ask, args=(place,), name=f"ask-{place.index}", daemon=True)
        for place in places
    ]
    for thread in threads:
        thread.start()
    ends_at_s = time.monotonic() + 2 * STEP_S
    for thread in threads:
        thread.join(max(0.0, ends_at_s - time.monotonic()))
    return [GpuReading(place.uuid, place.index, found.get(place.uuid)) for place in places]


def _ask(socket: Path) -> GpuMetrics | None:
    client = Client(
        socket, role=Role.OBSERVER, client="kiwi metrics", reconnect=False, connect_timeout_s=STEP_S
    )
    try:
        client.connect()
        return client.metrics(STEP_S)
    except KiwiError:
        return None
    finally:
        client.close()
