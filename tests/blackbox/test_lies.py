"""Tests that false numbers from a library cost only its own program."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from patience import wait_until
from unprivileged import PATIENCE_S, RootDaemon, needs_other_users, root_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST = 2**53 - 1


@pytest.fixture
def daemon() -> Iterator[RootDaemon]:
    needs_other_users()
    with root_daemon() as one:
        yield one


class Library:
    """This process acts as the preloaded library."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(PATIENCE_S)
        self._sock.connect(path)
        self._file = self._sock.makefile("rb")
        self.say("hello", protocol=1, role="pager", client="liar", name="liar")
        assert self.hear("welcome")["session"]

    def say(self, kind: str, **fields: Any) -> None:
        self._sock.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def hear(self, kind: str) -> Any:
        while (message := json.loads(self._file.readline()))["type"] != kind:
            pass
        return message

    def heard_of(self) -> None:
        """Wait until the daemon has handled everything that was sent."""
        self.say("ping")
        self.hear("pong")

    def close(self) -> None:
        self._file.close()
        self._sock.close()


@pytest.fixture
def library(daemon: RootDaemon) -> Iterator[Library]:
    with ExitStack() as stack:
        one = Library(str(daemon.socket))
        stack.callback(one.close)
        yield one


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("field", ["arena_bytes", "paged_out_bytes"])
def test_nobody_holds_more_than_the_machine_has(
    daemon: RootDaemon, library: Library, field: str
) -> None:
    state = "out" if field == "paged_out_bytes" else "resident"
    library.say("pager-state", state=state, **{field: LARGEST})
    library.heard_of()
    wait_until(lambda: daemon.status()["sessions"], "it is a session")
    memory = wait_until(lambda: daemon.status()["memory"], "its memory")
    assert memory["host_budget_bytes"] < machine_bytes()
    assert memory["arena_bytes"] < machine_bytes()
    assert memory["paged_out_bytes"] <= memory["total_bytes"]


def test_no_number_of_a_library_is_taken_as_it_comes(daemon: RootDaemon, library: Library) -> None:
    library.say(
        "pager-state", state="resident", resident_bytes=LARGEST, unowned_bytes=LARGEST,
        unowned={"managed": LARGEST}, arena_bytes=LARGEST,
    )  # fmt: skip
    library.say("pager-done", op=LARGEST, outcome="moved", bytes=LARGEST, elapsed_ns=10**15)
    library.say("want-room", request=LARGEST, bytes=LARGEST)
    assert library.hear("room")["granted"] is False
    (session,) = wait_until(lambda: daemon.status()["sessions"], "it is a session")
    total_bytes = daemon.status()["memory"]["total_bytes"]
    assert session["resident_bytes"] <= total_bytes
    assert session["unowned"]["managed"] <= total_bytes
    assert daemon.status()["scheduler"]["swap_round_trip_s"] is None, "nothing has moved"
