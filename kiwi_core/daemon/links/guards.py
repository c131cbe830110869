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
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Observation, Target
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)


class Guards:
    """Feeds ``GuardChanged``, ``SessionStopped`` and ``SessionContinued`` at each change."""

    def __init__(
        self, registry: SessionRegistry, links: Links, feed: Callable[[ev.Event], None]
    ) -> None:
        self._registry = registry
        self._links = links
        self._feed = feed

    def set_ungated(self, member: SessionRecord, ungated: str) -> None:
        """Record why the client's own process has no gate, as the client reports; "": it has one,
        or does not know.
        """
        member.ungated = ungated
        self._report_guard(member)

    def seen(self, target: Target, seen: Observation) -> None:
        """Take an observation of a session."""
        member = self._registry.get(target.session)
        if member is None or not seen.alive:
            return
        gated = self._gated(member.id)
        using = {memory.ref for memory in seen.processes if memory.resident_bytes > 0}
        # A process whose memory is out has none in the GPU, and still no gate when it is back.
        earlier = {ref for ref in member.bare if processes.alive(ref)}
        member.bare = frozenset((using | earlier) - gated)
        member.in_driver = bool(seen.processes)
        self._report_guard(member)
        self._report_stopped(member, seen.stopped)

    def stopped(self, session: SessionId, why: str) -> None:
        """Record why a session that cannot be observed now is stopped; "": it runs."""
        member = self._registry.get(session)
        if member is not None:
            self._report_stopped(member, why)

    def _gated(self, session: SessionId) -> set[ProcessRef]:
        """Return the processes that have the library. A lost connection comes back soon, unless the
        process has replaced its program (exec)."""
        return {
            link.ref
            for link in self._links.of(session)
            if link.connected or link.expected or link.report.residency is not Residency.RESIDENT
        }

    def _report_guard(self, member: SessionRecord) -> None:
        # A client's word about itself counts only once its program uses the driver: an unguarded
        # session is never stopped, so a false claim must not keep the GPU from others.
        guarded = not (member.ungated and member.in_driver) and not member.bare
        if guarded is member.guarded:
            return
        member.guarded = guarded
        pids = sorted(ref.pid for ref in member.bare)
        log.info("guard changed", session=member.id, guarded=guarded, bare=pids)
        self._feed(ev.GuardChanged(session=member.id, guarded=guarded))

    def _report_stopped(self, member: SessionRecord, why: str) -> None:
        if why == member.stopped:
            return
        member.stopped = why
        log.info("stopped" if why else "continued", session=member.id, why=why)
        if why:
            self._feed(ev.SessionStopped(session=member.id, why=why))
        else:
            self._feed(ev.SessionContinued(session=member.id))
