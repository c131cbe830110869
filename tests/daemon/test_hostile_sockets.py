"""Tests of garbage, floods and crowds at the socket: errors or refusals, no crash and no leak."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import struct
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest
from checks import unharmed
from daemon import Daemon, running_daemon, wait_until
from patience import PATIENCE_S
from talker import HELLO, Talker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
CROWD = 1000

HELLO_LINE = json.dumps(HELLO).encode() + b"\n"
SESSION_LINE = json.dumps({**HELLO, "role": "session"}).encode() + b"\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for the whole module; the same process must survive all tests."""
    with running_daemon("1x64MiB") as one:
        pid = one.status().daemon_pid
        yield one
        assert one.status().daemon_pid == pid, one.log()
        one.stop()
        unharmed(one)


@pytest.fixture
def path(daemon: Daemon) -> Iterator[Path]:
    """Return the socket. Afterwards the daemon has about as many descriptors as before, no session,
    and not noticeably more memory."""
    process = psutil.Process(daemon.status().daemon_pid)
    _warm(daemon)
    wait_until(lambda: not daemon.status().sessions, "no sessions at the beginning")
    before, memory = process.num_fds(), process.memory_info().rss
    yield daemon.sockets()[0]
    # This process may have been a session, which has some time to come back.
    with Talker(daemon.sockets()[0]) as talker:
        assert talker.hello(role="session")["type"] == "welcome"
        talker.say("goodbye")
        talker.last_words()
    # A worker that is restarted has a few for a moment; one test makes hundreds.
    wait_until(lambda: process.num_fds() < before + 8, f"descriptors back to about {before}")
    wait_until(lambda: not daemon.status().sessions, "no sessions left")
    assert process.memory_info().rss < memory + 24 * MIB


def _warm(daemon: Daemon) -> None:
    for _ in range(3):
        daemon.status()


def _error(path: Path, *parts: bytes) -> dict[str, object] | None:
    """Return the daemon's last message after ``parts``."""
    with Talker(path) as talker:
        with contextlib.suppress(OSError):  # the daemon may have closed the connection
            for part in parts:
                talker.raw(part)
            talker.socket.shutdown(socket.SHUT_WR)
        return talker.last_words()


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((b"\n",), "malformed"),
        ((b"GET / HTTP/1.1\r\n\r\n",), "malformed"),
        ((b"\x16\x03\x01\x02\x00\x01\n",), "malformed"),
        ((b'{"type":"hello"}\n',), "malformed"),
        ((b'{"type":"no-such"}\n',), "unknown-type"),
        ((b'{"type":"hel\0lo"}\n',), "malformed"),
        ((b"\xff\xfe\n",), "malformed"),
        ((b"[" * 60_000 + b"\n",), "malformed"),
        ((b'{"type":"hello","x":' + b"[" * 50_000 + b"]" * 10_000 + b"}\n",), "malformed"),
        ((b"x" * 70_000,), "too-large"),
        ((b"x" * 70_000 + b"\n",), "too-large"),
        ((b'{"type":"ping"}\n',), "out-of-order"),
        ((HELLO_LINE, HELLO_LINE), "out-of-order"),
        ((HELLO_LINE, b'{"type":"acquire","burst":1}\n'), "out-of-order"),
        ((HELLO_LINE, b'{"type":"goodbye"}\n'), "out-of-order"),
        ((SESSION_LINE, b'{"type":"end-burst","burst":3}\n'), "out-of-order"),
        ((SESSION_LINE, b'{"type":"acquire","burst":0}\n'), "malformed"),
        ((SESSION_LINE, b'{"type":"acquire","burst":9007199254740993}\n'), "malformed"),
        ((SESSION_LINE, b'{"type":"acquire","burst":1e3}\n'), None),
        ((HELLO_LINE, b'{"type":"set","tq_s":"soon"}\n'), "malformed"),
        ((HELLO_LINE.replace(b'"protocol": 1', b'"protocol": 99'),), "protocol-version"),
    ],
)  # fmt: skip
def test_a_wrong_message_gets_an_error_and_ends_the_connection(
    path: Path, parts: tuple[bytes, ...], code: str | None
) -> None:
    answer = _error(path, *parts)
    assert answer is not None
    if code is not None:
        assert (answer["type"], answer["code"], answer["fatal"]) == ("error", code, True)
        assert answer["message"]


