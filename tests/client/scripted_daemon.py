"""A daemon for the client's tests: a real socket, the real protocol, and scripted answers.

Without a script it grants at once and answers everything. It checks each client's messages against
the protocol's rules, so that a client that speaks out of turn fails the test.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from socket_server import Connection, SocketServer

from kiwi_core.states import AntiThrash, HistoryKind
from kiwi_core.wire.framing import encode
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    BringBack,
    EndBurst,
    GetHistory,
    GetStatus,
    GetStory,
    GetUsage,
    Goodbye,
    GpuStatus,
    Granted,
    Hello,
    HintReport,
    HistoryEntry,
    HistoryReport,
    HistorySession,
    MemoryStatus,
    Ok,
    Ping,
    Pong,
    Release,
    SchedulerStatus,
    Set,
    StatusReport,
    StoryLine,
    StoryReport,
    UsageReport,
    Waiting,
    Welcome,
    Withdraw,
    Withdrawn,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage, DaemonMessage

T = TypeVar("T")

PATIENCE_S = 60.0
"""Limit for conditions that take milliseconds unless the machine is very busy."""


def eventually(condition: Callable[[], T]) -> T:
    """Return the first true value of ``condition``; fail after a generous time."""
    until_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < until_s, "this never came true"
        time.sleep(0.002)
    return value


def status_of(tq_s: float = 30.0) -> GpuStatus:
    return GpuStatus(
        uuid="GPU-1",
        name="Test GPU",
        index=0,
        emulated=True,
        memory=MemoryStatus(total_bytes=8, free_bytes=8, paged_out_bytes=0, host_budget_bytes=8),
        scheduler=SchedulerStatus(
            tq_s=tq_s, anti_thrash=AntiThrash.ON, serialised=False, policy="round-robin"
        ),
        holders=[],
        queue=[],
        sessions=[],
    )


class Peer(Connection):
    """One accepted connection."""

    def __init__(self, daemon: ScriptedDaemon, sock: socket.socket) -> None:
        super().__init__(daemon.faults, sock)
        self.daemon = daemon
        self.received: list[ClientMessage] = []
        self._write_lock = threading.Lock()

    def say(self, *messages: DaemonMessage) -> None:
        self.say_bytes(b"".join(encode(message) for message in messages))

    def say_bytes(self, data: bytes) -> None:
        with self._write_lock:
            self.sock.sendall(data)

    def take(self, message: ClientMessage, line: bytes) -> None:
        self.received.append(message)
        self.daemon.script(self, message)


class ScriptedDaemon(SocketServer[Peer]):
    def __init__(self, path: Path, *, index: int = 0, grants: bool = True) -> None:
        super().__init__(path)
        self.index = index
        self.grants = grants
        """Whether the default script grants each acquire at once."""
        self.script: Callable[[Peer, ClientMessage], None] = self.obey
        self.tq_s = 30.0
        self.usage = UsageReport(began_unix_s=None, rows=[])
        self.asked_usage = GetUsage()

    def accepted(self, sock: socket.socket) -> Peer:
        return Peer(self, sock)

    # --- what it does -----------------------------------------------------------------------------

    def obey(self, peer: Peer, message: ClientMessage) -> None:
        """Answer by the default script."""
        answer = self.answer(message)
        if answer is not None:
            peer.say(answer)
        if isinstance(message, Goodbye):
            peer.drop()

    def answer(self, message: ClientMessage) -> DaemonMessage | None:
        match message:
            case Hello():
                return self.welcome()
            case Acquire() if self.grants:
                return Granted(burst=message.burst, quantum_s=self.tq_s)
            case Acquire():
                return Waiting(burst=message.burst, position=1, ahead=1, holder="other.ipynb")
            case Withdraw():
                return Withdrawn(burst=message.burst)
            case Set():
                self.tq_s = message.tq_s or self.tq_s
                return Ok()
            case Release() | Goodbye():
                return Ok()
            case GetStatus():
                return StatusReport(gpu=status_of(self.tq_s))
            case BringBack():
                return HintReport(begun=not message.session, why=message.session and "it runs")
            case GetHistory():
                return self.history(message.since)
            case GetUsage():
                self.asked_usage = message
                return self.usage
            case GetStory():
                return StoryReport(
                    session=message.session, lines=[StoryLine(ago_s=1.0, text="it began")]
                )
            case Ping():
                return Pong()
            case EndBurst():
                return None

    def history(self, since: int) -> HistoryReport:
        """Return two changes of one entry, each in its own message: it ends between the two."""
        last = min(since + 1, 2)
        entry = HistoryEntry(
            id=1,
            serial=last,
            session="s1",
            kind=HistoryKind.HELD,
            began_ago_s=2.0,
            ended_ago_s=None if last == 1 else 1.0,
        )
        return HistoryReport(
            last=last,
            entries=[entry] if since < last else [],
            sessions={"s1": HistorySession(name="a.ipynb", mine=True, kernel_id="")},
            more=last < 2,
        )

    def welcome(self, protocol: int = PROTOCOL) -> Welcome:
        return Welcome(
            protocol=protocol,
            daemon="scripted",
            gpu_uuid="GPU-1",
            gpu_index=self.index,
            gpu_name="Test GPU",
            session=f"s{len(self.peers)}",
        )

    # --- what it saw ------------------------------------------------------------------------------

    @property
    def peer(self) -> Peer:
        """Return the latest connection."""
        return self.peers[-1]

    def received(self, kind: type[T]) -> list[T]:
        """Return all messages of a kind, over all connections, in order."""
        return [m for peer in self.peers for m in list(peer.received) if isinstance(m, kind)]

    def await_received(self, kind: type[T], count: int = 1) -> list[T]:
        return eventually(lambda: len(found := self.received(kind)) >= count and found) or []


def answering(daemon: ScriptedDaemon, kind: type, *answers: object) -> None:
    """Answer ``kind`` with ``answers`` (bytes as they are), and the rest as usual."""

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


def client_threads() -> int:
    """Return how many threads of clients run in this process."""
    return sum(thread.name == "kiwi-client" for thread in threading.enumerate())
