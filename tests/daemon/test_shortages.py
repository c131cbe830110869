"""Tests of a daemon without a spare descriptor: clients hear that it is full, and retry."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from shortages import no_descriptor_left
from talker import Talker

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.links.links import Links
from kiwi_core.daemon.roster.registry import SessionRegistry
from kiwi_core.errors import PeerError, is_full
from kiwi_core.gpu import processes
from kiwi_core.units import GIB, KIB
from kiwi_core.wire.framing import decode_daemon
from kiwi_core.wire.messages import Error
from kiwi_core.wire.pager import PagerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

    Start = Callable[..., Daemon]


class Stumbling:
    """A receiver that calls ``what`` for each message."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._what = what

    def received(self, _connection: Connection, _message: object) -> None:
        self._what()

    def connected(self, _connection: Connection) -> None: ...
    def disconnected(self, _connection: Connection) -> None: ...
    def turned_away(self, _code: str) -> None: ...


def last_word(what: Callable[[], object]) -> Error:
    """Return the error that a client gets if its message makes the daemon call ``what``."""

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            turns = MessageTurns(Shares())
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(Stumbling(what), DEFAULTS, turns), ours
            )
            theirs.sendall(b'{"type":"hello","protocol":1,"role":"observer","client":"t"}\n')
            reader, writer = await asyncio.open_unix_connection(sock=theirs.dup())
            line = await reader.readline()
            assert not await reader.read(), "and that it is over"
            writer.close()
            return line

    message = decode_daemon(asyncio.run(run()).strip())
    assert isinstance(message, Error)
    return message


def look_without_descriptors() -> None:
    with no_descriptor_left():
        processes.ref_of(os.getpid())


def watch_without_descriptors() -> None:
    ref = processes.ref_of(os.getpid())
    assert ref is not None
    with no_descriptor_left():
        processes.open_pidfd(ref)


def fail(number: int) -> Callable[[], object]:
    def raise_it() -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


@pytest.mark.parametrize(
    "what", [look_without_descriptors, watch_without_descriptors, fail(errno.ENOMEM)]
)
def test_a_client_hears_that_the_daemon_is_full(what: Callable[[], object]) -> None:
    error = last_word(what)
    assert error.fatal
    assert is_full(PeerError(error.code, error.message, error.remedy))
    assert "short of descriptors" in error.message


def test_other_failures_are_no_shortage() -> None:
    assert last_word(fail(errno.EIO)).code == "internal"


def test_what_a_program_holds_stays_known() -> None:
    async def run() -> None:
        ref = processes.ref_of(os.getpid())
        assert ref is not None
        links = Links(SessionRegistry(lambda _member: None), GIB, lambda _link: None)
        link = links.take(ref, os.getuid(), "test")
        state = PagerState(state="resident", arena_bytes=64 * KIB)
        links.handle_state(link, state)
        known_bytes = link.host_bytes
        assert known_bytes >= 64 * KIB
        with no_descriptor_left():
            links.handle_state(link, state)
        assert (link.host_bytes, link.report.arena_bytes) == (known_bytes, 64 * KIB)
        asyncio.get_running_loop().remove_reader(link.pidfd)
        os.close(link.pidfd)

    asyncio.run(run())


@contextmanager
def short_of_descriptors(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def talking(daemon: Daemon) -> Iterator[Talker]:
    talker = Talker(daemon.sockets()[0])
    with talker.socket:
        yield talker


@pytest.mark.parametrize("role", ["session", "pager"])
def test_a_daemon_that_runs_out_of_them(start: Start, role: str) -> None:
    daemon = start("1x64MiB")
    state = {"state": "resident", "resident_bytes": 0, "paged_out_bytes": 0, "arena_bytes": 4096}
    with talking(daemon) as early, talking(daemon) as linked:
        welcome = linked.hello(role="pager", name="linked")
        assert welcome["type"] == "welcome", "and the one before it is accepted, too"
        linked.say("pager-state", **state)
        linked.say("ping")
        linked.until("pong")
        with short_of_descriptors(daemon.status().daemon_pid):
            refusal = early.hello(role=role, name="early")
            assert (refusal["type"], refusal["code"]) == ("error", "too-many-connections")
            assert early.hear() is None
            linked.say("pager-state", **state)
            linked.say("ping")
            linked.until("pong")
    with talking(daemon) as again:
        assert again.hello(role=role, name="early")["type"] == "welcome"
