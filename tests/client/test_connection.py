"""Connecting, staying connected, and daemons that die, hang, lie or stammer."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client
from kiwi_core.client.daemon_socket import DaemonSocket, welcomed
from kiwi_core.client.patience import Patience
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.states import AntiThrash, Notice
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    BringBack,
    EndBurst,
    Error,
    GetHistory,
    GetStatus,
    GetStory,
    Goodbye,
    Granted,
    Hello,
    Ok,
    Ping,
    Pong,
    Release,
    Role,
    Set,
    StatusReport,
    UserNotice,
    Waiting,
    Withdraw,
)
from tests.client.scripted_daemon import PATIENCE_S, ScriptedDaemon, eventually, status_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage
    from tests.client.scripted_daemon import Peer

    MakeClient = Callable[..., Client]


def threads() -> int:
    return sum(thread.name == "kiwi-client" for thread in threading.enumerate())


def answering(daemon: ScriptedDaemon, kind: type, *answers: object) -> None:
    """Script: ``kind`` is answered by ``answers`` (bytes as they are), the rest as usual."""

    def script(peer: Peer, message: object) -> None:
        if not isinstance(message, kind):
            daemon.obey(peer, message)  # type: ignore[arg-type]
            return
        for answer in answers:
            if isinstance(answer, bytes):
                peer.say_bytes(answer)
            else:
                peer.say(answer)  # type: ignore[arg-type]

    daemon.script = script


# --- the first connection -------------------------------------------------------------------------


def test_no_daemon_is_said_with_a_remedy(tmp_path: Path) -> None:
    client = Client(tmp_path / "none.sock")
    with pytest.raises(PeerError) as caught:
        client.connect()
    assert caught.value.code == "no-daemon"
    assert "kiwi daemon" in caught.value.remedy
    assert not client.connected
    assert threads() == 0
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
    eventually(lambda: threads() == 0)
    eventually(lambda: daemon.peer.ended)
    client.connect()
    assert not daemon.heard(Hello)[-1].in_burst
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
    daemon.await_heard(Acquire)
    client.close()
    thread.join(PATIENCE_S)
    assert [failure.code for failure in failures] == ["disconnected"]


# --- questions ------------------------------------------------------------------------------------


def test_questions_are_answered(daemon: ScriptedDaemon, client: Client) -> None:
    assert client.status().uuid == "GPU-1"
    client.set(tq_s=5.0, anti_thrash=AntiThrash.ALWAYS)
    assert daemon.heard(Set) == [Set(tq_s=5.0, anti_thrash=AntiThrash.ALWAYS)]
    assert client.status().scheduler.tq_s == 5.0
    assert [line.text for line in client.story("s1")] == ["it began"]
    client.release()
    client.release("s7")
    assert daemon.heard(Release) == [Release(), Release(session="s7")]
    client.ping()


def test_a_hint_is_answered_with_words(daemon: ScriptedDaemon, client: Client) -> None:
    assert client.bring_back() == (True, "")
    assert client.bring_back("s7") == (False, "it runs")
    assert daemon.heard(BringBack) == [BringBack(), BringBack(session="s7")]


def test_a_history_in_parts_is_put_together(daemon: ScriptedDaemon, client: Client) -> None:
    history = client.history()
    assert (history.last, history.more) == (2, False)
    assert [(entry.serial, entry.ended_ago_s) for entry in history.entries] == [(2, 1.0)]
    assert history.sessions["s1"].name == "a.ipynb"
    assert daemon.heard(GetHistory) == [GetHistory(since=0), GetHistory(since=1)]
    assert client.history(since=2).entries == []


def test_a_bad_setting_is_not_even_sent(daemon: ScriptedDaemon, client: Client) -> None:
    with pytest.raises(CallerError) as caught:
        client.set(tq_s=0.0)
    assert caught.value.code == "bad-setting"
    client.ping()
    assert daemon.heard(Set) == []


def test_an_error_answers_the_question(daemon: ScriptedDaemon, client: Client) -> None:
    answering(daemon, Set, Error(code="not-allowed", message="Not yours.", remedy="Ask."))
    with pytest.raises(PeerError, match=r"Not yours\. Ask\.") as caught:
        client.set(tq_s=5.0)
    assert caught.value.code == "not-allowed"
    client.ping()
    assert len(daemon.peers) == 1


def test_what_takes_its_time_is_overtaken(daemon: ScriptedDaemon, client: Client) -> None:
    """A daemon looks at the memory before it answers a release; another thread asks meanwhile."""
    answering(daemon, Release)
    releasing = threading.Thread(target=client.release, args=("", PATIENCE_S))
    releasing.start()
    daemon.await_heard(Release)
    client.ping()
    assert releasing.is_alive()
    daemon.peer.say(Ok())
    releasing.join(PATIENCE_S)
    assert not releasing.is_alive()
    client.ping()
    assert len(daemon.peers) == 1, "the connection must have lasted"


def test_an_answer_that_does_not_come_is_not_waited_for(
    daemon: ScriptedDaemon, client: Client
) -> None:
    answering(daemon, Ping)
    with pytest.raises(PeerError) as caught:
        client.ping(timeout_s=0.05)
    assert caught.value.code == "timeout"


def test_a_late_answer_is_not_taken_for_the_next_ones(
    daemon: ScriptedDaemon, client: Client
) -> None:
    answering(daemon, GetStatus)
    with pytest.raises(PeerError):
        client.status(timeout_s=0.05)
    answering(daemon, GetStatus, StatusReport(gpu=status_of(1.0)), StatusReport(gpu=status_of(2.0)))
    assert client.status(PATIENCE_S).scheduler.tq_s == 2.0


def test_a_daemon_that_answers_nothing_is_left_in_the_end(
    daemon: ScriptedDaemon, client: Client
) -> None:
    answering(daemon, Ping)
    for _ in range(300):
        with pytest.raises(PeerError):
            client.ping(timeout_s=0.0)
    eventually(lambda: len(daemon.peers) == 2)


def test_goodbye_ends_the_burst_and_closes(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    client.goodbye(PATIENCE_S)
    assert daemon.heard(EndBurst) == [EndBurst(burst=1)]
    assert daemon.heard(Goodbye)
    assert not client.connected
    eventually(lambda: threads() == 0)
    assert len(daemon.peers) == 1, "who left does not come back by itself"
    client.connect()
    assert len(daemon.peers) == 2


def test_goodbye_may_take_long(daemon: ScriptedDaemon, client: Client) -> None:
    answering(daemon, Goodbye)
    with pytest.raises(PeerError) as caught:
        client.goodbye(0.05)
    assert caught.value.code == "timeout"
    assert client.connected
    daemon.peer.say(Ok())
    daemon.peer.drop()
    eventually(lambda: threads() == 0)
    assert len(daemon.peers) == 1


def test_goodbye_without_a_daemon_is_quick(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.stop()
    eventually(lambda: not client.connected)
    client.goodbye(PATIENCE_S)
    assert threads() == 0


# --- what comes unasked ---------------------------------------------------------------------------


def test_notices_come_unasked(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    told: list[UserNotice] = []
    client = make_client(on_notice=told.append)
    client.connect()
    notice = UserNotice(notice=Notice.SUSPENDED, text="Your turn is over.")
    daemon.peer.say(notice)
    assert eventually(lambda: told) == [notice]


def test_a_notice_with_an_answer_is_not_lost(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    told: list[UserNotice] = []
    client = make_client(on_notice=told.append)
    client.connect()
    notice = UserNotice(notice=Notice.LOST, text="Gone.", remedy="Restart.")
    answering(daemon, Ping, encode(notice) + encode(Pong()) + encode(notice))
    client.ping()
    assert eventually(lambda: len(told) == 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_breaks_nothing(
    daemon: ScriptedDaemon, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))

    def fail(_: object) -> None:
        raise ZeroDivisionError

    client = make_client(on_notice=fail, on_state=fail)
    client.connect()
    daemon.peer.say(UserNotice(notice=Notice.RESUMED, text="On."))
    eventually(lambda: shown == [ZeroDivisionError] * 2)
    client.ping()


def test_what_came_with_the_welcome_is_not_lost(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    notice = UserNotice(notice=Notice.RESUMED, text="On.")
    answering(daemon, Hello, encode(daemon.welcome()) + encode(notice))
    told: list[UserNotice] = []
    client = make_client(on_notice=told.append)
    client.connect()
    assert told == [notice]


def test_watching_shows_changes_and_skips_old_ones(daemon: ScriptedDaemon, client: Client) -> None:
    watch = client.watch()
    assert next(watch).scheduler.tq_s == 30.0
    assert daemon.heard(GetStatus) == [GetStatus(watch=True)]
    for tq_s in (1.0, 2.0, 3.0):
        daemon.peer.say(StatusReport(gpu=status_of(tq_s)))
    while next(watch).scheduler.tq_s != 3.0:
        pass
    assert client.status().scheduler.tq_s == 30.0, "a question among the reports is answered"
    second = client.watch()
    assert next(second).scheduler.tq_s == 30.0, "who comes later sees the latest at once"
    client.close()
    assert list(second) == []


def test_a_watch_outlives_the_daemon(daemon: ScriptedDaemon, client: Client) -> None:
    watch = client.watch()
    next(watch)
    daemon.stop()
    daemon.tq_s = 9.0
    daemon.start()
    assert next(watch).scheduler.tq_s == 9.0


def test_a_watch_ends_without_a_daemon(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    client = make_client(daemon_grace_s=0.1)
    client.connect()
    watch = client.watch()
    next(watch)
    daemon.stop()
    with pytest.raises(PeerError) as caught:
        list(watch)
    assert caught.value.code == "no-daemon"


# --- daemons come and go --------------------------------------------------------------------------


def test_a_wait_outlives_the_daemon(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.grants = False
    ticket = client.begin()
    daemon.await_heard(Acquire)
    daemon.stop()
    eventually(lambda: not client.connected)
    daemon.grants = True
    daemon.start()
    assert ticket.wait(PATIENCE_S) == Granted(burst=1, quantum_s=30.0)
    assert daemon.heard(Acquire) == [Acquire(burst=1), Acquire(burst=1)]
    assert [(h.burst, h.in_burst) for h in daemon.heard(Hello)] == [(0, False), (1, False)]


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
    """A call at the gate of this program waits: each word is passed on, until it has the GPU."""
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
    eventually(lambda: client.connected and len(daemon.heard(Hello)) == 2)
    assert (daemon.heard(Hello)[1].burst, daemon.heard(Hello)[1].in_burst) == (1, True)
    daemon.peer.say(Granted(burst=1, quantum_s=4.0))
    client.end_burst()
    assert daemon.await_heard(EndBurst) == [EndBurst(burst=1)]


def test_a_burst_that_ended_meanwhile_is_not_claimed(
    daemon: ScriptedDaemon, client: Client
) -> None:
    client.acquire()
    daemon.stop()
    eventually(lambda: not client.connected)
    client.end_burst()
    daemon.start()
    eventually(lambda: client.connected)
    hello = daemon.heard(Hello)[1]
    assert (hello.burst, hello.in_burst) == (1, False)
    assert client.acquire().burst == 2


def test_a_burst_that_lingers_is_told_again(daemon: ScriptedDaemon, client: Client) -> None:
    client.acquire()
    client.end_burst(lingering=True)
    daemon.await_heard(EndBurst)
    daemon.stop()
    daemon.start()
    assert daemon.await_heard(EndBurst, 2)[1] == EndBurst(burst=1, lingering=True)
    assert daemon.heard(Hello)[1].in_burst
    client.end_burst()
    assert daemon.await_heard(EndBurst, 3)[2] == EndBurst(burst=1)


@pytest.mark.parametrize("then", ["end", "linger", "begin"])
def test_what_happens_during_the_hello_is_told_after_it(
    daemon: ScriptedDaemon, client: Client, then: str
) -> None:
    """The hello says "in burst 1", and that is no longer true when the welcome comes."""
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
    ended = daemon.await_heard(EndBurst)
    assert ended[0] == EndBurst(burst=1, lingering=then == "linger")
    assert daemon.heard(Hello)[1].in_burst
    if then == "begin":
        assert daemon.await_heard(Acquire, 2)[1] == Acquire(burst=2)


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
    assert len(daemon.peer.heard) == 2, "hello and ping, but no acquire"


def test_without_a_daemon_nobody_waits_for_long(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    client = make_client(daemon_grace_s=0.3)
    client.connect()
    daemon.stop()
    with pytest.raises(PeerError) as caught:
        client.acquire()
    assert caught.value.code == "no-daemon"
    started_s = time.monotonic()
    with pytest.raises(PeerError):
        client.acquire()
    assert time.monotonic() - started_s < PATIENCE_S / 2, "known to be away: no second grace"
    daemon.start()
    eventually(lambda: client.connected)
    assert client.acquire().burst == 3


def test_a_full_daemon_is_waited_for_however_long_it_takes(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    """It is there: to go on without it would be to use the GPU beside those who take turns."""
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


def test_who_is_turned_away_before_the_hello_hears_why(tmp_path: Path) -> None:
    """The daemon says why and closes at once; the hello has nowhere to go."""
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
                welcomed(link, hello, Patience(PATIENCE_S))
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
    """Whoever may starts another one, as where nobody listens."""
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
    """It accepts and welcomes, but owes its word to one who waits, and even a pong."""
    answering(daemon, Ping)
    daemon.grants = False
    client = make_client(daemon_grace_s=0.4, connect_timeout_s=0.2)
    client.connect()
    answering(daemon, (Ping, Acquire))  # type: ignore[arg-type]
    ticket = client.begin()
    assert ticket.wait(0.01) is None

    def asked_and_left() -> bool:
        assert ticket.poll() is None
        # Asked again on a new connection, so the welcome is behind it.
        return bool(daemon.heard(Ping)) and len(daemon.heard(Acquire)) == 2

    eventually(asked_and_left)
    daemon.script = daemon.obey
    daemon.peer.say(Granted(burst=1, quantum_s=1.0))
    assert ticket.wait(PATIENCE_S)


def test_a_quiet_daemon_that_answers_is_not_left(
    daemon: ScriptedDaemon, make_client: MakeClient
) -> None:
    daemon.grants = False
    client = make_client(daemon_grace_s=0.4)
    client.connect()
    ticket = client.begin()
    while len(daemon.heard(Ping)) < 3:
        assert ticket.wait(0.01) is None
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
    eventually(lambda: threads() == 0)
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
    """The daemon knows the process: a number that went back would be an old wish to it."""
    client.acquire()
    client.close()
    second = make_client()
    second.connect()
    assert (daemon.heard(Hello)[1].burst, daemon.heard(Hello)[1].in_burst) == (1, False)
    assert second.acquire().burst == 2


# --- daemons that stammer -------------------------------------------------------------------------


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
    eventually(lambda: threads() == 0)
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
            client._channel.ask(GetStory(session="s" * 60_000), 0.0)
        failures.append(caught.value.code)
        assert len(failures) < 200, "a socket's buffer holds less"
    assert failures[-1] == "no-daemon"
    daemon.script = daemon.obey
    stuck.set()
    eventually(lambda: client.connected)


def test_an_observer_only_looks(daemon: ScriptedDaemon, make_client: MakeClient) -> None:
    client = make_client(role=Role.OBSERVER)
    client.connect()
    assert client.status().uuid == "GPU-1"
    client.set(tq_s=2.0)
    assert daemon.heard(Hello)[0].role is Role.OBSERVER
    assert daemon.heard(Withdraw) == []
