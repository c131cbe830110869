"""Tests of questions to a daemon and their answers, and of leaving."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import Client
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.states import AntiThrash
from kiwi_core.wire.messages import (
    BringBack,
    EndBurst,
    Error,
    GetHistory,
    GetStatus,
    Goodbye,
    Ok,
    Ping,
    Release,
    Set,
    StatusReport,
)
from tests.client.scripted_daemon import (
    PATIENCE_S,
    ScriptedDaemon,
    answering,
    client_threads,
    eventually,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeClient = Callable[..., Client]


def test_questions_are_answered(daemon: ScriptedDaemon, client: Client) -> None:
    assert client.status().uuid == "GPU-1"
    client.set(tq_s=5.0, anti_thrash=AntiThrash.ALWAYS)
    assert daemon.received(Set) == [Set(tq_s=5.0, anti_thrash=AntiThrash.ALWAYS)]
    assert client.status().scheduler.tq_s == 5.0
    assert [line.text for line in client.story("s1")] == ["it began"]
    client.release()
    client.release("s7")
    assert daemon.received(Release) == [Release(), Release(session="s7")]
    client.ping()


def test_a_hint_is_answered_with_words(daemon: ScriptedDaemon, client: Client) -> None:
    assert client.bring_back() == (True, "")
    assert client.bring_back("s7") == (False, "it runs")
    assert daemon.received(BringBack) == [BringBack(), BringBack(session="s7")]


def test_a_history_in_parts_is_put_together(daemon: ScriptedDaemon, client: Client) -> None:
    history = client.history()
    assert (history.last, history.more) == (2, False)
    assert [(entry.serial, entry.ended_ago_s) for entry in history.entries] == [(2, 1.0)]
    assert history.sessions["s1"].name == "a.ipynb"
    assert daemon.received(GetHistory) == [GetHistory(since=0), GetHistory(since=1)]
    assert client.history(since=2).entries == []


def test_a_bad_setting_is_not_even_sent(daemon: ScriptedDaemon, client: Client) -> None:
    with pytest.raises(CallerError) as caught:
        client.set(tq_s=0.0)
    assert caught.value.code == "bad-setting"
    client.ping()
    assert daemon.received(Set) == []


def test_an_error_answers_the_question(daemon: ScriptedDaemon, client: Client) -> None:
    answering(daemon, Set, Error(code="not-allowed", message="Not yours.", remedy="Ask."))
    with pytest.raises(PeerError, match=r"Not yours\. Ask\.") as caught:
        client.set(tq_s=5.0)
    assert caught.value.code == "not-allowed"
    client.ping()
    assert len(daemon.peers) == 1


def test_a_slow_answer_is_overtaken_by_a_quick_one(daemon: ScriptedDaemon, client: Client) -> None:
    """A daemon reads the memory before it answers a release; another thread asks meanwhile."""
    answering(daemon, Release)
    releasing = threading.Thread(target=client.release, args=("", PATIENCE_S))
    releasing.start()
    daemon.await_received(Release)
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
    assert daemon.received(EndBurst) == [EndBurst(burst=1)]
    assert daemon.received(Goodbye)
    assert not client.connected
    eventually(lambda: client_threads() == 0)
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
    eventually(lambda: client_threads() == 0)
    assert len(daemon.peers) == 1


def test_goodbye_without_a_daemon_is_quick(daemon: ScriptedDaemon, client: Client) -> None:
    daemon.stop()
    eventually(lambda: not client.connected)
    client.goodbye(PATIENCE_S)
    assert client_threads() == 0
