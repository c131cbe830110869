"""The answer to ``get-metrics``: what was counted, and how things are now."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kiwi_core import __version__
from kiwi_core.daemon import log
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire.messages import MetricsReport
from kiwi_core.wire.metrics import GpuMetrics, PeerUse, Refusals

if TYPE_CHECKING:
    from kiwi_core.daemon.core import Core
    from kiwi_core.daemon.desk import Desk
    from kiwi_core.daemon.gauges import Gauges
    from kiwi_core.daemon.host_budget import HostBudget
    from kiwi_core.daemon.journal import Journal
    from kiwi_core.daemon.observer import Observer
    from kiwi_core.gpu.nvml import GpuInfo


def metrics_report(
    gpu: GpuInfo,
    core: Core,
    desk: Desk,
    observer: Observer,
    journal: Journal,
    budget: HostBudget,
    gauges: Gauges,
    *,
    emulated: bool,
    began_ns: int,
) -> MetricsReport:
    """What was counted since ``began_ns``, and how things are now."""
    now_ns = time.monotonic_ns()
    tally, operations = core.tally, core.operations
    view = core.scheduler.view(now_ns)
    running = operations.running
    metrics = GpuMetrics(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        emulated=emulated,
        driver_version=gpu.driver_version,
        daemon_version=__version__,
        uptime_s=ns_to_seconds(now_ns - began_ns),
        total_bytes=view.total_bytes,
        free_bytes=view.free_bytes,
        resident_bytes=sum(session.resident_bytes for session in view.sessions),
        outside_bytes=view.outside_bytes,
        paged_out_bytes=view.paged_out_bytes,
        host_budget_bytes=view.host_budget_bytes,
        arena_bytes=budget.arena_bytes(),
        tq_s=ns_to_seconds(view.tq_ns),
        anti_thrash=view.anti_thrash,
        serialised=view.serialised,
        policy=view.policy,
        holders=len(view.holders),
        queue_length=len(view.queue),
        sessions=dict(Counter(session.state for session in view.sessions)),
        operations_running=running,
        operations_stuck=running - operations.waiting_for,
        held_s=ns_to_seconds(tally.held_ns(now_ns)),
        session_held_s=ns_to_seconds(tally.session_held_ns(now_ns)),
        first_waits=tally.first_waits.histogram(),
        resumption_waits=tally.resumption_waits.histogram(),
        waits_given_up=tally.waits_given_up,
        suspensions=tally.suspensions,
        moved_out=tally.moved_out.totals(),
        moved_in=tally.moved_in.totals(),
        refusals=[
            Refusals(operation=operation, reason=reason, count=count)
            for (operation, reason), count in sorted(tally.refusals.items())
        ],
        lost_out=tally.lost_out,
        lost_in=tally.lost_in,
        overdue=tally.overdue,
        hints_begun=desk.wishes.hints_begun,
        hints_declined=desk.wishes.hints_declined,
        ignored_events=view.ignored_events,
        connections=len(desk.connections),
        connections_taken=desk.taken,
        connections_ended=dict(desk.ended),
        look_errors=observer.failures,
        journal_lines_lost=journal.dropped,
        peers=_peers(desk),
        log_lines_dropped=log.dropped(),
        **msgspec.structs.asdict(gauges.now),
    )
    return MetricsReport(metrics=metrics)


def _peers(desk: Desk) -> list[PeerUse]:
    desk.sessions.places.recount()
    return [
        PeerUse(
            what=share.limit.name,
            used=share.used,
            most=share.limit.most,
            per_user=share.limit.per_user,
            refused=share.refused,
        )
        for share in desk.shares
    ]
