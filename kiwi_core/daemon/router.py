"""The router: hands each legal message to the part that turns it into an event or an answer.

It knows connections and session records; the scheduler makes every decision about the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core import __version__, clock
from kiwi_core.daemon.sessions.link_handler import LinkMessage
from kiwi_core.errors import PeerError
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connection import Connection, Handlers
    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.reports.metrics import MetricsReporter
    from kiwi_core.daemon.reports.status import Reporter
    from kiwi_core.daemon.reports.usage import UsageReporter
    from kiwi_core.daemon.sessions.link_handler import LinkHandler
    from kiwi_core.daemon.sessions.requests import RequestHandler
    from kiwi_core.daemon.sessions.session_handler import SessionHandler
    from kiwi_core.gpu.nvml import GpuInfo


@dataclass(eq=False, repr=False)
class Router:
    connections: Connections
    _gpu: GpuInfo
    _emulation: m.Emulation | None
    sessions: SessionHandler
    links: LinkHandler
    requests: RequestHandler
    reporter: Reporter
    usage: UsageReporter
    metrics: MetricsReporter
    closing: bool = False
    _handlers: Handlers = field(init=False)
    """The handler of each message type; each part lists the messages that it takes."""

    def __post_init__(self) -> None:
        self._handlers = {
            **self.sessions.handlers(),
            **self.requests.handlers(),
            **self.links.handlers(),
            m.Hello: self._hello,
            m.GetStatus: self._get_status,
            m.GetStory: self._get_story,
            m.GetHistory: self._get_history,
            m.GetMetrics: self._get_metrics,
            m.GetUsage: self.usage.answer,
            m.Ping: self._ping,
        }

    # --- Receiver -------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.connections.add(connection)

    def received(self, connection: Connection, message: m.ClientMessage) -> None:
        if not self.closing or isinstance(message, LinkMessage):
            self._handlers[type(message)](connection, message)

    def disconnected(self, connection: Connection) -> None:
        self.connections.remove(connection)
        self.links.disconnected(connection)
        self.sessions.disconnected(connection, closing=self.closing)

    def turned_away(self, code: str) -> None:
        self.connections.ended[code] += 1

    def close_all(self, *, but_not_free: bool = False) -> None:
        """Close the connections and take no more events from them: the daemon is ending.
        ``but_not_free``: keep the sessions whose memory must still come back (they get a notice if
        it cannot) and the libraries that bring it back.
        """
        self.closing = True
        kept: set[Connection] = set()
        if but_not_free:
            kept = self.sessions.not_free() | self.links.connections()
        self.connections.close(but=kept)

    # --- what the router answers itself -----------------------------------------------------------

    def _get_status(self, connection: Connection, message: m.GetStatus) -> None:
        if message.watch:
            self.connections.watch(connection)
        connection.send_line(self.reporter.status_line(connection.peer, clock.now_ns()))

    def _get_story(self, connection: Connection, message: m.GetStory) -> None:
        connection.send(self.reporter.story(connection.peer, message.session))

    def _get_history(self, connection: Connection, message: m.GetHistory) -> None:
        connection.send_line(self.reporter.history_line(connection.peer, message.since))

    def _get_metrics(self, connection: Connection, _message: m.GetMetrics) -> None:
        connection.send(self.metrics.report())

    def _ping(self, connection: Connection, _message: m.Ping) -> None:
        connection.send(m.Pong())

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        self.connections.greeted(connection)
        record = linked = own = None
        own_why = ""
        if self._emulation is not None and hello.role is not m.Role.OBSERVER:
            _refuse_real_driver(hello.cuda_library, self._emulation)
        if hello.role is m.Role.SESSION:
            record = self.sessions.hello(connection, hello)
        elif hello.role is m.Role.PAGER:
            linked = self.links.hello(connection, hello)
            own, own_why = self.links.decision(connection)
        connection.send(
            m.Welcome(
                protocol=m.PROTOCOL,
                daemon=f"kiwi {__version__}",
                gpu_uuid=self._gpu.uuid,
                gpu_index=self._gpu.index,
                gpu_name=self._gpu.name,
                session=session.id if (session := record or linked) else "",
                emulation=self._emulation,
                own=own,
                own_why=own_why,
            )
        )
        if record is not None:
            self.sessions.resume_burst(record, hello)
        if hello.role is m.Role.PAGER:
            self.links.welcomed(connection)


def _refuse_real_driver(loaded: str, emulation: m.Emulation) -> None:
    # Compare the names of the directories, not their paths. The name is made from the driver's
    # sources; another user of the same state may have built the same driver elsewhere.
    if loaded and Path(loaded).parent.name != Path(emulation.libcuda).parent.name:
        raise PeerError(
            "driver-mismatch",
            f"This process has loaded the CUDA driver {loaded}, but the daemon runs an emulated "
            "GPU. The two would not share anything, so Kiwi refuses.",
            "Stop the emulating daemon (`kiwi daemon --emulate`), or restart this kernel.",
        )
