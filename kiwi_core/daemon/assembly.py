"""The parts of the daemon of one GPU: how they are put together, and what one asks of another."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from kiwi_core import clock
from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.admission import Admission
from kiwi_core.daemon.base.connections import Connections
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.peers import Rights
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.emulation import device_file
from kiwi_core.daemon.engine.core import Core
from kiwi_core.daemon.engine.gauges import GaugeReader, RamGauge
from kiwi_core.daemon.engine.journal import Journal
from kiwi_core.daemon.engine.messenger import Messenger
from kiwi_core.daemon.engine.observer import Observer
from kiwi_core.daemon.engine.tally import Tally
from kiwi_core.daemon.links.guards import Guards
from kiwi_core.daemon.links.host_budget import HostBudget
from kiwi_core.daemon.links.library_ram import LibraryRam
from kiwi_core.daemon.links.links import Links
from kiwi_core.daemon.links.little_ram import LittleRam
from kiwi_core.daemon.links.ownership import Ownership
from kiwi_core.daemon.links.self_proof import SelfProof
from kiwi_core.daemon.reports.announce import Announcer
from kiwi_core.daemon.reports.bookkeeper import Bookkeeper
from kiwi_core.daemon.reports.ledger import Ledger
from kiwi_core.daemon.reports.metrics import MetricsReporter
from kiwi_core.daemon.reports.status import Reporter
from kiwi_core.daemon.reports.usage import UsageReporter
from kiwi_core.daemon.roster.registry import SessionRegistry
from kiwi_core.daemon.roster.roster import OPS_AHEAD, Roster, RosterFile, RosterSaver
from kiwi_core.daemon.router import Router
from kiwi_core.daemon.sessions.bursts import Bursts
from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
from kiwi_core.daemon.sessions.gates import Gates
from kiwi_core.daemon.sessions.libraries import PreloadedLibraries
from kiwi_core.daemon.sessions.membership import Membership
from kiwi_core.daemon.sessions.recovery import roster_entry
from kiwi_core.daemon.sessions.requests import Requests
from kiwi_core.daemon.sessions.rooms import RoomRequests
from kiwi_core.gpu.ownable import coherent_machine
from kiwi_core.gpu.processes import boot_id
from kiwi_core.movers.driver_calls import RemoteDriver
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.peer_limits import (
    EXPECTED,
    PROGRAMS,
    QUEUE_PLACES,
    RELEASES,
    ROOM_REQUESTS,
    SESSIONS,
    USAGE_QUESTIONS,
)
from kiwi_core.sched.replay import JournalHeader
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.daemon.base.machine import Machine
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.options import ChildOptions
    from kiwi_core.daemon.roster.registry import SessionRecord
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Observation, Target
    from kiwi_core.sched.events import Event, SessionJoined
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)


class Assembly:
    """All parts. ``earlier`` is the roster that the last daemon has left."""

    def __init__(
        self, options: ChildOptions, machine: Machine, file: RosterFile, earlier: Roster
    ) -> None:
        self._options = options
        self._machine = machine
        self._leaving = False
        rights = Rights.of_this_process(options.asked.admin_group)
        shares = Shares.of_this_process(rights.daemon_uid, options.asked.sessions_per_user)
        self._shares_warning = shares.warning()
        self.turns = MessageTurns(shares)
        self.admission = Admission(shares, self.turns)
        self.connections = Connections(self.admission, shares)
        self.roster = RosterSaver(file, self._as_it_is)
        self._make_pager(shares)
        self._make_core(earlier)
        self._make_sessions(rights, shares)
        self._make_reports(rights, shares)
        self.core.subscribers = [
            # First: sessions wait for the grant.
            Messenger(self.core, self.registry),
            self.core,
            self.journal,
            self._gates,
            self._tally,
            self._library_ram,
            self.bursts,
            self.members,
            self._announcer,
            self.bookkeeper,
            self.roster,
        ]

    def _make_pager(self, shares: Shares) -> None:
        """Make the session registry, the links, the host budget, and the pager."""
        machine, config = self._machine, self._options.asked.config

        def died(record: SessionRecord) -> None:
            was_leaving = self.members.died(record)
            self.libraries.session_died(record.target, was_leaving=was_leaving)
            self.observer.look_soon()

        def link_died(link: Link) -> None:
            self.libraries.died(link)
            self.observer.look_soon()

        def is_idle() -> bool:
            """Return whether nobody has the GPU, waits for it, or is moved."""
            scheduler = self.core.scheduler
            return not (scheduler.holders or scheduler.waiting or self.core.operations.running)

        self.registry = SessionRegistry(died, shares[SESSIONS])
        self.links = Links(
            self.registry, machine.gpu.total_bytes, link_died, self.roster.save, shares[PROGRAMS]
        )
        coherent, pager = coherent_machine(machine.gpu.name), self._options.asked.pager
        self.self_proof = SelfProof(machine.gpu, is_idle, pager, coherent)
        self.ownership = Ownership(coherent, self.roster.save_soon, self.self_proof.objection)
        self.links.ownership = self.ownership
        self._budget = HostBudget(
            self.links, lambda: self.pager.export_footprints(), config.host_reserve_bytes,
            machine.fixed_budget_bytes,
        )  # fmt: skip
        self._library_ram = LibraryRam(
            self.links, self._budget, lambda: self.core.scheduler.crowded
        )
        self.links.ram_for = self._library_ram.room_for

        async def make_ram_room(target: Target, size_bytes: int) -> None:
            """Make room in system RAM before the driver pages anything out."""
            deadline_ns, ram = clock.now_ns() + config.lock_timeout_ns, self._library_ram
            ram.done(await ram.make_ram_room(target.session, size_bytes, deadline_ns))

        self.pager: SessionPager = SessionPager(
            RemoteDriver(machine.movers), machine.memory, config, links=self.links,
            make_ram_room=make_ram_room, store_footprints=self.roster.save,
            other_roots=self.registry.refs,
            known_unmovable=partial(machine.why_not_to_move, self.links),
        )  # fmt: skip

    def _make_core(self, earlier: Roster) -> None:
        """Make the scheduler with its journal, the core, and what observes the GPU."""
        options, machine, config = self._options, self._machine, self._options.asked.config
        tq_ns, anti_thrash, policy = options.settings(earlier)
        header = JournalHeader(
            total_bytes=machine.gpu.total_bytes,
            tq_ns=tq_ns,
            anti_thrash=anti_thrash,
            host_budget_bytes=self._budget.budget_bytes(),
            gpu_uuid=options.gpu_uuid,
            wall_time_s=time.time(),
            first_op=earlier.next_op,
            config=config,
            policy=policy,
        )
        scheduler = header.scheduler()
        path = Path(options.state) / f"{options.gpu_uuid}.journal"
        self.journal = Journal(path, header, config.journal_max_bytes)
        self.core = Core(
            scheduler, self.registry, self.pager, self.journal, self.roster,
            last_op=earlier.next_op - 1,
        )  # fmt: skip
        self.registry.remembered = scheduler.remembered
        self._guards = Guards(self.registry, self.links, scheduler, self._feed_observation)
        little_ram = LittleRam(self.registry.get, self.links.of)

        def seen(target: Target, observation: Observation) -> None:
            self._guards.seen(target, observation)
            little_ram.seen(target, observation)
            self.links.seen(target, observation)

        self.observer = Observer(
            config,
            self.pager,
            free_bytes=machine.memory.free_bytes,
            host_budget_bytes=self._budget.budget_bytes,
            everybody=lambda: self._targets(scheduler.not_lost),
            runners=lambda: self._targets(scheduler.holders),
            only_recorded=lambda: self._targets(scheduler.only_recorded),
            waiting=lambda: scheduler.waiting,
            feed=self._feed_observation,
            found=self._found_elsewhere,
            seen=seen,
            # Then do not ask the driver: an operation or the pager works on the session.
            busy=lambda session: (
                session in self.core.operations.sessions or self.pager.busy(session)
            ),
        )
        self.core.observer, self.core.guards = self.observer, self._guards

    def _make_sessions(self, rights: Rights, shares: Shares) -> None:
        """Make what handles the messages of sessions and libraries."""
        asked, core = self._options.asked, self.core
        self._expected = ExpectedSessions(
            core.scheduler, shares[EXPECTED],
            lambda: self.observer.is_blind or bool(self._machine.memory.without_nvml),
        )  # fmt: skip
        self.bursts = Bursts(core, shares[QUEUE_PLACES])
        self.members = Membership(
            self.registry, core, self.links, self._guards, self.bursts, self._expected,
            dict(asked.priorities),
        )  # fmt: skip
        rooms = RoomRequests(core, self.links, self.registry, shares[ROOM_REQUESTS])
        self._gates = Gates(
            core, self.links, self.registry, self.bursts, rooms,
            lambda session: session not in self.observer.without_driver,
        )  # fmt: skip
        self.libraries = self.members.libraries = PreloadedLibraries(
            core, self.links, self._gates, rooms, self.registry, self.members, self._library_ram,
            self.ownership, self.pager,
        )  # fmt: skip
        self._requests = Requests(
            asked.config, self.registry, rights, core, self.members, self.bursts, self._expected,
            shares[RELEASES], self.roster.save,
        )  # fmt: skip

    def _make_reports(self, rights: Rights, shares: Shares) -> None:
        """Make what people and metrics servers read, and the router."""
        machine, options, scheduler = self._machine, self._options, self.core.scheduler

        def kiwis() -> set[ProcessRef]:
            """Return the root processes of everything that Kiwi manages on this GPU."""
            linked = (link.ref for link in self.links.everybody())
            return {*self.registry.refs(), *linked, *filter(None, [self.self_proof.ref])}

        self._tally = Tally()
        self.gauges = GaugeReader(
            machine.memory, kiwis=kiwis, movers=lambda: machine.movers.pids,
            outside_bytes=lambda: scheduler.outside_bytes, names=self._expected.names_outside,
            device=device_file(options.emulation), changed=lambda: self._announcer.changed(),
        )  # fmt: skip
        emulated = options.emulation is not None
        reporter = Reporter(
            scheduler, self.registry, rights, machine.gpu, self.links, self.pager, self._budget,
            self.gauges, RamGauge(), self._expected, self.self_proof, errors=self._errors,
            emulated=emulated,
        )  # fmt: skip
        metrics = MetricsReporter(
            machine.gpu, self.core, self._tally, self.connections, self.bursts, self._requests,
            shares, self.observer, self.journal, self._budget, self.gauges, self._expected,
            emulated,
        )  # fmt: skip
        ledger = Ledger(Path(options.state) / f"{options.gpu_uuid}.usage")
        self.bookkeeper = Bookkeeper(scheduler, self.registry, ledger)
        usage = UsageReporter(self.bookkeeper, ledger, rights, shares[USAGE_QUESTIONS])
        self._announcer = Announcer(self.connections, reporter)
        self.router = Router(
            self.connections, machine.gpu, options.emulation, self.bursts, self.members,
            self.libraries, self._requests, reporter, usage, metrics,
        )  # fmt: skip

    # --- what one part tells another --------------------------------------------------------------

    def found_again(self, record: SessionRecord, event: SessionJoined) -> None:
        """Take a session of the earlier daemon, which lives."""
        self.links.expect_all()  # asking the driver may have taken long
        priority = self.members.priority_of(record)
        self.core.feed(msgspec.structs.replace(event, priority=priority, owner=record.owner))
        self.members.expect_back(record)

    def leave(self) -> None:
        """Prepare for the end of the daemon: observations count no longer, no process becomes a
        session, and the roster keeps the earlier state."""
        self._leaving = self.libraries.closed = True
        self.core.subscribers.remove(self.roster)

    def _feed_observation(self, event: Event) -> None:
        if not self._leaving:
            self.core.feed(event)

    def _found_elsewhere(self, where: SessionJoined, began_ns: int) -> None:
        """Correct the scheduler: the driver has a session's memory paged out or locked although the
        scheduler has it as resident. The roster was lost, or another program moved it. A session
        that is only locked and does not want the GPU is left to whoever locked it."""
        record = self.registry.get(where.session)
        known = self.core.scheduler.session(where.session)
        if record is None or known is None:
            return
        if not self.core.scheduler.believed_in(where.session, began_ns):
            return
        wants = known.waits or self.core.in_burst(record)
        if where.residency is Residency.SUSPENDED and not wants:
            return
        log.warning("found elsewhere", session=known.id, residency=where.residency.value)
        self._feed_observation(msgspec.structs.replace(where, burst=known.burst))

    def _as_it_is(self) -> Roster:
        scheduler = self.core.scheduler
        footprints = self.pager.export_footprints()
        return Roster(
            boot_id=boot_id(),
            next_op=self.core.last_op + 1 + OPS_AHEAD,
            tq_ns=scheduler.tq_ns,
            anti_thrash=scheduler.anti_thrash,
            policy=scheduler.policy,
            sessions=[roster_entry(self.core, record) for record in self.registry],
            links=self.links.roster(),
            off=self.links.roster_off(),
            objections=self.ownership.roster(),
            footprints=[(ref.pid, ref.start_ticks, size) for ref, size in footprints.items()],
            beside=[
                (ref.pid, ref.start_ticks, one.free_bytes, one.hidden_bytes)
                for ref, one in self.pager.export_page_out_readings().items()
            ],
        )

    def _targets(self, sessions: Iterable[SessionId]) -> list[Target]:
        records = map(self.registry.get, sessions)
        return [record.target for record in records if record is not None]

    def _errors(self) -> list[str]:
        errors = self._machine.warnings()
        if why := self._machine.memory.without_nvml:
            errors.append(f"{user_texts.WITHOUT_NVML} {why}")
        elif self.pager.nameless:
            errors.append(user_texts.NAMELESS)
        errors += filter(None, [self.observer.error, self._shares_warning])
        if self.roster.failing:
            errors.append("The state directory cannot be written; a crash could not be recovered.")
        if self.bookkeeper.failing:
            errors.append("Usage cannot be written (disk full?); it is kept in memory meanwhile.")
        if self.journal.dropped:
            errors.append(f"The journal lost {self.journal.dropped} lines (disk full?).")
        return errors
