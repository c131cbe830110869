"""Tests of asking for the GPU: granted at once, after a wait, cancelled, ended."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client, LeaseCancelled
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.messages import (
    Acquire,
    EndBurst,
    Error,
    Granted,
    Hello,
    Role,
    Waiting,
    Withdraw,
    Withdrawn,
)
from tests.client.scripted_daemon import PATIENCE_S, ScriptedDaemon, eventually

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_hello_says_who_this_is(daemon: ScriptedDaemon, client: Client) -> None:
    (hello,) = daemon.received(Hello)
    assert (hello.name, hello.role, hello.burst, hello.in_burst) == (
        "note.ipynb", Role.SESSION, 0, False,
    )  # fmt: skip
    assert client.connected
    assert client.welcome is not None
    assert client.welcome.gpu_uuid == "GPU-1"


def test_a_free_gpu_is_granted_and_given_back(daemon: ScriptedDaemon, client: Client) -> None:
    for burst in (1, 2, 3):
        assert client.acquire() == Granted(burst=burst, quantum_s=30.0)
        client.end_burst()
    assert daemon.await_received(EndBurst, 3) == [
        EndBurst(burst=1), EndBurst(burst=2), EndBurst(burst=3),
    ]  # fmt: skip
    assert daemon.received(Acquire) == [Acquire(burst=1), Acquire(burst=2), Acquire(burst=3)]


def test_a_burst_that_lingers_ends_twice(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    client.end_burst(lingering=True)
    client.end_burst(lingering=True)
    client.ping()
    client.end_burst()
    client.end_burst()
    client.ping()
    assert daemon.received(EndBurst) == [EndBurst(burst=1, lingering=True), EndBurst(burst=1)]


def test_a_late_end_of_an_older_burst_is_not_the_end_of_this_one(
    daemon: ScriptedDaemon, client: Client
) -> None:
    client.acquire()
    client.end_burst(lingering=True)
    client.acquire()
    client.end_burst(burst=1)
    client.ping()
    assert daemon.received(EndBurst) == [EndBurst(burst=1, lingering=True)]
    client.end_burst(burst=2)
    assert daemon.await_received(EndBurst, 2)[-1] == EndBurst(burst=2)


def test_ending_without_a_burst_says_nothing(daemon: ScriptedDaemon, client: Client) -> None:
    client.end_burst()
    client.ping()
    assert daemon.received(EndBurst) == []


def test_waiting_is_told_in_the_callers_thread(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    told: list[tuple[int, threading.Thread]] = []

    def on_waiting(waiting: Waiting) -> None:
        told.append((waiting.position, threading.current_thread()))
        if waiting.position == 1:
            daemon.peer.say(Waiting(burst=1, position=0, ahead=0))
        else:
            daemon.peer.say(Granted(burst=1, quantum_s=5.0))

    assert client.acquire(on_waiting=on_waiting).quantum_s == 5.0
    assert told == [(1, threading.current_thread()), (0, threading.current_thread())]


def test_cancelling_withdraws(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    with pytest.raises(LeaseCancelled):
        client.acquire(cancelled=lambda: bool(daemon.received(Acquire)), poll_s=0.01)
    assert daemon.await_received(Withdraw) == [Withdraw(burst=1)]
    daemon.grants = True
    assert client.acquire().burst == 2


def test_cancelled_is_asked_again_while_the_daemon_says_nothing(
    daemon: ScriptedDaemon, client: Client
) -> None:
    daemon.script = lambda peer, message: (
        None if isinstance(message, Acquire) else daemon.obey(peer, message)
    )
    answers = iter([False] * 5 + [True])
    with pytest.raises(LeaseCancelled):
        client.acquire(cancelled=lambda: next(answers), poll_s=0.01)


def test_a_grant_that_crosses_the_withdrawal_is_not_taken(
    daemon: ScriptedDaemon, client: Client
) -> None:
    daemon.grants = False

    def script(peer: object, message: object) -> None:
        if isinstance(message, Withdraw):
            daemon.peer.say(
                Granted(burst=message.burst, quantum_s=1.0), Withdrawn(burst=message.burst)
            )
        else:
            daemon.obey(daemon.peer, message)  # type: ignore[arg-type]

    daemon.script = script
    ticket = client.begin()
    ticket.cancel()
    client.ping()
    with pytest.raises(LeaseCancelled):
        ticket.poll()
    client.end_burst()
    client.ping()
    assert daemon.received(EndBurst) == []


def test_an_exception_of_the_waiting_callback_gives_the_wait_up(
    daemon: ScriptedDaemon, client: Client
) -> None:
    daemon.grants = False

    def on_waiting(waiting: Waiting) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.acquire(on_waiting=on_waiting)
    assert daemon.await_received(Withdraw) == [Withdraw(burst=1)]


def test_a_timeout_gives_the_wait_up(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    with pytest.raises(PeerError) as caught:
        client.acquire(timeout_s=0.05)
    assert caught.value.code == "timeout"
    assert daemon.await_received(Withdraw) == [Withdraw(burst=1)]


def test_a_refused_wish_fails_with_the_daemons_words(
    daemon: ScriptedDaemon, client: Client
) -> None:
    def script(peer: object, message: object) -> None:
        if isinstance(message, Acquire):
            daemon.peer.say(
                Error(code="no-room", message="Too big.", remedy="Buy.", about="acquire")
            )
        else:
            daemon.obey(daemon.peer, message)  # type: ignore[arg-type]

    daemon.script = script
    with pytest.raises(PeerError, match=r"Too big\. Buy\.") as caught:
        client.acquire()
    assert caught.value.code == "no-room"
    assert daemon.await_received(Withdraw) == [Withdraw(burst=1)], "so that both ends agree"
    daemon.script = daemon.obey
    assert client.acquire().burst == 2


def test_only_one_wish_at_a_time(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    ticket = client.begin()
    with pytest.raises(CallerError) as caught:
        client.acquire()
    assert caught.value.code == "in-burst"
    assert ticket.poll() is None
    assert daemon.received(Withdraw) == [], "the failed second wish must not end the first"
    daemon.peer.say(Granted(burst=1, quantum_s=1.0))
    assert eventually(ticket.poll)
    with pytest.raises(CallerError, match="already holds"):
        client.begin()


def test_a_ticket_shows_where_it_stands(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    ticket = client.begin()
    assert ticket.wait(0.0) is None
    assert eventually(lambda: ticket.last_waiting).holder == "other.ipynb"  # type: ignore[union-attr]
    assert ticket.wait(0.01) is None
    daemon.peer.say(Granted(burst=1, quantum_s=2.0))
    assert ticket.wait(PATIENCE_S) == Granted(burst=1, quantum_s=2.0)
    assert ticket.poll() == Granted(burst=1, quantum_s=2.0)
    assert ticket.burst == 1


def test_cancelling_a_granted_ticket_ends_the_burst(daemon: ScriptedDaemon, client: Client) -> None:
    ticket = client.begin()
    assert ticket.wait(PATIENCE_S)
    ticket.cancel()
    ticket.cancel()
    assert daemon.await_received(EndBurst) == [EndBurst(burst=1)]
    with pytest.raises(LeaseCancelled):
        ticket.poll()


def test_a_grant_is_repeated_after_a_suspension(daemon: ScriptedDaemon, client: Client) -> None:
    ticket = client.begin()
    assert ticket.wait(PATIENCE_S)
    daemon.peer.say(Granted(burst=1, quantum_s=7.0))
    assert eventually(lambda: (g := ticket.poll()) is not None and g.quantum_s == 7.0)
    client.end_burst()
    assert client.acquire().burst == 2


def test_an_observer_never_asks_for_the_gpu(make_client: Callable[..., Client]) -> None:
    client = make_client(role=Role.OBSERVER)
    client.connect()
    with pytest.raises(CallerError) as caught:
        client.acquire()
    assert caught.value.code == "observer"
    client.ping()
    with pytest.raises(CallerError) as caught:
        client.goodbye(1.0)
    assert caught.value.code == "out-of-order"


def test_nothing_is_asked_before_connecting(make_client: Callable[..., Client]) -> None:
    client = make_client()
    for call in (client.acquire, client.begin, client.status, client.release):
        with pytest.raises(CallerError) as caught:
            call()
        assert caught.value.code == "not-connected"
    client.end_burst()
    assert not client.connected


def test_fifty_threads_share_one_client(daemon: ScriptedDaemon, client: Client) -> None:
    failures: list[BaseException] = []
    bursts: list[int] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                if number % 2:
                    assert client.status(PATIENCE_S).uuid == "GPU-1"
                    client.ping(PATIENCE_S)
                    client.story(f"s{number}")
                    continue
                while True:
                    try:
                        bursts.append(client.acquire().burst)
                        break
                    except CallerError:  # it is another thread's turn
                        time.sleep(0.001)
                client.end_burst(burst=bursts[-1])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert sorted(bursts) == list(range(1, 126))
    assert len(daemon.peers) == 1, "no connection was lost on the way"
