"""The daemon of one GPU: assemble socket, router, core, observer and roster; run; end cleanly."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from kiwi_core import clock
from kiwi_core.client.directory import LEFT_SUFFIX
from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.address import Address
from kiwi_core.daemon.base.admission import Admission, Door
from kiwi_core.daemon.base.claim import GpuClaim
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.connections import Connections
from kiwi_core.daemon.base.directories import make_placing_lock, prepare_directory, sockets_mode
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.peers import Rights
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.base.sockets import OneDaemonLock, alone
from kiwi_core.daemon.base.tasks import endless
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
from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
from kiwi_core.daemon.roster.roster import OPS_AHEAD, Roster, RosterFile, RosterSaver
from kiwi_core.daemon.router import Router
from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
from kiwi_core.daemon.sessions.gates import Gates
from kiwi_core.daemon.sessions.link_handler import LinkHandler
from kiwi_core.daemon.sessions.orphans import Orphans
from kiwi_core.daemon.sessions.recovery import recover
from kiwi_core.daemon.sessions.requests import RequestHandler
from kiwi_core.daemon.sessions.session_handler import SessionHandler
from kiwi_core.daemon.sessions.shutdown import everybody_back
from kiwi_core.daemon.sessions.unused import Unused
from kiwi_core.daemon.supervised import READY
from kiwi_core.errors import CallerError
from kiwi_core.gpu.ownable import coherent_machine
from kiwi_core.gpu.processes import boot_id
from kiwi_core.movers.driver_calls import RemoteDriver
from kiwi_core.pager.api import ProcessRef
from kiwi_core.pager.footprints import PageOutReading
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
    from collections.abc import Iterable, Mapping

    from kiwi_core.daemon.base.machine import Machine
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.options import ChildOptions
    from kiwi_core.pager.api import Observation, Target
    from kiwi_core.sched.events import Event, SessionJoined
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

ACCOUNTS_WITHIN_S = 2.0
"""Time to write the last usage sums when a daemon ends."""


class GpuDaemon:
    def __init__(self, options: ChildOptions, machine: Machine) -> None:
        self._options = options
        self._machine = machine
        self._config = options.asked.config
        self._stop = asyncio.Event()
        self._leaving = False
        self._lacks_state = False
        """True while the state directory is gone and cannot be made again."""
        self.ended_unused = False
        """True if it ends because nobody needs it."""

    def stop(self) -> None:
        self._stop.set()

    def end_if_unused(self) -> None:
        """Stop if nobody needs this daemon. Called when the supervisor allows it."""
        if not self._stop.is_set() and self._unused.end():
            log.info("nobody needs this daemon", since_s=self._unused.after_s)
            self.ended_unused = True
            self.stop()

    async def run(self) -> None:
        sockets = Path(self._options.sockets)
        path = sockets / f"{self._options.gpu_uuid}.sock"
        claim = GpuClaim(self._options.gpu_uuid, path)
        self._prepare_directories()
        lock = OneDaemonLock(path.with_suffix(".lock"))
        if not await alone(claim, lock, path, self._stop):
            return
        self._note_left({})
        file = RosterFile(Path(self._options.state) / f"{self._options.gpu_uuid}.roster")
        self._roster = RosterSaver(file, self._as_it_is)
        roster = file.read()
        self._assemble(roster)
        self._links.restore(roster)
        self._ownership.restore(roster.objections)
        self._pager.import_footprints(
            {ProcessRef(pid, ticks): size for pid, ticks, size in roster.footprints}
        )
        self._pager.import_page_out_readings(
            {ProcessRef(pid, ticks): PageOutReading(*both) for pid, ticks, *both in roster.beside}
        )
        await recover(roster, self._pager, self._registry, self._found_again)
        self._roster.save()  # a crash after this point must find the settings
        address = Address(
            path,
            lock,
            lambda sock: Door(
                sock, self._admission, lambda: Connection(self._router, self._config, self._turns)
            ),
            complete=self._has_state_directory,
            restored=self._make_files_again,
            taken=self.stop,
        )
        address.open()
        claim.serve(lambda: self._is_reachable(address))
        tasks = [
            endless(address.keep(), "keeping the address"),
            endless(self._observer.run(), "observing"),
            endless(self._gauges.run(), "reading the gauges"),
            endless(self._self_proof.run(), "proving this machine"),
        ]
        log.info("ready", gpu=self._options.gpu_uuid, socket=str(path))
        self._unused = Unused(
            self._options.asked.end_unused_after_s, address, self._connections,
            self._registry, self._links, self._core.operations, self._orphans, _tell_supervisor,
        )  # fmt: skip
        # What exists now stays until the daemon ends. A full collection would look through it for
        # ten milliseconds and more, and every client would wait.
        gc.freeze()
        _tell_supervisor(READY)
        tasks.append(endless(self._unused.watch(), "looking whether it is unused"))
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        address.close()
        await self._leave()
        claim.close()

    # --- its directories ------------------------------------------------------------------------

    def _prepare_directories(self) -> None:
        prepare_directory(Path(self._options.sockets), sockets_mode())
        make_placing_lock(Path(self._options.sockets))
        prepare_directory(Path(self._options.state))

    def _is_reachable(self, address: Address) -> bool:
        """Return whether clients find this daemon. A starting daemon asks; it may have replaced the
        emulated GPUs' state, so put that back first."""
        self._options.keep_emulated_state()
        return not self._stop.is_set() and address.is_found()

    def _has_state_directory(self) -> bool:
        return os.path.isdir(self._options.state)

    def _make_files_again(self) -> None:
        """Write the files beside the socket again: they are gone, too, and a crash needs them."""
        self._options.keep_emulated_state()
        try:
            self._prepare_directories()
        except CallerError as error:
            if not self._lacks_state:  # logged once; it is tried again every second
                log.error("the state directory cannot be made again", why=str(error))
            self._lacks_state = True
            return
        self._lacks_state = False
        self._roster.save_anew()
        self._journal.begin_again()

    # --- putting together -----------------------------------------------------------------------

    def _assemble(self, roster: Roster) -> None:
        options, machine, config = self._options, self._machine, self._config
        rights = Rights.of_this_process(options.asked.admin_group)
        shares = Shares.of_this_process(rights.daemon_uid, options.asked.sessions_per_user)
        tq_ns, anti_thrash, policy = options.settings(roster)
        self._assemble_pager(shares)
        header = JournalHeader(
            total_bytes=machine.gpu.total_bytes,
            tq_ns=tq_ns,
            anti_thrash=anti_thrash,
            host_budget_bytes=self._budget.budget_bytes(),
            gpu_uuid=options.gpu_uuid,
            wall_time_s=time.time(),
            first_op=roster.next_op,
            config=config,
            policy=policy,
        )
        scheduler = header.scheduler()
        journal = Journal(
            Path(options.state) / f"{options.gpu_uuid}.journal", header, config.journal_max_bytes
        )
        self._journal = journal
        self._shares_warning = shares.warning()
        self._turns = MessageTurns(shares)
        self._admission = Admission(shares, self._turns)
        self._connections = Connections(self._admission, shares)
        self._core = Core(
            scheduler, self._registry, self._pager, journal, self._roster,
            last_op=roster.next_op - 1,
        )  # fmt: skip
        self._sessions = SessionHandler(
            self._registry, self._core, dict(options.asked.priorities), shares[QUEUE_PLACES],
            ExpectedSessions(scheduler, shares[EXPECTED], self._is_blind),
        )  # fmt: skip
        guards = Guards(self._registry, self._links, self._feed_observation)
        self._sessions.guards = self._core.guards = guards
        self._little_ram = LittleRam(self._registry.get, self._links.of)
        gates = self._link_up(shares)
        self._orphans: Orphans = Orphans(
            self._pager, self._core.operations, self._links, self._link_handler
        )
        self._sessions.has_left = self._has_left
        self._observer: Observer = Observer(
            config,
            self._pager,
            free_bytes=machine.memory.free_bytes,
            host_budget_bytes=self._budget.budget_bytes,
            everybody=self._everybody,
            runners=self._runners,
            only_recorded=self._only_recorded,
            waiting=lambda: scheduler.waiting,
            feed=self._feed_observation,
            found=self._found_elsewhere,
            seen=self._seen,
            busy=self._is_busy,
        )
        self._core.observer = self._observer
        tally = Tally()
        self._gauges: GaugeReader = GaugeReader(
            machine.memory, kiwis=self._kiwis, movers=lambda: machine.movers.pids,
            outside_bytes=lambda: scheduler.outside_bytes,
            names=self._sessions.expected.names_outside,
            device=device_file(options.emulation), changed=self._told,
        )  # fmt: skip
        reporter = Reporter(
            scheduler, self._registry, rights, machine.gpu, self._links, self._pager, self._budget,
            self._gauges, RamGauge(), self._sessions.expected, self._self_proof,
            errors=self._errors, emulated=options.emulation is not None,
        )  # fmt: skip
        self._registry.remembered = scheduler.remembered
        requests = RequestHandler(
            config, self._registry, rights, self._core, shares[RELEASES], self._roster.save,
            self._sessions.of,
        )  # fmt: skip
        metrics = MetricsReporter(
            machine.gpu, self._core, tally, self._connections, self._sessions, requests, shares,
            self._observer, journal, self._budget, self._gauges, self._sessions.expected,
            options.emulation is not None,
        )  # fmt: skip
        ledger = Ledger(Path(options.state) / f"{options.gpu_uuid}.usage")
        self._bookkeeper = Bookkeeper(scheduler, self._registry, ledger)
        usage = UsageReporter(self._bookkeeper, ledger, rights, shares[USAGE_QUESTIONS])
        self._router: Router = Router(
            self._connections, machine.gpu, options.emulation, self._sessions, self._link_handler,
            requests, reporter, usage, metrics,
        )  # fmt: skip
        self._announcer: Announcer = Announcer(self._connections, reporter)
        self._core.subscribers = [
            # First: sessions wait for the grant.
            Messenger(self._core, self._registry),
            self._core,
            journal,
            gates,
            tally,
            self._library_ram,
            self._sessions,
            self._announcer,
            self._bookkeeper,
            self._roster,
        ]

    def _assemble_pager(self, shares: Shares) -> None:
        """Make the session registry, the links, the host budget, and the pager."""
        machine, config = self._machine, self._config
        self._registry = SessionRegistry(self._died, shares[SESSIONS])
        self._links = Links(
            self._registry, machine.gpu.total_bytes, self._link_died, self._roster.save,
            shares[PROGRAMS],
        )  # fmt: skip
        coherent, pager = coherent_machine(machine.gpu.name), self._options.asked.pager
        self._self_proof = SelfProof(machine.gpu, self._is_idle, pager, coherent)
        self._ownership = Ownership(coherent, self._roster.save_soon, self._self_proof.objection)
        self._links.ownership = self._ownership
        self._budget = HostBudget(
            self._links, lambda: self._pager.export_footprints(),
            config.host_reserve_bytes, machine.fixed_budget_bytes,
        )  # fmt: skip
        self._library_ram = LibraryRam(
            self._links, self._budget, lambda: self._core.scheduler.crowded
        )
        self._links.ram_for = self._library_ram.room_for
        self._pager: SessionPager = SessionPager(
            RemoteDriver(machine.movers), machine.memory, config, links=self._links,
            make_ram_room=self._make_ram_room, store_footprints=self._roster.save,
            other_roots=self._registry.refs,
            known_unmovable=partial(machine.why_not_to_move, self._links),
        )  # fmt: skip

    def _link_up(self, shares: Shares) -> Gates:
        """Make the handler of the preloaded libraries, and return their gates."""
        gates = Gates(
            self._core, self._links, self._registry,
            lambda record: self._sessions.places.request(record, 0),
            lambda record: self._sessions.withdraw_own(record), shares[ROOM_REQUESTS],
            lambda session: session not in self._observer.without_driver,
        )  # fmt: skip
        self._link_handler = self._sessions.libraries = LinkHandler(
            self._core, self._links, gates, self._registry, self._sessions, self._library_ram,
            self._ownership,
        )  # fmt: skip
        return gates

    def _seen(self, target: Target, seen: Observation) -> None:
        self._sessions.guards.seen(target, seen)
        self._little_ram.seen(target, seen)
        self._links.seen(target, seen)

    def _link_died(self, link: Link) -> None:
        self._link_handler.died(link)
        self._observer.look_soon()

    def _has_left(self, target: Target) -> None:
        """Release a session that has left with its memory in the GPU, as recorded. A failed move
        can still have left its gate shut."""
        if self._links.shut(target.session):
            self._orphans.bring_back(target, was_leaving=True)
        else:
            self._link_handler.left(target.session)

    def _found_again(self, record: SessionRecord, event: SessionJoined) -> None:
        self._links.expect_all()  # asking the driver may have taken long
        priority = self._sessions.priority_of(record)
        self._core.feed(msgspec.structs.replace(event, priority=priority, owner=record.owner))
        self._sessions.expect_back(record)

    def _died(self, record: SessionRecord) -> None:
        was_leaving = self._sessions.is_leaving(record)
        self._sessions.died(record)
        self._orphans.bring_back(record.target, was_leaving=was_leaving)
        self._observer.look_soon()

    # --- observations ---------------------------------------------------------------------------

    def _told(self) -> None:
        self._announcer.changed()

    def _feed_observation(self, event: Event) -> None:
        if not self._leaving:
            self._core.feed(event)

    def _found_elsewhere(self, where: SessionJoined, began_ns: int) -> None:
        """Correct the scheduler: the driver has a session's memory paged out or locked although the
        scheduler has it as resident. The roster was lost, or another program moved it. A session
        that is only locked and does not want the GPU is left to whoever locked it."""
        record = self._registry.get(where.session)
        if record is None or not self._core.scheduler.believed_in(where.session, began_ns):
            return
        if where.residency is Residency.SUSPENDED and not (record.waiting or record.in_burst):
            return
        log.warning("found elsewhere", session=record.id, residency=where.residency.value)
        self._feed_observation(msgspec.structs.replace(where, burst=record.burst))

    def _as_it_is(self) -> Roster:
        scheduler = self._core.scheduler
        footprints = self._pager.export_footprints()
        return Roster(
            boot_id=boot_id(),
            next_op=self._core.last_op + 1 + OPS_AHEAD,
            tq_ns=scheduler.tq_ns,
            anti_thrash=scheduler.anti_thrash,
            policy=scheduler.policy,
            sessions=[record.roster_entry() for record in self._registry],
            links=self._links.roster(),
            off=self._links.roster_off(),
            objections=self._ownership.roster(),
            footprints=[(ref.pid, ref.start_ticks, size) for ref, size in footprints.items()],
            beside=[
                (ref.pid, ref.start_ticks, one.free_bytes, one.hidden_bytes)
                for ref, one in self._pager.export_page_out_readings().items()
            ],
        )

    # --- the machine's RAM ----------------------------------------------------------------------

    async def _make_ram_room(self, target: Target, size_bytes: int) -> None:
        """Make room in system RAM before the driver pages anything out."""
        deadline_ns = clock.now_ns() + self._config.lock_timeout_ns
        ram = self._library_ram
        ram.done(await ram.make_ram_room(target.session, size_bytes, deadline_ns))

    # --- the sessions ---------------------------------------------------------------------------

    def _everybody(self) -> list[Target]:
        """Return all sessions that may have memory in the GPU."""
        return self._targets(self._core.scheduler.not_lost)

    def _kiwis(self) -> set[ProcessRef]:
        """Return the root processes of everything that Kiwi manages on this GPU."""
        proving = filter(None, [self._self_proof.ref])
        return {*self._registry.refs(), *(link.ref for link in self._links.everybody()), *proving}

    def _is_idle(self) -> bool:
        """Return whether nobody has the GPU, waits for it, or is moved."""
        scheduler = self._core.scheduler
        return not (scheduler.holders or scheduler.waiting or self._core.operations.running)

    def _is_busy(self, session: SessionId) -> bool:
        """Return whether an operation or the pager works on ``session``: then do not ask the driver
        about it.
        """
        return session in self._core.operations.sessions or self._pager.busy(session)

    def _is_blind(self) -> bool:
        """Return whether nobody should be placed on this GPU."""
        return self._observer.is_blind or bool(self._machine.memory.without_nvml)

    def _runners(self) -> list[Target]:
        return self._targets(self._core.scheduler.holders)

    def _only_recorded(self) -> list[Target]:
        return self._targets(self._core.scheduler.only_recorded)

    def _targets(self, sessions: Iterable[SessionId]) -> list[Target]:
        records = map(self._registry.get, sessions)
        return [record.target for record in records if record is not None]

    def _errors(self) -> list[str]:
        errors = self._machine.warnings()
        if why := self._machine.memory.without_nvml:
            errors.append(f"{user_texts.WITHOUT_NVML} {why}")
        elif self._pager.nameless:
            errors.append(user_texts.NAMELESS)
        if self._observer.error:
            errors.append(self._observer.error)
        if self._shares_warning:
            errors.append(self._shares_warning)
        if self._roster.failing:
            errors.append("The state directory cannot be written; a crash could not be recovered.")
        if self._bookkeeper.failing:
            errors.append("Usage cannot be written (disk full?); it is kept in memory meanwhile.")
        if self._journal.dropped:
            errors.append(f"The journal lost {self._journal.dropped} lines (disk full?).")
        return errors

    # --- the end --------------------------------------------------------------------------------

    async def _leave(self) -> None:
        self._leaving = self._orphans.closed = True
        self._core.subscribers.remove(self._roster)  # meanwhile the file keeps the earlier state
        self._router.close_all(but_not_free=True)
        left = await everybody_back(self._core, self._pager, self._registry, self._config)
        for session, why in left.items():
            self._sessions.notify_left_out(session, why)
        self._note_left(left)
        self._router.close_all()
        for record in self._registry:
            if record.id not in left:
                self._registry.remove(record)
        self._roster.save()
        await self._bookkeeper.close(ACCOUNTS_WITHIN_S)
        self._journal.close()
        await self._machine.movers.close()
        log.info("ended", left_behind=len(left))

    def _note_left(self, left: Mapping[SessionId, str]) -> None:
        """Write for ``kiwi stop`` whose memory stays in system RAM; remove the last such note."""
        note = (Path(self._options.sockets) / self._options.gpu_uuid).with_suffix(LEFT_SUFFIX)
        try:
            note.unlink(missing_ok=True)
            if left:
                records = (record for record in self._registry if record.id in left)
                text = "\n".join(f"{one.name} ({left[one.id]})" for one in records)
                note.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            log.warning("cannot be noted", path=str(note), why=error.strerror)


def _tell_supervisor(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
