"""Tests of an interrupt at each single place of the client's code (``interrupting``)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from interrupting import each_place, interrupt_at

from kiwi_core.client import LeaseCancelled, connection
from kiwi_core.wire.messages import Acquire, EndBurst, GetStatus, Ping, Withdraw
from tests.client.scripted_daemon import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.client import Client
    from tests.client.scripted_daemon import ScriptedDaemon


def test_a_burst_and_questions(daemon: ScriptedDaemon, client: Client) -> None:
    """Whatever was interrupted, the connection is the same, and each question gets its own
    answer."""

    def act() -> None:
        client.acquire()
        client.end_burst()
        client.ping(PATIENCE_S)
        client.status(PATIENCE_S)

    for place in each_place(act):
        client.end_burst()
        daemon.tq_s = float(place)
        assert client.status(PATIENCE_S).scheduler.tq_s == place
        client.ping(PATIENCE_S)
    act()
    assert len(daemon.peers) == 1
    *_, acquire, end, ping, status = daemon.peer.received
    assert isinstance(acquire, Acquire)
    assert (end, ping, status) == (EndBurst(burst=acquire.burst), Ping(), GetStatus())


def test_a_wait(daemon: ScriptedDaemon, client: Client) -> None:
    """The place in the queue is free afterwards or was never taken, also when the interrupt comes
    while the wait is already being cancelled."""
    daemon.grants = False
    looks = 0

    def again() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    def act() -> None:
        nonlocal looks
        looks = 0
        client.acquire(cancelled=again, poll_s=0.001)

    place = 0
    while True:
        try:
            with interrupt_at(place):
                act()
        except LeaseCancelled:
            break
        client.ping(PATIENCE_S)
        asked = [m for m in daemon.peer.received if isinstance(m, (Acquire, Withdraw))]
        assert not asked or isinstance(asked[-1], Withdraw), place
        place += 1
    assert place > 20
    assert len(daemon.peers) == 1


def test_a_request_that_was_cut_short_keeps_nobody_out(client: Client) -> None:
    """Nobody has the ticket, so nobody could end that burst."""
    for _ in each_place(client.begin):
        client.acquire()
        client.end_burst()


def test_the_clients_own_thread_finishes_interrupted_questions(
    daemon: ScriptedDaemon, client: Client
) -> None:
    """Another thread's questions are answered although a question was interrupted."""
    for _ in each_place(lambda: client.ping(PATIENCE_S)):
        asked = threading.Thread(target=client.status, args=(PATIENCE_S,))
        asked.start()
        asked.join(PATIENCE_S)
        assert not asked.is_alive()
    assert daemon.received(Ping)
    assert len(daemon.peers) == 1


def test_a_client_that_is_being_closed(
    make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread and its connection end all the same."""
    monkeypatch.setattr(connection, "_LOOK_EVERY_S", 0.05)  # the wake-up may be what is lost
    place = 1  # before the first one nothing is done
    while True:
        client = make_client()
        client.connect()
        with interrupt_at(place) as struck:
            client.close()
        if not struck:
            break
        eventually(lambda client=client: client._thread is None and client._wake_fd < 0)  # type: ignore[misc]
        place += 1
    assert place > 20


def test_a_watch_begins_again(make_client: Callable[..., Client]) -> None:
    place = 0
    while True:
        client = make_client()
        client.connect()
        watch = client.watch()
        with interrupt_at(place) as struck:
            next(watch)
        if not struck:
            break
        assert next(client.watch()).uuid
        client.close()
        place += 1
    assert place > 5
