"""Tests of the first connection, and of daemons that send fragments or nonsense."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    Error,
    GetStory,
    Granted,
    Hello,
    Pong,
    Role,
    StoryReport,
    Withdraw,
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

    from tests.client.scripted_daemon import Peer

    MakeClient = Callable[..., Client]


def test_no_daemon_is_said_with_a_remedy(tmp_path: Path) -> None:
    client = Client(tmp_path / "none.sock")
    with pytest.raises(PeerError) as caught:
        client.connect()
    assert caught.value.code == "no-daemon"
    assert "kiwi daemon" in caught.value.remedy
    assert not client.connected
    assert client_threads() == 0
    client.close()


def test_a_dead_daemons_socket_is_no_daemon(daemon: ScriptedDaemon) -> None:
    daemon.stop()
    with pytest.raises(PeerError) as caught:
        Client(daemon.path).connect()
    assert caught.value.code == "no-daemon"


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is forbidden to root")
def test_a_forbidden_socket_is_refused(daemon: ScriptedDaemon) -> None:
    daemon.path.chmod(0)
    with pytest.raises(CallerError) as caught:
        Client(daemon.path).connect()
    assert caught.value.code == "refused"


def test_a_hanging_daemon_is_given_up(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    answering(daemon, Hello)
    with pytest.raises(PeerError, match="does not answer") as caught:
        make_client(connect_timeout_s=0.1).connect()
    assert caught.value.code == "no-daemon"


def test_a_daemon_that_accepts_nobody_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(PeerError, match="accepts no connections") as caught:
            Client(path, connect_timeout_s=0.3).connect()
    assert caught.value.code == "no-daemon"


def test_a_signal_does_not_end_the_wait_for_a_daemon_that_accepts_nobody(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: came.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        test_a_daemon_that_accepts_nobody_is_given_up(tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Error(code="driver-mismatch", message="Mixed.", fatal=True), "driver-mismatch"),
        (Error(code="protocol-version", message="Old.", fatal=True), "protocol-version"),
        (Pong(), "out-of-order"),
        (b"HTTP/1.1 400 Bad Request\r\n", "malformed"),
        (b'{"type":"howdy"}\n', "unknown-type"),
        (b"x" * (2 << 20), "too-large"),
    ],
)
def test_a_daemon_that_does_not_welcome(
    daemon: ScriptedDaemon, make_client: MakeClient, answer: object, code: str
) -> None:
    answering(daemon, Hello, answer)
    with pytest.raises(PeerError) as caught:
        make_client().connect()
    assert caught.value.code == code


def test_a_daemon_of_another_version(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    answering(daemon, Hello, daemon.welcome(protocol=PROTOCOL + 1))
    with pytest.raises(PeerError) as caught:
        make_client().connect()
    assert caught.value.code == "protocol-version"


def test_connecting_twice_is_one_connection(daemon: ScriptedDaemon, client: Client) -> None:
    assert client.connect() == client.welcome
    assert len(daemon.peers) == 1


def test_closing_ends_everything_and_it_opens_again(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    client.close()
    client.close()
    assert not client.connected
    eventually(lambda: client_threads() == 0)
    eventually(lambda: daemon.peer.ended)
    client.connect()
    assert not daemon.received(Hello)[-1].in_burst
    assert client.acquire().burst == 2


def test_closing_frees_who_waits(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    failures: list[PeerError] = []

    def wait() -> None:
        with pytest.raises(PeerError) as caught:
            client.acquire()
        failures.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    daemon.await_received(Acquire)
    client.close()
    thread.join(PATIENCE_S)
    assert [failure.code for failure in failures] == ["disconnected"]


def test_half_messages_are_put_together(daemon: ScriptedDaemon, client: Client) -> None:
    def script(peer: Peer, message: object) -> None:
        answer = daemon.answer(message)  # type: ignore[arg-type]
        assert answer is not None
        for byte in encode(answer):
            peer.say_bytes(bytes([byte]))
            time.sleep(0.0005)

    daemon.script = script
    client.ping(PATIENCE_S)
    assert client.status(PATIENCE_S).uuid == "GPU-1"
    assert client.acquire().burst == 1
    assert len(daemon.peers) == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xfe\n",
        b"[]\n",
        b'{"type":"granted","burst":1}\n',
        encode(Pong()),
        encode(Granted(burst=99, quantum_s=1.0)),
        encode(Error(code="internal", message="Oh.", fatal=True)),
        b"y" * (2 << 20),
    ],
)
def test_nonsense_ends_the_connection_and_a_new_one_is_made(
    daemon: ScriptedDaemon, client: Client, nonsense: bytes
) -> None:
    client.acquire()
    with suppress(OSError):  # the client may not read to the end
        daemon.peer.say_bytes(nonsense)
    eventually(lambda: len(daemon.peers) == 2 and client.connected)
    client.end_burst()
    assert client.acquire().burst == 2


def test_a_superseded_client_does_not_fight(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.peer.say(Error(code="superseded", message="A newer connection.", fatal=True))
    eventually(lambda: client_threads() == 0)
    assert len(daemon.peers) == 1
    with pytest.raises(CallerError):
        client.begin()


def test_a_daemon_that_does_not_read_is_left(
    daemon: ScriptedDaemon, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_core.client.daemon_socket._SEND_TIMEOUT_S", 0.2)
    client = make_client()
    client.connect()
    stuck = threading.Event()

    def script(peer: Peer, message: object) -> None:
        stuck.wait(PATIENCE_S)

    daemon.script = script
    failures: list[str] = []
    while failures[-1:] in ([], ["timeout"]):
        with pytest.raises(PeerError) as caught:
            client._ask(GetStory(session="s" * 60_000), StoryReport, 0.0)
        failures.append(caught.value.code)
        assert len(failures) < 200, "a socket's buffer holds less"
    assert failures[-1] in ("disconnected", "no-daemon")
    daemon.script = daemon.obey
    stuck.set()
    eventually(lambda: client.connected)


def test_an_observer_only_looks(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    client = make_client(role=Role.OBSERVER)
    client.connect()
    assert client.status().uuid == "GPU-1"
    client.set(tq_s=2.0)
    assert daemon.received(Hello)[0].role is Role.OBSERVER
    assert daemon.received(Withdraw) == []
