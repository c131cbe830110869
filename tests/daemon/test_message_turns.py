"""Tests of what a message costs its user's stock of requests."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import virtual_time

from kiwi_core.daemon.base.message_turns import REQUEST_NS, MessageTurns
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.peer_limits import REQUESTS
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

UID = 1000
TOOK_NS = NS_PER_S // 2


class OneMessage:
    """A connection with one message whose handling takes as long as ``handle``."""

    def __init__(self, turns: MessageTurns, handle: Callable[[], None]) -> None:
        self.account, self.bucket = turns.account(UID), turns.bucket()
        self._handle = handle
        self._left = 1
        self.handled = asyncio.Event()

    def ready(self) -> bool:
        return self._left > 0

    def handle_next(self) -> None:
        self._left -= 1
        self._handle()

    def caught_up(self) -> None:
        self.handled.set()


def requests_charged(handle: Callable[[], None]) -> float:
    """Return the number of requests that a message is charged for if it takes as long as
    ``handle``."""

    async def run() -> float:
        turns = MessageTurns(Shares())
        talker = OneMessage(turns, handle)
        turns.add(talker)
        await talker.handled.wait()
        limit = Shares()[REQUESTS].limit
        bucket = talker.account.bucket
        # empty the bucket, so that a debt shows
        bucket.spend(limit.per_user, now_ns := time.monotonic_ns())
        return bucket.empty_ns(now_ns) * limit.per_s / NS_PER_S

    return virtual_time.run(run())


def test_a_message_is_charged_what_it_takes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_ns = 0
    monkeypatch.setattr(time, "thread_time_ns", lambda: cpu_ns)

    def handle() -> None:
        nonlocal cpu_ns
        cpu_ns += TOOK_NS
        virtual_time.advance(TOOK_NS / NS_PER_S)

    assert requests_charged(handle) == pytest.approx(TOOK_NS / REQUEST_NS)


def test_a_message_is_not_charged_for_time_in_which_the_daemon_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "thread_time_ns", lambda: 0)
    charged = requests_charged(lambda: virtual_time.advance(TOOK_NS / NS_PER_S))
    assert charged == pytest.approx(1.0, abs=0.001)
