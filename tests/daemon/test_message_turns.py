"""Tests of what a message costs its user's stock of requests, and of when it is handled."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import pytest
import virtual_time

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.message_turns import REQUEST_NS, SLICE_NS, MessageTurns
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


class Counting:
    """A receiver that counts messages, each of which takes ``took_ns``."""

    def __init__(self, took_ns: int) -> None:
        self.messages = 0
        self._took_ns = took_ns

    def received(self, _connection: Connection, _message: object) -> None:
        self.messages += 1
        virtual_time.advance(self._took_ns / NS_PER_S)

    def connected(self, _connection: Connection) -> None: ...
    def disconnected(self, _connection: Connection) -> None: ...
    def turned_away(self, _code: str) -> None: ...


HELLO = b'{"type":"hello","protocol":1,"role":"observer","client":"t"}\n'
PING = b'{"type":"ping"}\n'


def handled_at_once_and_in_all(took_ns: int, *parts: bytes) -> tuple[int, int]:
    """Return how many messages are handled before the loop goes on after the first of ``parts``
    has come, and how many in all."""

    async def run() -> tuple[int, int]:
        receiver, turns = Counting(took_ns), MessageTurns(Shares())
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, connection = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(receiver, DEFAULTS, turns), ours
        )
        first, *others = parts
        connection.data_received(first)
        at_once = receiver.messages
        for part in others:
            connection.data_received(part)
        while receiver.messages < b"".join(parts).count(b"\n"):  # the test's time limit ends this
            await asyncio.sleep(0)
        connection.abort()
        theirs.close()
        return at_once, receiver.messages

    return virtual_time.run(run())


def test_messages_that_come_together_are_handled_at_once() -> None:
    assert handled_at_once_and_in_all(0, HELLO + PING + PING) == (3, 3)


def test_the_rest_of_a_message_that_comes_later_completes_it() -> None:
    assert handled_at_once_and_in_all(0, HELLO + PING[:5], PING[5:]) == (1, 2)


def test_messages_wait_in_line_once_their_user_has_had_a_turn() -> None:
    assert handled_at_once_and_in_all(SLICE_NS, HELLO + PING + PING) == (1, 3)
