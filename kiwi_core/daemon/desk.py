"""The desk where messages are taken: turns each legal message into an event, or an answer.

Knows connections and members; leaves every decision about the GPU to the scheduler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core import __version__
from kiwi_core.daemon.link_desk import LinkMessage
from kiwi_core.daemon.wishes import SessionWish
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.peer_limits import WATCHES
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.admission import Admission
    from kiwi_core.daemon.connection import Connection
    from kiwi_core.daemon.link_desk import LinkDesk
    from kiwi_core.daemon.report import Reporter
    from kiwi_core.daemon.session_desk import SessionDesk
    from kiwi_core.daemon.shares import Shares
    from kiwi_core.daemon.usage_report import UsageReporter
    from kiwi_core.daemon.wishes import Wishes
    from kiwi_core.gpu.nvml import GpuInfo


@dataclass(eq=False, repr=False)
class Desk:
    shares: Shares
    _admission: Admission
    _gpu: GpuInfo
    _emulation: m.Emulation | None
    sessions: SessionDesk
    links: LinkDesk
    wishes: Wishes
    connections: set[Connection] = field(default_factory=set)
    closing: bool = False
    taken: int = 0
    """Connections since the start; ``ended`` by the code of the fatal error that ended them."""
    ended: Counter[str] = field(default_factory=Counter)
    reporter: Reporter = field(init=False)
    usage: UsageReporter = field(init=False)
    metrics: Callable[[], m.MetricsReport] = field(init=False)

    # --- Receiver -------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._admission.connected(connection)
        self.taken += 1

    def received(self, connection: Connection, message: m.ClientMessage) -> None:
        if self.closing and not isinstance(message, LinkMessage):
            return
        if isinstance(message, m.Acquire):  # asked first: its answer is waited for
            self.sessions.received(connection, message)
        elif isinstance(message, m.Hello):
            self._hello(connection, message)
        elif isinstance(message, m.Set):
            self.wishes.set(connection, message)
        elif isinstance(message, SessionWish):
            self.wishes.of_session(connection, self.sessions.of(connection), message)
        elif isinstance(message, (m.Withdraw, m.EndBurst, m.Goodbye)):
            self.sessions.received(connection, message)
        elif isinstance(message, LinkMessage):
            self.links.received(connection, message)
        else:
            self._look(connection, message)

    def _look(
        self,
        connection: Connection,
        message: m.GetStatus | m.GetStory | m.GetHistory | m.GetMetrics | m.GetUsage | m.Ping,
    ) -> None:
        if isinstance(message, m.GetStatus):
            if message.watch:
                self._watch(connection)
            connection.send_line(self.reporter.status_line(connection.peer))
        elif isinstance(message, m.GetStory):
            connection.send(self.reporter.story(connection.peer, message.session))
        elif isinstance(message, m.GetHistory):
            connection.send_line(self.reporter.history_line(connection.peer, message.since))
        elif isinstance(message, m.GetMetrics):
            connection.send(self.metrics())
        elif isinstance(message, m.GetUsage):
            self.usage.answer(connection, message)
        else:
            connection.send(m.Pong())

    def _watch(self, connection: Connection) -> None:
        if connection.watching:
            return
        watches, uid = self.shares[WATCHES], connection.peer.uid
        if not watches.may(uid):
            raise CallerError(
                "busy",
                "You watch this GPU from as many connections as you may.",
                "Close some of them, or ask without `watch` now and then.",
            )
        watches.take(uid)
        connection.watching = True

    def disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._admission.left(connection)
        if connection.watching:
            self.shares[WATCHES].give_back(connection.peer.uid)
        self.links.disconnected(connection)
        self.sessions.disconnected(connection, closing=self.closing)

    def turned_away(self, code: str) -> None:
        self.ended[code] += 1

    @property
    def watchers(self) -> list[Connection]:
        return [c for c in self.connections if c.watching]

    def close_all(self, *, but_held: bool = False) -> None:
        """The daemon is leaving: no events from the connections any more. ``but_held``: those whose
        memory has yet to come back stay connected, to be told if it cannot; and the libraries
        that bring it back."""
        self.closing = True
        kept: set[Connection] = set()
        if but_held:
            kept = self.sessions.held() | self.links.connections()
        for connection in self.connections - kept:
            connection.close()

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        self._admission.greeted(connection)
        member = linked = None
        if self._emulation is not None and hello.role is not m.Role.OBSERVER:
            _refuse_real_driver(hello.cuda_library, self._emulation)
        if hello.role is m.Role.SESSION:
            member = self.sessions.hello(connection, hello)
        elif hello.role is m.Role.PAGER:
            linked = self.links.hello(connection, hello)
        connection.send(
            m.Welcome(
                protocol=m.PROTOCOL,
                daemon=f"kiwi {__version__}",
                gpu_uuid=self._gpu.uuid,
                gpu_index=self._gpu.index,
                gpu_name=self._gpu.name,
                session=session.id if (session := member or linked) else "",
                emulation=self._emulation,
            )
        )
        if member is not None:
            self.sessions.resume_burst(member, hello)
        if hello.role is m.Role.PAGER:
            self.links.welcomed(connection)


def _refuse_real_driver(loaded: str, emulation: m.Emulation) -> None:
    # A build of the emulated driver lies in a directory that is named after its sources; another
    # user of the same state may have built the same one elsewhere.
    if loaded and Path(loaded).parent.name != Path(emulation.libcuda).parent.name:
        raise PeerError(
            "driver-mismatch",
            f"This process has loaded the CUDA driver {loaded}, but the daemon runs an emulated "
            "GPU. Mixing the two would corrupt nothing but share nothing either, so Kiwi refuses.",
            "Stop the emulating daemon (`kiwi daemon --emulate`), or restart this kernel.",
        )
