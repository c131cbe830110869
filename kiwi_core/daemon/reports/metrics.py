"""The answer to ``get-metrics``: counters since the daemon began, and current values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core import __version__, clock, log
from kiwi_core.daemon.reports.filled import filled
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire.messages import MetricsReport
from kiwi_core.wire.metrics import GpuMetrics, PeerUse, Refusals

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connections import Connections
    from kiwi_core.daemon.base.shares import Shares
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.engine.gauges import GaugeReader
    from kiwi_core.daemon.engine.journal import Journal
    from kiwi_core.daemon.engine.observer import Observer
    from kiwi_core.daemon.engine.tally import Tally
    from kiwi_core.daemon.links.host_budget import HostBudget
    from kiwi_core.daemon.sessions.bursts import Bursts
    from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
    from kiwi_core.daemon.sessions.requests import Requests
    from kiwi_core.gpu.nvml import GpuInfo


@dataclass(eq=False, repr=False)
class MetricsReporter:
    _gpu: GpuInfo
    _core: Core
    _tally: Tally
    _connections: Connections
    _bursts: Bursts
    _requests: Requests
    _shares: Shares
    _observer: Observer
    _journal: Journal
    _budget: HostBudget
    _gauges: GaugeReader
    _expected: ExpectedSessions
    _emulated: bool
    _began_ns: int = field(default_factory=clock.now_ns)

    def report(self) -> MetricsReport:
        now_ns = clock.now_ns()
        tally, operations = self._tally, self._core.operations
        view = self._core.scheduler.view(now_ns)
        running = operations.running
        self._bursts.recount()
        metrics = filled(
            GpuMetrics,
            view,
            self._gpu,
            tally,
            self._gauges.now,
            emulated=self._emulated,
            daemon_version=__version__,
            uptime_s=ns_to_seconds(now_ns - self._began_ns),
            resident_bytes=sum(session.record.resident_bytes for session in view.sessions),
            arena_bytes=self._budget.arena_bytes(),
            holders=len(view.holders),
            queue_length=len(view.queue),
            sessions=dict(Counter(session.state for session in view.sessions)),
            operations_running=running,
            operations_stuck=running - operations.waiting_for,
            held_s=ns_to_seconds(tally.held_ns(now_ns)),
            session_held_s=ns_to_seconds(tally.session_held_ns(now_ns)),
            first_waits=tally.first_waits.histogram(),
            resumption_waits=tally.resumption_waits.histogram(),
            moved_out=tally.moved_out.totals(),
            moved_in=tally.moved_in.totals(),
            refusals=[
                Refusals(operation=operation, reason=reason, count=count)
                for (operation, reason), count in sorted(tally.refusals.items())
            ],
            hints_begun=self._requests.hints_begun,
            hints_declined=self._requests.hints_declined,
            connections=len(self._connections.open),
            connections_taken=self._connections.taken,
            connections_ended=dict(self._connections.ended),
            look_errors=self._observer.failures,
            journal_lines_lost=self._journal.dropped,
            peers=[
                PeerUse(
                    what=share.limit.name,
                    used=share.used,
                    most=share.limit.most,
                    per_user=share.limit.per_user,
                    refused=share.refused,
                )
                for share in self._shares
            ],
            log_lines_dropped=log.dropped(),
            newcomer_wait_s=self._expected.newcomer_wait_s(),
        )
        return MetricsReport(metrics=metrics)
