"""The router: hands each legal message to the part that turns it into an event or an answer.

It knows connections and session records; the scheduler makes every decision about the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core import __version__, clock
from kiwi_core.errors import PeerError
from kiwi_core.wire import messages as m
from kiwi_core.wire.pager import PagerDone, PagerState, WantLease, WantRoom

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connection import Connection, Handlers
    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.reports.metrics import MetricsReporter
    from kiwi_core.daemon.reports.status import Reporter
    from kiwi_core.daemon.reports.usage import UsageReporter
    from kiwi_core.daemon.sessions.bursts import Bursts
    from kiwi_core.daemon.sessions.libraries import PreloadedLibraries
    from kiwi_core.daemon.sessions.membership import Membership
    from kiwi_core.daemon.sessions.requests import Requests
    from kiwi_core.gpu.nvml import GpuInfo


@dataclass(eq=False, repr=False)
class Router:
    connections: Connections
    _gpu: GpuInfo
    _emulation: m.Emulation | None
    _bursts: Bursts
    _members: Membership
    _libraries: PreloadedLibraries
    _requests: Requests
    _reporter: Reporter
    _usage: UsageReporter
    _metrics: MetricsReporter
    closing: bool = False
    _handlers: Handlers = field(init=False)

    def __post_init__(self) -> None:
        self._handlers = {
            **self._requests.handlers(),
            **self._libraries.handlers(),
            m.Hello: self._hello,
            m.GetStatus: self._get_status,
            m.GetStory: lambda to, asked: to.send(self._reporter.story(to.peer, asked.session)),
            m.GetHistory: lambda to, asked: to.send_line(
                self._reporter.history_line(to.peer, asked.since)
            ),
            m.GetMetrics: lambda to, _asked: to.send(self._metrics.report()),
            m.GetUsage: self._usage.answer,
            m.Ping: lambda to, _asked: to.send(m.Pong()),
        }

    # --- Receiver -------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.connections.add(connection)

    def received(self, connection: Connection, message: m.ClientMessage) -> None:
        of_a_library = isinstance(message, (PagerState, PagerDone, WantLease, WantRoom))
        if of_a_library or not self.closing:
            self._handlers[type(message)](connection, message)

    def disconnected(self, connection: Connection) -> None:
        self.connections.remove(connection)
        self._libraries.disconnected(connection)
        self._members.disconnected(connection, closing=self.closing)

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
            kept = self._members.not_free() | self._libraries.connections()
        self.connections.close(but=kept)

    # --- what the router answers itself -----------------------------------------------------------

    def _get_status(self, connection: Connection, message: m.GetStatus) -> None:
        if message.watch:
            self.connections.watch(connection)
        connection.send_line(self._reporter.status_line(connection.peer, clock.now_ns()))

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        self.connections.greeted(connection)
        if hello.role is not m.Role.OBSERVER:
            self._refuse_real_driver(hello.cuda_library)
        record = link = None
        if hello.role is m.Role.SESSION:
            record = self._members.hello(connection, hello)
        elif hello.role is m.Role.PAGER:
            link = self._libraries.hello(connection, hello)
        own_why = link.objection.why.value if link and link.objection and not link.owns else ""
        session = record.id if record else (link.session if link else None)
        connection.send(
            m.Welcome(
                protocol=m.PROTOCOL,
                daemon=f"kiwi {__version__}",
                gpu_uuid=self._gpu.uuid,
                gpu_index=self._gpu.index,
                gpu_name=self._gpu.name,
                session=session or "",
                emulation=self._emulation,
                own=link.owns if link else None,
                own_why=own_why,
            )
        )
        if link is not None:
            self._libraries.welcomed(link)
        elif record is not None:
            self._bursts.resume(record, hello)

    def _refuse_real_driver(self, loaded: str) -> None:
        # Compare the names of the directories, not their paths. The name is made from the driver's
        # sources; another user of the same state may have built the same driver elsewhere.
        emulation = self._emulation
        if not emulation or not loaded:
            return
        if Path(loaded).parent.name != Path(emulation.libcuda).parent.name:
            raise PeerError(
                "driver-mismatch",
                f"This process has loaded the CUDA driver {loaded}, but the daemon runs an "
                "emulated GPU. The two would not share anything, so Kiwi refuses.",
                "Stop the emulating daemon (`kiwi daemon --emulate`), or restart this kernel.",
            )
