"""Tests of how often the daemon looks at the GPU."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
import virtual_time
from fake_pager import FakePager

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.engine import observer
from kiwi_core.daemon.engine.observer import AT_ONCE, BESIDE_A_WAIT, Observer
from kiwi_core.pager.api import ProcessRef, Target
from kiwi_core.units import MIB, NS_PER_MS, SessionId


@pytest.mark.parametrize("waits", [True, False])
def test_a_waiter_does_not_wait_for_the_observers_next_round(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    monkeypatch.setattr(observer, "QUIET_INTERVAL_S", 1000.0)
    assert virtual_time.run(_looks(waits=waits, enough=5)) == (5 if waits else 1)


def test_a_look_that_somebody_waits_for_takes_few_others_along() -> None:
    """With many sessions, the periodic round takes its share of such a look, but not more."""

    async def story() -> tuple[set[SessionId], set[SessionId]]:
        everybody = [Target(SessionId(f"k{n}"), ProcessRef(n, n)) for n in range(1, 3 * AT_ONCE)]
        seen: set[SessionId] = set()
        one = Observer(
            DEFAULTS,
            FakePager(64 * MIB),
            free_bytes=_free_bytes,
            host_budget_bytes=lambda: 0,
            everybody=lambda: everybody,
            runners=list,
            only_recorded=list,
            waiting=lambda: False,
            feed=lambda _event: None,
            seen=lambda target, _seen: seen.add(target.session),
        )
        ended = asyncio.Event()
        one.after_a_look(everybody[-1], ended.set)
        task = asyncio.ensure_future(one.run())
        await ended.wait()
        first = set(seen)
        while len(seen) < len(everybody):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return first, {target.session for target in everybody}

    first, everybody = asyncio.run(story())
    assert len(first) == 1 + BESIDE_A_WAIT
    assert first < everybody


async def _free_bytes() -> int:
    return 64 * MIB


async def _looks(*, waits: bool, enough: int) -> int:
    """Return how often the observer has looked when it rests for long, or has looked ``enough``
    times."""
    looks = 0
    done = asyncio.Event()

    def feed(_event: object) -> None:
        nonlocal looks
        looks += 1
        if looks == enough:
            done.set()

    one = Observer(
        replace(DEFAULTS, observe_interval_ns=NS_PER_MS),
        FakePager(64 * MIB),
        free_bytes=_free_bytes,
        host_budget_bytes=lambda: 0,
        everybody=list,
        runners=list,
        only_recorded=list,
        waiting=lambda: waits,
        feed=lambda event: feed(event) if hasattr(event, "free_bytes") else None,
    )
    task = asyncio.ensure_future(one.run())
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(done.wait(), 60.0 if waits else 1.0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return looks
