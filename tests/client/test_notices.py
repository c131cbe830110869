"""Tests of messages that a client did not ask for: notices and changes of the status."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client
from kiwi_core.errors import PeerError
from kiwi_core.states import Notice
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import (
    GetStatus,
    Hello,
    Ping,
    Pong,
    StatusReport,
    UserNotice,
)
from tests.client.scripted_daemon import (
    ScriptedDaemon,
    answering,
    eventually,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeClient = Callable[..., Client]


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
    assert eventually(lambda: told) == [notice]


def test_watching_shows_changes_and_skips_old_ones(daemon: ScriptedDaemon, client: Client) -> None:
    watch = client.watch()
    assert next(watch).scheduler.tq_s == 30.0
    assert daemon.received(GetStatus) == [GetStatus(watch=True)]
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
