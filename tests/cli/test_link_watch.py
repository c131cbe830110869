"""Tests of the burst of ``kiwi run``, which the library in its program takes over."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from kiwi_core.cli.run import LinkWatch
from kiwi_core.states import MovedBy


class SlowDaemon:
    """A client whose daemon answers when the test lets it."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(session="k1")
        self.asked, self.answers = threading.Event(), threading.Event()
        self.ended: list[dict[str, bool]] = []

    def status(self, _timeout_s: float) -> Any:
        self.asked.set()
        assert self.answers.wait(60)
        return SimpleNamespace(sessions=[SimpleNamespace(id="k1", pager=MovedBy.INPROCESS)])

    def end_burst(self, **how: bool) -> None:
        self.ended.append(how)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kiwi link"]


def gone() -> None:
    for thread in watchers():
        thread.join(60)
    assert not watchers()


def test_the_burst_is_the_librarys_as_soon_as_it_is_there() -> None:
    client: Any = SlowDaemon()
    client.answers.set()
    LinkWatch(client)
    gone()
    assert client.ended == [{"lingering": True}]


def test_a_program_that_is_over_does_not_wait_for_a_daemon_that_is_busy() -> None:
    client: Any = SlowDaemon()
    watch = LinkWatch(client)
    assert client.asked.wait(60)
    watch.stop()
    assert watchers(), "the daemon has not answered yet"
    client.end_burst()  # like its caller
    client.answers.set()
    gone()
    assert client.ended == [{}], "and it is ended once"