@pytest.mark.parametrize(
    "settings",
    [{"tq_s": 0}, {"tq_s": -1}, {"tq_s": 1e300}, {}, {"tq_s": 0.01}],
)
def test_settings_out_of_range_are_refused_and_the_connection_stays(
    path: Path, settings: dict[str, float]
) -> None:
    with Talker(path) as talker:
        talker.hello()
        answer = talker.ask("set", **settings)
        assert (answer["type"], answer["code"], answer["fatal"]) == ("error", "bad-setting", False)
        assert talker.ask("ping") == {"type": "pong"}


def test_a_conversation_cut_into_single_bytes_is_the_same(path: Path) -> None:
    text = HELLO_LINE + b'{"type":"ping"}\n{"type":"get-status"}\n'
    with Talker(path) as talker:
        for byte in text:
            talker.raw(bytes([byte]))
        kinds = [talker.hear()["type"] for _ in range(3)]  # type: ignore[index]
    assert kinds == ["welcome", "pong", "status"]
    for cut in range(1, len(text), 7):
        with Talker(path) as talker:
            talker.raw(text[:cut])
            talker.raw(text[cut:])
            assert [talker.hear()["type"] for _ in range(3)] == kinds  # type: ignore[index]


def test_half_a_line_and_then_nothing_or_the_end_keeps_nobody(daemon: Daemon, path: Path) -> None:
    halves = [HELLO_LINE[:10], b"", b"{", HELLO_LINE + b'{"type":"acq', SESSION_LINE + b'{"typ']
    talkers = [Talker(path) for _ in range(20) for _ in halves]
    for number, talker in enumerate(talkers):
        talker.raw(halves[number % len(halves)])
    assert daemon.status().uuid
    for number, talker in enumerate(talkers):
        if number % 2:  # reset half of them instead of closing them
            linger = struct.pack("ii", 1, 0)
            talker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        talker.close()


def test_a_connection_without_a_hello_is_closed(path: Path) -> None:
    with Talker(path) as silent, Talker(path) as slow, Talker(path) as polite:
        slow.raw(HELLO_LINE[:5])
        polite.hello()
        for talker in (silent, slow):
            last = talker.last_words()
            assert last is not None
            assert (last["code"], last["fatal"]) == ("silent", True)
        assert polite.ask("ping") == {"type": "pong"}


