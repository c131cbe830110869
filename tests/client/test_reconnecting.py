"""Tests of a client whose daemon dies, hangs, is full, or comes back."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client, patience
from kiwi_core.client.daemon_socket import DaemonSocket, welcomed
from kiwi_core.client.patience import Patience
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    EndBurst,
    Error,
    Granted,
    Hello,
    Ping,
    Role,
    Waiting,
)
from tests.client.scripted_daemon import (
    PATIENCE_S,
    ScriptedDaemon,
    answering,
    client_threads,
    eventually,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage
    from tests.client.scripted_daemon import Peer

    MakeClient = Callable[..., Client]


def test_a_wait_outlives_the_daemon(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    ticket = client.begin()
    daemon.await_received(Acquire)
    daemon.stop()
    eventually(lambda: not client.connected)
    daemon.grants = True
    daemon.start()
    assert ticket.wait(PATIENCE_S) == Granted(burst=1, quantum_s=30.0)
    assert daemon.received(Acquire) == [Acquire(burst=1), Acquire(burst=1)]
    assert [(h.burst, h.in_burst) for h in daemon.received(Hello)] == [(0, False), (1, False)]


def test_a_blocking_wait_outlives_the_daemon(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    told: list[Waiting] = []

    def on_waiting(waiting: Waiting) -> None:
        told.append(waiting)
        if len(told) == 1:
            daemon.stop()
            daemon.start()
        else:
            daemon.peer.say(Granted(burst=1, quantum_s=3.0))

    assert client.acquire(on_waiting=on_waiting).quantum_s == 3.0
    assert len(told) == 2


def test_a_wait_that_nobody_here_asked_for(daemon: ScriptedDaemon) -> None:
    """A call at this program's gate waits: the client passes on each message until the grant."""
    heard: list[Waiting | None] = []
    with Client(daemon.path, on_unforeseen=lambda: heard.append(client.unforeseen)) as client:
        client.connect()
        words = [Waiting(burst=0, position=place, ahead=place - 1) for place in (2, 1)]
        for word in words:
            daemon.peer.say(word)
        eventually(lambda: heard == words)
        daemon.peer.say(Granted(burst=0, quantum_s=1.0))
        eventually(lambda: client.unforeseen is None)
        daemon.peer.say(words[0])
        eventually(lambda: client.unforeseen is not None)
        daemon.stop()
        eventually(lambda: client.unforeseen is None)


