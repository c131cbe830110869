"""Fuzz target of the daemon's side of the wire: framing, messages, legality and dispatch.

``one_input`` is the target. A real ``Connection`` and a real ``Router`` take the bytes, and
handlers that only record what they receive stand behind them. ``make fuzz`` runs the target under
atheris, guided by coverage, and keeps inputs that reach new code in ``tests/wire/corpus``.
``test_corpus.py`` replays them.

    python tests/wire/fuzz_wire.py CORPUS [options of libFuzzer]
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(include=["kiwi_core.wire", "kiwi_core.daemon"]):
        import kiwi_core.daemon.base.connection
        import kiwi_core.daemon.router  # noqa: F401 - and with both all that is under test

import msgspec
import structlog

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.connections import Connections
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.router import Router
from kiwi_core.errors import CallerError
from kiwi_core.peer_limits import PEER_LIMITS, REQUESTS
from kiwi_core.wire import messages as m
from kiwi_core.wire.framing import CLIENT_TYPES, decode_client, decode_daemon, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.daemon.base.connection import Handlers

__all__ = ["CLIENT_TYPES", "CORPUS", "Recorder", "one_input", "seeds"]

CORPUS = Path(__file__).with_name("corpus")
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
OWN = ".fuzz"
"""Where ``make fuzz`` keeps what it finds on the way."""
GPU: Any = SimpleNamespace(uuid="GPU-5d0c", index=0, name="a GPU", total_bytes=1 << 30)


AMPLE = [
    replace(limit, per_user=1 << 40) if limit.name == REQUESTS else limit for limit in PEER_LIMITS
]
"""Nobody has to wait for the clock: how fast this machine is must not decide what is handled."""


class Loop:
    """The part of asyncio's event loop that a connection uses. Timers never fire here."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self._soon.append(lambda: call(*args))

    def call_later(self, _delay_s: float, _call: Callable[..., object]) -> Any:
        return SimpleNamespace(cancel=lambda: None)

    def run(self) -> None:
        while self._soon:
            self._soon.pop(0)()


class Transport:
    """Record what the connection sends. ``closing`` is true after the connection ends. ``full``
    decides, after each line, whether the buffer is full because the peer does not read."""

    def __init__(self, sock: socket.socket, full: Callable[[], bool]) -> None:
        self._socket = sock
        self._full = full
        self.choke: Callable[[], None] = lambda: None
        self.said: list[bytes] = []
        self.closing = False

    def get_extra_info(self, _name: str) -> socket.socket:
        return self._socket

    def write(self, line: bytes) -> None:
        assert not self.closing
        self.said.append(line)
        if self._full():
            self.choke()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Recorder:
    """Replace every handler and reporter behind ``Router``, and keep the messages in order. Refuse
    every ``refuses``-th message, as a handler may refuse any message."""

    def __init__(self, refuses: int) -> None:
        self.messages: list[m.ClientMessage] = []
        self._refuses = refuses

    def _take(self, message: m.ClientMessage) -> None:
        self.messages.append(message)
        if self._refuses and len(self.messages) % self._refuses == 0:
            raise CallerError("refused", "Not now.")

    def handlers(self) -> Handlers:
        """Return a handler of every message; the router's own come after these."""
        return dict.fromkeys(get_args(m.ClientMessage), self.answer)

    def answer(self, _connection: Connection, message: m.ClientMessage) -> None:
        self._take(message)

    def hello(self, _connection: Connection, hello: m.Hello) -> Any:
        self._take(hello)
        objection = SimpleNamespace(why=SimpleNamespace(value="tool"))
        return SimpleNamespace(id="k1", session="k1", owns=False, objection=objection)

    def connected(self, _connection: Connection) -> None:
        pass

    left = greeted = connected

    def resume(self, _member: object, _hello: m.Hello) -> None:
        pass

    def notify_successor(self, _member: object, _connection: Connection) -> None:
        pass

    def welcomed(self, _link: object) -> None:
        pass

    def disconnected(self, _connection: Connection, *, closing: bool = False) -> None:
        pass


class Answers:
    """Reporters that answer each query with a short message."""

    def status_line(self, _peer: object, _now_ns: int) -> bytes:
        return encode(m.Pong())

    def history_line(self, _peer: object, _since: int) -> bytes:
        return encode(m.Pong())

    def story(self, _peer: object, _session: str) -> m.Pong:
        return m.Pong()

    def report(self) -> m.Pong:
        return m.Pong()


_SOCKETS = socket.socketpair(socket.AF_UNIX)
"""The credentials of all peers here: this process's own."""