def test_a_thousand_at_once(daemon: Daemon, path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as stack:
            crowd = []
            for _ in range(CROWD):  # each says hello at once: a silent connection is soon closed
                crowd.append(stack.enter_context(Talker(path)))
                crowd[-1].raw(HELLO_LINE + b'{"type":"get-status","watch":true}\n')
            for talker in crowd:
                assert talker.hear()["type"] == "welcome"  # type: ignore[index]
                assert talker.hear()["type"] == "status"  # type: ignore[index]
            # A change reaches every watcher, and the daemon still answers others.
            client = daemon.client()
            client.set(tq_s=17)
            client.close()
            for talker in crowd:
                while talker.until("status")["gpu"]["scheduler"]["tq_s"] != 17:
                    pass
            assert daemon.status().scheduler.tq_s == 17
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


CROWDED_SESSIONS = """
import os, signal, sys
sys.path[:0] = {paths!r}
from talker import Talker
from pathlib import Path
path, count = Path({path!r}), {count}
children = []
for number in range(count):
    ready, child_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        talker = Talker(path)
        assert talker.hello(role="session", name="n" * 200)["type"] == "welcome"
        talker.say("acquire", burst=1)
        talker.until("granted")
        talker.say("end-burst", burst=1)
        os.write(child_ready, b"x")
        signal.pause()
        os._exit(0)
    os.close(child_ready)
    children.append((pid, ready))
print(sum(os.read(ready, 1) == b"x" for _, ready in children), flush=True)
sys.stdin.readline()
for pid, _ in children:
    os.kill(pid, 9)
for pid, _ in children:
    os.waitpid(pid, 0)
"""


def test_hundreds_of_sessions_come_and_go(daemon: Daemon, path: Path) -> None:
    """Each is its own process. Each gets the GPU, one after another since their needs are unknown,
    and all are killed at once."""
    import subprocess

    count = 200
    support = [entry for entry in sys.path if entry.endswith("support")]
    code = CROWDED_SESSIONS.format(paths=support, path=str(path), count=count)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == f"{count}\n"
        assert len(daemon.status().sessions) == count
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until(lambda: not daemon.status().sessions, "all sessions gone")
    finally:
        process.communicate("\n")
    assert process.returncode == 0


def test_a_client_that_never_reads_is_not_read_from_and_costs_little(
    daemon: Daemon, path: Path
) -> None:
    """It keeps asking and watches; the fixture checks the daemon's memory."""
    deaf = Talker(path)
    deaf.hello()
    deaf.socket.setblocking(False)
    request = b'{"type":"get-status","watch":true}\n'
    sent = 0
    refused = 0
    while refused < 50:
        assert sent < 8 * MIB, "the daemon takes everything"
        try:
            sent += deaf.socket.send(request * 100)
            refused = 0
        except BlockingIOError:
            refused += 1
            time.sleep(0.02)
    client = daemon.client()
    for tq_s in (11, 13):
        client.set(tq_s=tq_s)
    client.close()
    # Once it reads, it gets all answers, and then the news.
    deaf.socket.setblocking(True)
    deaf.socket.settimeout(PATIENCE_S)
    for _ in range(sent // len(request)):
        assert deaf.until("status")
    while deaf.until("status")["gpu"]["scheduler"]["tq_s"] != 13:
        pass
    deaf.close()


@pytest.mark.parametrize("kind", ["ping", "get-status", "get-story", "set", "burst", "release"])
def test_a_flood_of_legal_requests_is_answered_and_harms_nobody(
    daemon: Daemon, path: Path, kind: str
) -> None:
    fields = {"get-story": {"session": "k0000000000"}, "set": {"tq_s": 12}}.get(kind, {})
    count = 3000
    with Talker(path) as talker:
        talker.hello(role="session")
        if kind == "burst":
            lines = [
                json.dumps({"type": what, "burst": number}) + "\n"
                for number in range(1, count // 3)
                for what in ("acquire", "withdraw")
            ]
        else:
            lines = [json.dumps({"type": kind, **fields}) + "\n"] * count
        data = "".join(lines).encode()
        for number, at in enumerate(range(0, len(data), 4096)):
            talker.pour(data[at : at + 4096])
            if number % 16 == 0:
                assert daemon.status().uuid
        talker.drain()
        talker.say("ping")
        talker.until("pong")


def test_random_bytes_by_the_megabyte(path: Path) -> None:
    import random

    chance = random.Random(4)
    for _ in range(60):
        data = chance.randbytes(chance.randrange(1, 100_000))
        answer = _error(path, data) if chance.random() < 0.5 else _error(path, HELLO_LINE, data)
        assert answer is None or answer["type"] in ("error", "welcome")


def test_few_descriptors_cost_connections_not_the_daemon(start: Callable[..., Daemon]) -> None:
    """At the limit new connections wait or are refused; existing ones continue."""
    daemon = start("1x64MiB")
    pid = daemon.status().daemon_pid
    process = psutil.Process(pid)
    limit = process.num_fds() + 30
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    first = Talker(daemon.sockets()[0])
    first.hello()
    with ExitStack() as stack:
        for _ in range(100):
            talker = stack.enter_context(Talker(daemon.sockets()[0]))
            talker.raw(HELLO_LINE)
        wait_until(lambda: "no new connection taken" in daemon.log(), "the limit reached")
        assert first.ask("ping") == {"type": "pong"}
    first.close()
    assert daemon.status().daemon_pid == pid
    assert os.path.exists(f"/proc/{pid}")
