"""The status for one reader: the scheduler's view, with names and rights applied.

Another user's session is shown without name and pid: its position and bytes matter to everybody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core import __version__, clock
from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.peers import user_name
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
    from kiwi_core.sched.view import GpuView, HistoryView, QueueView, SessionView

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
        gpu = self._gpu
        blocked = {entry.session: entry for entry in view.queue if entry.blocked}
        names = self._names(reader)
        self._ram.begin(lambda session: self._registry.get(session) is not None)
        return m.StatusReport(
            gpu=m.GpuStatus(
                uuid=gpu.uuid,
                name=gpu.name,
                index=gpu.index,
                emulated=self.emulated,
                memory=_memory(view, self._budget.arena_bytes()),
                scheduler=_scheduler(view),
                holders=list(view.holders),
                queue=[_queue_entry(entry) for entry in view.queue],
                sessions=[
                    self._session(session, blocked.get(session.id), names, reader)
                    for session in view.sessions
                ],
                swaps=[
                    m.SwapStatus(
                        session=swap.session,
                        name=names(swap.session),
                        direction=swap.direction,
                        bytes_moved=swap.bytes_moved,
                        seconds=ns_to_seconds(swap.elapsed_ns),
                        ago_s=ns_to_seconds(now_ns - swap.at_ns),
                    )
                    for swap in view.swaps
                ],
                driver_version=gpu.driver_version,
                daemon_version=__version__,
                daemon_pid=os.getpid(),
                uptime_s=ns_to_seconds(now_ns - self._began_ns),
                pager_text=user_texts.pager_of_the_machine(
                    self._self_proof.objection(),
                    self._self_proof.proof,
                    self._self_proof.trouble,
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
        )

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
        record = self._registry.get(view.id)
        mine = record is not None and self._rights.may_see(reader, record.identity)
        linked = self._links.connected(view.id)
        said = (blocked.blocked, blocked.detail) if blocked else (view.problem, view.detail)
        if view.problem in (Notice.LOST, Notice.STUCK):
            said = (view.problem, view.detail)
        elif view.kept_out:
            said = (Notice.KEPT_OUT, f"by {view.kept_out}")
        problem, detail = said[0], said[1] if mine else ""
        problem_text = " ".join(user_texts.sentence(problem, detail)).strip() if problem else ""
        return m.SessionStatus(
            id=view.id,
            pid=record.ref.pid if record and mine else 0,
            owner=user_name(record.uid) if record and mine else ANOTHER_USER,
            name=names(view.id),
            kernel_id=record.kernel_id if record and mine else "",
            mine=mine,
            connected=linked or (record is not None and record.connection is not None),
            pager=self._pager.moved_by(view.id),
            pager_text=(
                user_texts.moved_by_driver(
                    self._links.why_driver(view.id), self._self_proof.objection()
                )
                if mine
                else ""
            ),
            unowned=self._links.unowned(view.id) if mine else {},
            state=view.state,
            resident_bytes=view.resident_bytes,
            paged_out_bytes=view.paged_out_bytes,
            suspensions=view.suspensions,
            held_s=ns_to_seconds(view.held_ns),
            waited_s=ns_to_seconds(view.waited_ns),
            lingering=view.lingering,
            peak_bytes=view.peak_bytes,
            time_left_s=_seconds(view.time_left_ns),
            keeps_s=_seconds(view.keeps_ns),
            problem=problem.value if problem else "",
            problem_text=problem_text,
            priority=view.priority,
            guarded=view.guarded,
            unguarded_text="" if view.guarded else user_texts.unguarded(record if mine else None),
            stopped=view.stopped,
            kept_out=view.kept_out,
            ram_bytes=self._ram_bytes(record) if record and mine else None,
        )

    def _ram_bytes(self, record: SessionRecord) -> int | None:
        """Return the RAM of its process and of others with a gate: paged-out memory is in them."""

        def refs() -> list[ProcessRef]:
            return [record.ref, *(link.ref for link in self._links.of(record.id))]

        return self._ram.of(record.id, refs)

    # --- waiting --------------------------------------------------------------------------------

    def waiting(self, now_ns: int) -> Iterator[tuple[SessionRecord, m.Waiting]]:
        """Yield a message for every waiter: its position, the holders, and the expected wait. A
        status of the same ``now_ns`` has the same figures."""
        holders, queue = self._scheduler.queue(now_ns)
        kept = self._scheduler.place_kept(now_ns)
        naming = self._registry.naming() if queue else None
        for entry in queue:
            record = self._registry.get(entry.session)
            if record is not None and record.connection is not None:
                names, keeps = self._names(record.connection.peer, naming), ""
                if kept is not None and entry.position == 1:
                    keeps = f"{names(kept[0])} {keeps_text(ns_to_seconds(kept[1]))}"
                yield record, self._word(record, _listed(map(names, holders)), entry, keeps)

    def _word(self, record: SessionRecord, holder: str, entry: QueueView, keeps: str) -> m.Waiting:
        """Return the message for one waiter. ``keeps`` says who keeps a place from it; "":
        nobody."""
        text, remedy = (
            user_texts.sentence(entry.blocked, entry.detail) if entry.blocked else ("", "")
        )
        return m.Waiting(
            burst=record.client_burst,
            position=entry.position,
            ahead=entry.position - 1,
            holder=holder,
            expected_wait_s=_seconds(entry.expected_wait_ns),
            expected_low_s=_seconds(entry.expected_low_ns),
            expected_high_s=_seconds(entry.expected_high_ns),
            expected_why=entry.expected_why,
            activity=entry.activity or keeps,
            blocked=entry.blocked,
            detail=f"{text} {remedy}".strip(),
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
        count = min(len(changed), HISTORY_MAX)
        while True:
            more = count < len(changed)
            last = changed[count - 1].serial if more else self._scheduler.history_serial
            try:
                return encode(
                    m.HistoryReport(
                        last=last,
                        entries=[_entry(view, now_ns) for view in changed[:count]],
                        sessions=self._named(changed[:count], reader),
                        more=more,
                    )
                )
            except CallerError as error:  # very long names of very many sessions
                if error.code != "too-large" or count < 2:
                    raise
            count //= 2

    def _named(self, entries: tuple[HistoryView, ...], reader: Peer) -> dict[str, m.HistorySession]:
        names = self._names(reader)
        found: dict[str, m.HistorySession] = {}
        for id_ in {entry.session for entry in entries}:
            who = self._registry.known(id_)
            mine = who is not None and self._rights.may_see(reader, who.identity)
            kernel_id = who.kernel_id if who is not None and mine else ""
            found[id_] = m.HistorySession(name=names(id_), mine=mine, kernel_id=kernel_id)
        return found


def _listed(names: Iterator[str]) -> str:
    first = [*islice(names, 4)]
    return ", ".join(first[:3]) + (" and others" if len(first) > 3 else "")


def _entry(view: HistoryView, now_ns: int) -> m.HistoryEntry:
    ended_ns = view.ended_ns
    return m.HistoryEntry(
        id=view.id,
        serial=view.serial,
        session=view.session,
        kind=view.kind,
        began_ago_s=ns_to_seconds(now_ns - view.began_ns),
        ended_ago_s=None if ended_ns is None else ns_to_seconds(now_ns - ended_ns),
        bytes_moved=view.bytes_moved,
        ok=view.ok,
        hinted=view.hinted,
    )


def _memory(view: GpuView, arena_bytes: int) -> m.MemoryStatus:
    return m.MemoryStatus(
        total_bytes=view.total_bytes,
        free_bytes=view.free_bytes,
        paged_out_bytes=view.paged_out_bytes,
        host_budget_bytes=view.host_budget_bytes,
        outside_bytes=view.outside_bytes,
        arena_bytes=arena_bytes,
    )


def _scheduler(view: GpuView) -> m.SchedulerStatus:
    return m.SchedulerStatus(
        tq_s=ns_to_seconds(view.tq_ns),
        anti_thrash=view.anti_thrash,
        serialised=view.serialised,
        why=view.why,
        swap_round_trip_s=_seconds(view.swap_round_trip_ns),
        policy=view.policy,
        floor_s=ns_to_seconds(view.floor_ns),
        foretold=view.foretold,
        foretold_well=view.foretold_well,
    )


def _queue_entry(entry: QueueView) -> m.QueueEntry:
    return m.QueueEntry(
        session=entry.session,
        position=entry.position,
        expected_wait_s=_seconds(entry.expected_wait_ns),
        waited_s=ns_to_seconds(entry.waited_ns),
        expected_low_s=_seconds(entry.expected_low_ns),
        expected_high_s=_seconds(entry.expected_high_ns),
        expected_why=entry.expected_why,
        blocked=entry.blocked is not None,
        kept_out=entry.kept_out,
    )


def _seconds(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else ns_to_seconds(duration_ns)
