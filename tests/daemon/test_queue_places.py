"""Tests of sessions that wait outside the queue, beyond their user's share of places."""

from __future__ import annotations

import asyncio

import pytest

from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.daemon.sessions.queue_places import QueuePlaces
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.peer_limits import QUEUE_PLACES
from kiwi_core.units import SessionId

UID, BURST, OWN = 1000, 7, 0


def some_record(number: int) -> SessionRecord:
    return SessionRecord(SessionId(f"k{number}"), ProcessRef(number, 1), UID)


@pytest.mark.parametrize("asked", [(BURST, OWN), (OWN, BURST), (BURST, OWN, OWN)])
def test_the_burst_of_the_client_is_lined_up_though_its_library_asks_too(
    asked: tuple[int, ...],
) -> None:
    """Otherwise no grant would reach the burst that the client waits for."""
    lined_up: list[tuple[SessionRecord, int]] = []

    def enqueue(record: SessionRecord, client_burst: int) -> None:
        record.waiting = True
        lined_up.append((record, client_burst))

    async def run() -> None:
        share = Shares()[QUEUE_PLACES]
        places = QueuePlaces(share, enqueue)
        first, *others = [some_record(n) for n in range(1, share.limit.per_user + 1)]
        for record in (first, *others):
            places.request(record, BURST)
        assert len(lined_up) == share.limit.per_user
        outside = some_record(share.limit.per_user + 1)
        for client_burst in asked:
            places.request(outside, client_burst)
        assert len(lined_up) == share.limit.per_user, "it waits outside"
        first.waiting = False
        places.move_up_soon()
        await asyncio.sleep(0)
        assert lined_up[share.limit.per_user :] == [(outside, BURST)]

    asyncio.run(run())
