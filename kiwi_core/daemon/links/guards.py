"""Find out from observations which sessions have Kiwi's gate, and which processes are stopped.

A session is *guarded* while each of its processes that has memory in the GPU is linked: it has the
library, which puts a gate in front of the driver. A process without GPU memory has nothing to stop,
so it leaves the session guarded. A client that knows that its own process has no gate says so in
its hello; the session is then unguarded as soon as the driver knows the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from kiwi_core.gpu import processes
from kiwi_core.sched import events as ev
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.pager.api import Observation, Target
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)


class Guards:
    """Feeds ``GuardChanged``, ``SessionStopped`` and ``SessionContinued`` at each change."""

    def __init__(
        self,
        registry: SessionRegistry,
        links: Links,
        scheduler: Scheduler,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._registry = registry
        self._links = links
        self._scheduler = scheduler
        self._feed = feed

    def set_ungated(self, record: SessionRecord, ungated: str) -> None:
        """Record why the client's own process has no gate, as the client reports; "": it has one,
        or does not know.
        """
        record.ungated = ungated
        self._report_guard(record)

    def seen(self, target: Target, seen: Observation) -> None:
        """Take an observation of a session."""
        record = self._registry.get(target.session)
        if record is None or not seen.alive:
            return
        # A lost connection comes back soon, unless the process has replaced its program (exec).
        gated = {
            link.ref
            for link in self._links.of(record.id)
            if link.connected or link.expected or link.report.residency is not Residency.RESIDENT
        }
        using = {memory.ref for memory in seen.processes if memory.resident_bytes > 0}
        # A process whose memory is out has none in the GPU, and still no gate when it is back.
        earlier = {ref for ref in record.bare if processes.alive(ref)}
        record.bare = frozenset((using | earlier) - gated)
        record.in_driver = bool(seen.processes)
        self._report_guard(record)
        self._report_stopped(record, seen.stopped)

    def stopped(self, session: SessionId, why: str) -> None:
        """Record why a session that cannot be observed now is stopped; "": it runs."""
        record = self._registry.get(session)
        if record is not None:
            self._report_stopped(record, why)

    def _report_guard(self, record: SessionRecord) -> None:
        # A client's word about itself counts only once its program uses the driver: an unguarded
        # session is never stopped, so a false claim must not keep the GPU from others.
        guarded = not (record.ungated and record.in_driver) and not record.bare
        known = self._scheduler.session(record.id)
        if known is None or guarded is known.guarded:
            return
        pids = sorted(ref.pid for ref in record.bare)
        log.info("guard changed", session=record.id, guarded=guarded, bare=pids)
        self._feed(ev.GuardChanged(session=record.id, guarded=guarded))

    def _report_stopped(self, record: SessionRecord, why: str) -> None:
        known = self._scheduler.session(record.id)
        if known is None or why == known.stopped:
            return
        log.info("stopped" if why else "continued", session=record.id, why=why)
        if why:
            self._feed(ev.SessionStopped(session=record.id, why=why))
        else:
            self._feed(ev.SessionContinued(session=record.id))