def test_a_burst_outlives_the_daemon(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    daemon.stop()
    daemon.start()
    eventually(lambda: client.connected and len(daemon.received(Hello)) == 2)
    assert (daemon.received(Hello)[1].burst, daemon.received(Hello)[1].in_burst) == (1, True)
    daemon.peer.say(Granted(burst=1, quantum_s=4.0))
    client.end_burst()
    assert daemon.await_received(EndBurst) == [EndBurst(burst=1)]


def test_a_burst_that_ended_meanwhile_is_not_claimed(
    daemon: ScriptedDaemon, client: Client
) -> None:
    client.acquire()
    daemon.stop()
    eventually(lambda: not client.connected)
    client.end_burst()
    daemon.start()
    eventually(lambda: client.connected)
    hello = daemon.received(Hello)[1]
    assert (hello.burst, hello.in_burst) == (1, False)
    assert client.acquire().burst == 2


def test_a_burst_that_lingers_is_told_again(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    client.end_burst(lingering=True)
    daemon.await_received(EndBurst)
    daemon.stop()
    daemon.start()
    assert daemon.await_received(EndBurst, 2)[1] == EndBurst(burst=1, lingering=True)
    assert daemon.received(Hello)[1].in_burst
    client.end_burst()
    assert daemon.await_received(EndBurst, 3)[2] == EndBurst(burst=1)


@pytest.mark.parametrize("then", ["end", "linger", "begin"])
def test_what_happens_during_the_hello_is_told_after_it(
    daemon: ScriptedDaemon, client: Client, then: str
) -> None:
    """The hello says "in burst 1", which is no longer true when the welcome comes."""
    client.acquire()
    hellos = 0

    def script(peer: Peer, message: object) -> None:
        nonlocal hellos
        if isinstance(message, Hello):
            hellos += 1
            if hellos == 1:
                client.end_burst(lingering=then == "linger")
                if then == "begin":
                    client.begin()
        daemon.obey(peer, message)  # type: ignore[arg-type]

    daemon.script = script
    daemon.peer.drop()
    ended = daemon.await_received(EndBurst)
    assert ended[0] == EndBurst(burst=1, lingering=then == "linger")
    assert daemon.received(Hello)[1].in_burst
    if then == "begin":
        assert daemon.await_received(Acquire, 2)[1] == Acquire(burst=2)


def test_a_withdrawal_without_a_daemon_is_remembered(
    daemon: ScriptedDaemon, client: Client
) -> None:
    daemon.grants = False
    ticket = client.begin()
    daemon.stop()
    eventually(lambda: not client.connected)
    ticket.cancel()
    daemon.start()
    eventually(lambda: client.connected)
    client.ping()
    assert len(daemon.peer.received) == 2, "hello and ping, but no acquire"


def test_without_a_daemon_nobody_waits_for_long(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    client = make_client(daemon_grace_s=1.5)
    client.connect()
    began_s = time.monotonic()
    daemon.stop()
    with pytest.raises(PeerError) as caught:
        client.acquire()
    assert caught.value.code == "no-daemon"
    assert client._away_s <= time.monotonic() - began_s, "no time counts twice"
    # It is known to be away. Another grace would outlast this test's time limit.
    client._daemon_grace_s = client._away_s = 3600.0
    with pytest.raises(PeerError):
        client.acquire()
    daemon.start()
    eventually(lambda: client.connected)
    assert client.acquire().burst == 3


def test_a_full_daemon_is_waited_for_however_long_it_takes(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    """The daemon runs: to continue without it would use the GPU beside those who take turns."""
    client = make_client(daemon_grace_s=0.3)
    client.connect()
    turned_away: list[object] = []

    def full(peer: Peer, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            turned_away.append(message)
            peer.say(Error(code="too-many-sessions", message="Full.", fatal=True))
            peer.drop()
        else:
            daemon.obey(peer, message)

    daemon.script = full
    daemon.peer.drop()
    eventually(lambda: turned_away)
    told: list[Waiting] = []
    granted: list[Granted] = []
    waiting = threading.Thread(
        target=lambda: granted.append(client.acquire(on_waiting=told.append))
    )
    waiting.start()
    eventually(lambda: told and "full" in told[-1].activity)
    eventually(lambda: len(turned_away) > 5)  # for longer than the grace
    assert waiting.is_alive()
    daemon.script = daemon.obey
    waiting.join(PATIENCE_S)
    assert granted


def test_a_client_refused_before_the_hello_gets_the_reason(tmp_path: Path) -> None:
    """The daemon says why and closes at once; the hello cannot be sent."""
    line = encode(Error(code="too-many-connections", message="Full.", fatal=True))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "full.sock"))
        listener.listen()

        def turn_away() -> None:
            sock, _ = listener.accept()
            sock.sendall(line)
            sock.close()

        thread = threading.Thread(target=turn_away)
        thread.start()

        hello = Hello(protocol=PROTOCOL, role=Role.OBSERVER, client="late")
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(tmp_path / "full.sock"))
        thread.join(PATIENCE_S)
        link = DaemonSocket(sock)
        try:
            with pytest.raises(PeerError) as caught:
                welcomed(link, tmp_path / "full.sock", hello, Patience(PATIENCE_S))
        finally:
            link.close()
    assert caught.value.code == "too-many-connections"


def test_questions_without_a_daemon_fail_at_once(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.stop()
    eventually(lambda: not client.connected)
    with pytest.raises(PeerError) as caught:
        client.status()
    assert caught.value.code == "no-daemon"


def test_a_daemon_that_ends_before_its_welcome_is_none(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    """A program that may start a daemon starts another one, as if nobody listened."""
    daemon.script = lambda peer, _message: peer.drop()
    client = make_client()
    with pytest.raises(PeerError) as caught:
        client.connect()
    assert caught.value.code == "no-daemon"


def test_a_question_dies_with_its_connection(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.script = lambda peer, message: (
        peer.drop() if isinstance(message, Ping) else daemon.obey(peer, message)
    )
    with pytest.raises(PeerError) as caught:
        client.ping(PATIENCE_S)
    assert caught.value.code == "disconnected"


def test_a_silent_daemon_is_asked_and_then_left(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    """It accepts and welcomes, but does not answer a waiting client, nor a ping."""
    answering(daemon, Ping)
    daemon.grants = False
    client = make_client(daemon_grace_s=0.4)
    client.connect()
    answering(daemon, (Ping, Acquire))  # type: ignore[arg-type]
    ticket = client.begin()
    assert ticket.wait(0.01) is None

    def asked_and_left() -> bool:
        assert ticket.poll() is None
        # The client asked again on a new connection, so it has the welcome. It leaves that, too.
        return bool(daemon.received(Ping)) and len(daemon.received(Acquire)) >= 2

    eventually(asked_and_left)
    daemon.grants, daemon.script = True, daemon.obey
    daemon.peer.drop()
    assert ticket.wait(PATIENCE_S)


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_quiet_daemon_that_answers_is_not_left(
    daemon: ScriptedDaemon, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still until the client has its answer, however busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    daemon.grants = False
    client = make_client(daemon_grace_s=0.4)
    client.connect()
    ticket = client.begin()
    eventually(lambda: ticket.last_waiting)
    for pings in (1, 3, 5):
        clock.now_s += 0.3
        daemon.await_received(Ping, pings)
        client.ping()  # its answer comes after the one to the client's own question
        client._last_look(lambda: False)  # the client's thread counts no silence any more
    assert ticket.poll() is None
    assert len(daemon.peers) == 1


def test_without_reconnect_the_first_loss_is_the_last(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    states: list[bool] = []
    client = make_client(reconnect=False, on_state=states.append)
    client.connect()
    eventually(lambda: states == [True])
    daemon.grants = False
    ticket = client.begin()
    daemon.stop()
    eventually(lambda: states == [True, False])
    eventually(lambda: client_threads() == 0)
    with pytest.raises(PeerError):
        ticket.wait(PATIENCE_S)
    with pytest.raises(CallerError):
        client.acquire()


def test_the_state_is_told_as_it_changes(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    states: list[bool] = []
    make_client(on_state=states.append).connect()
    eventually(lambda: states == [True])
    daemon.stop()
    eventually(lambda: states == [True, False])
    daemon.start()
    eventually(lambda: states == [True, False, True])


def test_the_next_client_of_a_process_counts_on(
    daemon: ScriptedDaemon, client: Client, make_client: MakeClient
) -> None:
    """The daemon knows the process: to it, a smaller number would be an old request."""
    client.acquire()
    client.close()
    second = make_client()
    second.connect()
    assert (daemon.received(Hello)[1].burst, daemon.received(Hello)[1].in_burst) == (1, False)
    assert second.acquire().burst == 2
