"""The status for one reader: the scheduler's view, with names and rights applied.

Another user's session is shown without name and pid: its position and bytes matter to everybody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core import __version__, clock
from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.peers import user_name
from kiwi_core.daemon.reports.filled import filled
from kiwi_core.daemon.roster.registry import ANOTHER_USER
from kiwi_core.errors import CallerError
from kiwi_core.sched.policy import names
from kiwi_core.sched.policy.registry import POLICIES
from kiwi_core.states import Notice
from kiwi_core.units import SessionId, ns_to_seconds
from kiwi_core.wire import messages as m
from kiwi_core.wire.framing import encode
from kiwi_core.wire.words import keeps_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.daemon.base.peers import Peer, Rights
    from kiwi_core.daemon.engine.gauges import GaugeReader, RamGauge
    from kiwi_core.daemon.links.host_budget import HostBudget
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.links.self_proof import SelfProof
    from kiwi_core.daemon.roster.registry import Known, SessionRecord, SessionRegistry
    from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.session_pager import SessionPager
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.sched.view import QueueView, SessionView

_POLICIES: Final = [m.PolicyStatus(name=name, summary=POLICIES[name].summary) for name in names()]


HISTORY_MAX: Final = 1024
"""Entries in one message, about 200 KiB: a longer one would block the loop too long."""


@dataclass(eq=False, repr=False)
class Reporter:
    """``errors`` returns what is wrong with the daemon itself, in sentences."""

    _scheduler: Scheduler
    _registry: SessionRegistry
    _rights: Rights
    _gpu: GpuInfo
    _links: Links
    _pager: SessionPager
    _budget: HostBudget
    gauges: GaugeReader
    _ram: RamGauge
    _expected: ExpectedSessions
    _self_proof: SelfProof
    errors: Callable[[], list[str]]
    emulated: bool
    _began_ns: int = field(default_factory=clock.now_ns)

    # --- status ---------------------------------------------------------------------------------

    def status(self, reader: Peer, now_ns: int) -> m.StatusReport:
        view = self._scheduler.view(now_ns, ahead=True)
        blocked = {entry.session: entry for entry in view.queue if entry.blocked}
        names = self._names(reader)
        self._ram.begin(lambda session: self._registry.get(session) is not None)
        gpu = filled(
            m.GpuStatus,
            self._gpu,
            emulated=self.emulated,
            memory=filled(m.MemoryStatus, view, arena_bytes=self._budget.arena_bytes()),
            scheduler=filled(m.SchedulerStatus, view),
            holders=list(view.holders),
            queue=[
                filled(m.QueueEntry, entry, blocked=entry.blocked is not None)
                for entry in view.queue
            ],
            sessions=[
                self._session(session, blocked.get(session.id), names, reader)
                for session in view.sessions
            ],
            swaps=[
                filled(
                    m.SwapStatus,
                    swap,
                    name=names(swap.session),
                    seconds=ns_to_seconds(swap.elapsed_ns),
                    ago_s=ns_to_seconds(now_ns - swap.at_ns),
                )
                for swap in view.swaps
            ],
            daemon_version=__version__,
            daemon_pid=os.getpid(),
            uptime_s=ns_to_seconds(now_ns - self._began_ns),
            pager_text=user_texts.pager_of_the_machine(
                self._self_proof.objection(), self._self_proof.proof, self._self_proof.trouble
            ),
            errors=self.errors(),
            history_serial=self._scheduler.history_serial,
            may_set=self._rights.is_admin(reader),
            policies=_POLICIES,
            gauges=self.gauges.now,
            outside=self.gauges.outside(reader, self._rights),
            newcomer_wait_s=self._expected.newcomer_wait_s(),
            expected=self._expected.count(),
        )
        return m.StatusReport(gpu=gpu)

    def status_line(self, reader: Peer, now_ns: int) -> bytes:
        """Return the encoded status. If it is too long for one line (very many sessions, very long
        names), leave out sessions, the reader's own last, and add an error that says so."""
        report = self.status(reader, now_ns)
        hidden = 0
        while True:
            try:
                return encode(report)
            except CallerError as error:
                if error.code != "too-large" or not report.gpu.sessions:
                    raise
            sessions = sorted(report.gpu.sessions, key=lambda session: not session.mine)
            kept = sessions[: len(sessions) // 2]
            hidden += len(sessions) - len(kept)
            said = f"{hidden} sessions are not shown: there are too many."
            gpu = msgspec.structs.replace(report.gpu, sessions=kept, errors=[*self.errors(), said])
            report = m.StatusReport(gpu=gpu)

    def _session(
        self,
        view: SessionView,
        blocked: QueueView | None,
        names: Callable[[str], str],
        reader: Peer,
    ) -> m.SessionStatus:
        """Return a session's status, with why its turn is ``blocked``, or else its problem."""
        known, record = view.record, self._registry.get(view.id)
        mine = record is not None and self._rights.may_see(reader, record.identity)
        seen = record if mine else None
        problem, detail = known.problem, view.detail
        if known.problem not in (Notice.LOST, Notice.STUCK):
            if known.kept_out:
                problem, detail = Notice.KEPT_OUT, f"by {known.kept_out}"
            elif blocked:
                problem, detail = blocked.blocked, blocked.detail
        detail = detail if mine else ""
        told = user_texts.sentence(problem, detail) if problem else ("", "")

        def refs(record: SessionRecord) -> list[ProcessRef]:
            """Return its process and others with a gate: paged-out memory is in their RAM."""
            return [record.ref, *(link.ref for link in self._links.of(record.id))]

        pager_text = ""
        if mine:
            why_driver = self._links.why_driver(view.id)
            pager_text = user_texts.moved_by_driver(why_driver, self._self_proof.objection())
        connected = self._links.connected(view.id)
        return filled(
            m.SessionStatus,
            view,
            known,
            pid=seen.ref.pid if seen else 0,
            owner=user_name(seen.uid) if seen else ANOTHER_USER,
            name=names(view.id),
            kernel_id=seen.kernel_id if seen else "",
            mine=mine,
            connected=connected or (record is not None and record.connection is not None),
            pager=self._pager.moved_by(view.id),
            pager_text=pager_text,
            unowned=self._links.unowned(view.id) if mine else {},
            problem=problem.value if problem else "",
            problem_text=" ".join(told).strip(),
            unguarded_text="" if known.guarded else user_texts.unguarded(seen),
            ram_bytes=self._ram.of(seen.id, partial(refs, seen)) if seen else None,
        )

    # --- waiting --------------------------------------------------------------------------------

    def waiting(self, now_ns: int) -> Iterator[tuple[SessionRecord, m.Waiting]]:
        """Yield a message for every waiter: its position, the holders, and the expected wait. A
        status of the same ``now_ns`` has the same figures."""
        holders, queue = self._scheduler.queue(now_ns)
        kept = self._scheduler.place_kept(now_ns)
        naming = self._registry.naming() if queue else None
        for entry in queue:
            record = self._registry.get(entry.session)
            if record is None or record.connection is None:
                continue
            names = self._names(record.connection.peer, naming)
            first = [*map(names, holders[:4])]
            told = user_texts.sentence(entry.blocked, entry.detail) if entry.blocked else ("", "")
            activity = entry.activity
            if kept is not None and entry.position == 1:
                keeps = f"{names(kept[0])} {keeps_text(ns_to_seconds(kept[1]))}"
                activity = activity or keeps
            yield (
                record,
                filled(
                    m.Waiting,
                    entry,
                    burst=record.client_burst,
                    ahead=entry.position - 1,
                    holder=", ".join(first[:3]) + (" and others" if len(first) > 3 else ""),
                    activity=activity,
                    detail=" ".join(told).strip(),
                ),
            )

    # --- names ----------------------------------------------------------------------------------

    def _names(
        self, reader: Peer, naming: Callable[[Known], str] | None = None
    ) -> Callable[[str], str]:
        """Return what gives the name of a session, there or departed, that ``reader`` sees."""
        shown = naming or self._registry.naming()

        def name(session: str) -> str:
            known = self._registry.known(session)
            visible = known is not None and self._rights.may_see(reader, known.identity)
            return shown(known) if known is not None and visible else ANOTHER_USER

        return name

    # --- stories --------------------------------------------------------------------------------

    def story(self, reader: Peer, session: str) -> m.StoryReport:
        """Raise ``CallerError("no-such-session")``, also for a session of another user."""
        record = self._registry.get(session)
        if record is None or not self._rights.may_see(reader, record.identity):
            raise CallerError(
                "no-such-session",
                f"You have no session {session!r} on this GPU.",
                "`kiwi status` lists yours.",
            )
        now_ns = clock.now_ns()
        lines = [
            m.StoryLine(ago_s=ns_to_seconds(now_ns - line.at_ns), text=line.text)
            for line in self._scheduler.story(SessionId(session))
        ]
        return m.StoryReport(session=session, lines=lines)

    # --- history --------------------------------------------------------------------------------

    def history_line(self, reader: Peer, since: int) -> bytes:
        """Return the encoded history. What one line cannot hold is left for the next request."""
        now_ns = clock.now_ns()
        changed = self._scheduler.history(since, now_ns)
        names = self._names(reader)
        count = min(len(changed), HISTORY_MAX)
        while True:
            more = count < len(changed)
            last = changed[count - 1].serial if more else self._scheduler.history_serial
            sessions: dict[str, m.HistorySession] = {}
            for id_ in {entry.session for entry in changed[:count]}:
                who = self._registry.known(id_)
                mine = who is not None and self._rights.may_see(reader, who.identity)
                kernel_id = who.kernel_id if who is not None and mine else ""
                sessions[id_] = m.HistorySession(name=names(id_), mine=mine, kernel_id=kernel_id)
            entries = [
                filled(
                    m.HistoryEntry,
                    view,
                    began_ago_s=ns_to_seconds(now_ns - view.began_ns),
                    ended_ago_s=_seconds_since(view.ended_ns, now_ns),
                )
                for view in changed[:count]
            ]
            try:
                return encode(
                    m.HistoryReport(last=last, entries=entries, sessions=sessions, more=more)
                )
            except CallerError as error:  # very long names of very many sessions
                if error.code != "too-large" or count < 2:
                    raise
            count //= 2


def _seconds_since(at_ns: int | None, now_ns: int) -> float | None:
    return None if at_ns is None else ns_to_seconds(now_ns - at_ns)