def conversation(data: bytes, cuts: random.Random, refuses: int) -> tuple[list[Any], list[bytes]]:
    """Return the messages that reach the handlers and the answers when ``data`` comes in pieces."""
    loop = Loop()
    asyncio._set_running_loop(loop)  # type: ignore[arg-type]
    try:
        recorder = Recorder(refuses)
        transport = Transport(_SOCKETS[0], lambda: cuts.random() < 0.1)
        # A real router has a different collaborator for each; the recorder replaces all of them.
        anything: Any = recorder
        shares = Shares(AMPLE)
        answers: Any = Answers()
        router = Router(
            Connections(anything, shares), GPU, None,
            anything, anything, anything, anything, answers, anything, answers,
        )  # fmt: skip
        connection = Connection(router, DEFAULTS, MessageTurns(shares))
        connection.connection_made(transport)  # type: ignore[arg-type]
        transport.choke = connection.pause_writing
        for piece in _pieces(data, cuts):
            if transport.closing:
                break  # the connection reads no more input
            connection.data_received(piece)
            loop.run()
            assert connection._reader.held_bytes <= DEFAULTS.request_max_bytes
            while connection.choked:
                connection.resume_writing()
                loop.run()
        assert not router.connections.ended["internal"], "a message was not handled"
        _check_end(transport, recorder)
        connection.connection_lost(None)
        assert not router.connections.open
        return recorder.messages, transport.said
    finally:
        asyncio._set_running_loop(None)


def _pieces(data: bytes, cuts: random.Random) -> Iterator[bytes]:
    begin = 0
    while begin < len(data):
        end = min(len(data), begin + cuts.choice((1, 7, 64, 4096, 1 << 20)))
        yield data[begin:end]
        begin = end


def _check_end(transport: Transport, recorder: Recorder) -> None:
    """Check that nothing follows a fatal error, and that every line that was sent can be parsed."""
    said = [decode_daemon(line[:-1]) for line in transport.said]
    fatal = [isinstance(each, m.Error) and each.fatal for each in said]
    assert fatal.count(True) == transport.closing
    assert not any(fatal[:-1])
    for message in recorder.messages:
        assert decode_client(encode(message)[:-1]) == message


def one_input(data: bytes) -> None:
    """Check that splitting the bytes differently changes nothing, and that no exception escapes."""
    refuses = data[0] % 4 if data else 0
    whole = conversation(data[1:], random.Random(0), refuses)
    for seed in (1, 2):
        assert conversation(data[1:], random.Random(seed), refuses) == whole


# --- mutating ------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**53 - 1, 2**53, 2**64, 1e308, -0.0, "", "\n", "é\u202e",
    "a" * 300, [], {}, [[]], {"": None}, "k1", "session", "pager", "observer",
]  # fmt: skip


def templates() -> list[dict[str, Any]]:
    """Return the examples of the protocol's page, from both ends."""
    blocks = re.findall(r"^```json\n(.*?)^```$", PROTOCOL.read_text(), re.MULTILINE | re.DOTALL)
    return [msgspec.json.decode(line) for block in blocks for line in block.splitlines()]


def seeds() -> list[bytes]:
    """Return each example after a hello in each role. Coverage does not depend on the kind of
    message, because msgspec is not Python; a merged corpus may therefore lack some kinds."""
    hello = '{"type":"hello","protocol":1,"role":"%s","client":"f"}\n'
    return [
        b"\0" + (hello % role.value).encode() + msgspec.json.encode(template) + b"\n"
        for role in m.Role
        for template in templates()
    ]


class Mutator:
    """Change a line as JSON half of the time, because changed bytes are rarely valid JSON."""

    def __init__(self, mutate: Callable[[bytes, int], bytes]) -> None:
        self._mutate = mutate
        self._templates = templates()

    def __call__(self, data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.4 or not data:
            return self._mutate(data, max_size)
        lines = data[1:].split(b"\n")
        where = chance.randrange(len(lines))
        way = chance.randrange(4)
        if way == 0:
            lines[where] = self._changed(lines[where], chance)
        elif way == 1:
            lines.insert(where, msgspec.json.encode(chance.choice(self._templates)))
        elif way == 2:
            lines.insert(where, chance.choice(lines))
        else:
            del lines[where]
        return (data[:1] + b"\n".join(lines))[:max_size]

    def _changed(self, line: bytes, chance: random.Random) -> bytes:
        try:
            message = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not message:
            message = dict(chance.choice(self._templates))
        field = chance.choice(list(message))
        message[field] = chance.choice(ODD)
        return msgspec.json.encode(message)


def quiet() -> None:
    """Turn off the daemon's log messages about bad peers, which would take most of the time."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> None:
    quiet()
    # Setup chooses one of its two builds, so this looks the function up late.
    mutator = Mutator(lambda data, size: atheris.Mutate(data, size))
    for number, seed in enumerate(seeds() if sys.argv[1:2] == [OWN] else []):
        (Path(OWN) / f"seed-{number}").write_bytes(seed)
    # To merge, libFuzzer starts this program again through a shell.
    program = f"{sys.executable} {Path(__file__).resolve()}"
    atheris.Setup([program, *sys.argv[1:]], one_input, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
