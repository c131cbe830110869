"""The daemon of one GPU, put together: socket, desk, core, observer, roster, and a clean end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from kiwi_core.config import DEFAULTS, Config
from kiwi_core.daemon.announce import Announcer
from kiwi_core.daemon.bookkeeper import Bookkeeper
from kiwi_core.daemon.connection import Connection
from kiwi_core.daemon.core import Core
from kiwi_core.daemon.desk import Desk
from kiwi_core.daemon.gates import Gates
from kiwi_core.daemon.history_report import HistoryReporter
from kiwi_core.daemon.journal import Journal
from kiwi_core.daemon.leaving import bring_back
from kiwi_core.daemon.ledger import Ledger
from kiwi_core.daemon.link_desk import LinkDesk
from kiwi_core.daemon.links import Links
from kiwi_core.daemon.members import Member, Members
from kiwi_core.daemon.metrics_report import MetricsReporter
from kiwi_core.daemon.observer import Observer
from kiwi_core.daemon.orphans import Orphans
from kiwi_core.daemon.peers import Rights
from kiwi_core.daemon.places import BACKLOG, OneDaemonLock, answers, listen
from kiwi_core.daemon.recovery import recover
from kiwi_core.daemon.report import Libraries, Reporter
from kiwi_core.daemon.roster import Roster, RosterFile, boot_id
from kiwi_core.daemon.usage_report import UsageReporter
from kiwi_core.daemon.wishes import Wishes
from kiwi_core.pager.api import ProcessRef
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.sched.replay import JournalHeader
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Priority, SessionState
from kiwi_core.wire.messages import Emulation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kiwi_core.daemon.link import Link
    from kiwi_core.daemon.machine import Machine
    from kiwi_core.pager.api import Target
    from kiwi_core.sched.events import Event, SessionJoined
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

LEAVE_WITHIN_S = 60.0
"""How long a daemon that was told to end may take to bring everybody back, beside the time that
the slowest believable driver needs for the bytes."""

FINISH_WITHIN_S = 5.0
"""What is moving when a daemon is told to end gets this long before the others' turn comes."""

RUNS_AFTER_S = 2.0
"""Another daemon that has the lock, and answers on its socket, for so long is not leaving."""

LOOK_EVERY_S = 0.05
"""While waiting for an earlier daemon, or for operations, to come to their end."""

REMEMBER_WITHIN_S = 5.0
"""An operation goes on even if the roster cannot be written for so long: the loop is stuck."""

ACCOUNTS_WITHIN_S = 2.0
"""For the last sums of who had how much, when a daemon ends."""

ROSTER_DELAY_S = 0.05
"""Grants and ends reach the roster this much later; operations always find it up to date."""


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells the daemon of one GPU. ``tq_ns``, ``anti_thrash`` and ``policy``
    are what was asked for on the command line; without them the last daemon's (live) settings
    stay. After a crash (``restarted``) it is the other way round: what was set live meanwhile
    stays. ``priorities`` are classes by user name."""

    gpu_uuid: str
    sockets: str
    state: str
    tq_ns: int | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    priorities: dict[str, Priority] = {}
    training_share: float | None = None
    admin_group: str | None = None
    host_budget_bytes: int | None = None
    lock_timeout_ns: int | None = None
    stuck_after_ns: int | None = None
    swap_floor_factor: float | None = None
    bring_back: bool = True
    emulation: Emulation | None = None
    log_json: bool = False
    restarted: bool = False


class GpuDaemon:
    """``run`` until told to ``stop``."""

    def __init__(self, options: ChildOptions, machine: Machine, config: Config = DEFAULTS) -> None:
        self._options = options
        self._machine = machine
        self._config = config
        self._stop = asyncio.Event()
        self._roster_file = RosterFile(Path(options.state) / f"{options.gpu_uuid}.roster")
        self._roster_due: asyncio.TimerHandle | None = None
        self._leaving = False
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        sockets = Path(self._options.sockets)
        path = sockets / f"{self._options.gpu_uuid}.sock"
        lock = OneDaemonLock(sockets / f"{self._options.gpu_uuid}.lock")
        if not await self._alone(lock, path):
            return
        roster = self._roster_file.read()
        self._assemble(roster)
        self._links.restore(roster)
        self._pager.import_footprints(
            {ProcessRef(pid, ticks): size for pid, ticks, size in roster.footprints}
        )
        await recover(roster, self._pager, self._members, self._found_again)
        self._save_roster()  # a crash from here on must find the settings
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: Connection(self._desk, self._config), sock=listen(path), backlog=BACKLOG
        )
        observing = asyncio.create_task(self._observer.run())
        observing.add_done_callback(_must_not_end)
        log.info("ready", gpu=self._options.gpu_uuid, socket=str(path))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await self._stop.wait()
        path.unlink(missing_ok=True)
        server.close()
        observing.cancel()
        await self._leave()

    async def _alone(self, lock: OneDaemonLock, socket_path: Path) -> bool:
        """Waits for an earlier daemon that is leaving; it may take long. False: told to stop.

        Raises ``CallerError("already-running")`` if it does not leave at all.
        """
        answered_since_s: float | None = None
        while not lock.try_acquire():
            if self._stop.is_set():
                return False
            now_s = time.monotonic()
            if not answers(socket_path):
                if answered_since_s is not None:
                    log.info("waiting for an earlier daemon to leave")
                answered_since_s = None
            elif answered_since_s is None:
                answered_since_s = now_s
            elif now_s - answered_since_s > RUNS_AFTER_S:
                raise lock.already_running()
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    # --- putting together -----------------------------------------------------------------------

    def _settings(self, roster: Roster) -> tuple[int, AntiThrash, str]:
        options = self._options
        tq = [options.tq_ns, roster.tq_ns]
        mode = [options.anti_thrash, roster.anti_thrash]
        # Its name may be that of another version.
        policy = [options.policy, roster.policy if roster.policy in names() else None]
        if options.restarted:
            tq.reverse()
            mode.reverse()
            policy.reverse()
        tq_ns = next((value for value in tq if value is not None), self._config.tq_ns)
        anti_thrash = next((value for value in mode if value is not None), AntiThrash.ON)
        return tq_ns, anti_thrash, next((one for one in policy if one is not None), DEFAULT)

    def _assemble(self, roster: Roster) -> None:
        options, machine, config = self._options, self._machine, self._config
        tq_ns, anti_thrash, policy = self._settings(roster)
        budget_bytes = machine.host_budget_bytes(0)
        scheduler = Scheduler(
            machine.gpu.total_bytes,
            config=config,
            tq_ns=tq_ns,
            anti_thrash=anti_thrash,
            host_budget_bytes=budget_bytes,
            first_op=roster.next_op,
            policy=policy,
        )
        header = JournalHeader(
            total_bytes=machine.gpu.total_bytes,
            tq_ns=tq_ns,
            anti_thrash=anti_thrash,
            host_budget_bytes=budget_bytes,
            gpu_uuid=options.gpu_uuid,
            wall_time_s=time.time(),
            first_op=roster.next_op,
            config=config,
            policy=policy,
        )
        journal = Journal(
            Path(options.state) / f"{options.gpu_uuid}.journal", header, config.journal_max_bytes
        )
        rights = Rights.of_this_process(options.admin_group)
        self._next_op = roster.next_op
        self._journal = journal
        self._desk = Desk(config, Members(self._died), rights, machine.gpu, options.emulation)
        self._members = self._desk.members
        self._links = Links(self._members, machine.gpu.total_bytes, self._link_died)
        self._pager = machine.pager(self._remember, self._members.refs, self._links)
        self._core = Core(
            scheduler,
            self._members,
            self._pager,
            journal,
            before_operation=self._save_roster,
            changed=self._changed,
            granted=lambda: self._observer.somebody_runs(),
            after_a_look=lambda target, go_on: self._observer.after_a_look(target, go_on),
            hurry=lambda: self._observer.hurry(),
        )
        self._link_up()
        self._orphans = Orphans(self._pager, self._core.operations, self._orphans_free)
        self._observer = Observer(
            config,
            self._pager,
            free_bytes=machine.free_bytes,
            host_budget_bytes=self._host_budget_bytes,
            everybody=self._everybody,
            runners=self._runners,
            loose=self._loose,
            feed=self._feed_observation,
        )
        reporter = Reporter(
            scheduler, self._members, rights, machine,
            libraries=self._libraries, errors=self._errors, emulated=options.emulation is not None,
        )  # fmt: skip
        self._members.remembered = scheduler.remembered
        self._desk.priorities = options.priorities
        self._desk.core, self._desk.reporter = self._core, reporter
        self._desk.history = HistoryReporter(scheduler, self._members, rights)
        self._desk.wishes = Wishes(self._members, rights, self._core)
        self._desk.metrics = MetricsReporter(
            machine.gpu, self._core, self._desk, self._observer, journal,
            emulated=options.emulation is not None,
        )  # fmt: skip
        ledger = Ledger(Path(options.state) / f"{options.gpu_uuid}.usage")
        self._bookkeeper = Bookkeeper(scheduler, self._members, ledger)
        self._desk.usage = UsageReporter(self._bookkeeper, ledger, rights)
        self._desk.remember = self._save_roster
        self._announcer = Announcer(self._desk, reporter)

    def _link_up(self) -> None:
        """The preloaded libraries: their desk, and their gates."""
        gates = Gates(
            self._core, self._links, self._members, lambda member: self._desk.request(member, 0)
        )
        self._core.after, self._core.answer_room = gates.after, gates.answer_room
        self._desk.links = LinkDesk(
            self._core, self._links, gates, self._members,
            admit=self._desk.admit_linked, silent=self._desk.expect_back,
            dismiss=self._desk.dismiss,
        )  # fmt: skip

    def _libraries(self, session: SessionId) -> Libraries:
        links = self._links
        pager = self._pager.moved_by(session)
        return Libraries(links.connected(session), pager, links.unowned(session))

    def _link_died(self, link: Link) -> None:
        self._desk.links.died(link)
        self._observer.look_soon()

    def _orphans_free(self, target: Target) -> None:
        if not self._leaving:
            self._desk.links.left(target.session)

    def _found_again(self, member: Member, event: SessionJoined) -> None:
        priority = self._desk.priority_of(member)
        self._core.feed(msgspec.structs.replace(event, priority=priority))
        self._desk.expect_back(member)

    def _died(self, member: Member) -> None:
        self._desk.died(member)
        self._orphans.let_go(member.target)
        self._observer.look_soon()

    # --- after each event -----------------------------------------------------------------------

    def _changed(self) -> None:
        self._desk.settled()
        self._announcer.changed()
        self._bookkeeper.changed()
        if self._roster_due is None and not self._leaving:
            loop = asyncio.get_running_loop()
            self._roster_due = loop.call_later(ROSTER_DELAY_S, self._save_roster)

    def _feed_observation(self, event: Event) -> None:
        if not self._leaving:
            self._core.feed(event)

    def _save_roster(self) -> None:
        if self._roster_due is not None:
            self._roster_due.cancel()
            self._roster_due = None
        scheduler = self._core.scheduler
        footprints = self._pager.export_footprints()
        self._roster_file.write(
            Roster(
                boot_id=boot_id(),
                next_op=max(self._next_op, self._core.last_op + 1),
                tq_ns=scheduler.tq_ns,
                anti_thrash=scheduler.anti_thrash,
                policy=scheduler.policy,
                sessions=[member.roster_entry() for member in self._members],
                links=self._links.roster(),
                off=self._links.roster_off(),
                footprints=[(ref.pid, ref.start_ticks, size) for ref, size in footprints.items()],
            )
        )

    def _remember(self, _target: Target, _footprints: Mapping[ProcessRef, int]) -> None:
        """From an operation's thread, before anything moves: the sizes must be on disk."""
        written = asyncio.run_coroutine_threadsafe(self._write_down(), self._loop)
        try:
            written.result(REMEMBER_WITHIN_S)
        except TimeoutError:
            log.error("the loop did not write the roster in time")

    async def _write_down(self) -> None:
        self._save_roster()

    def _host_budget_bytes(self) -> int:
        return self._machine.host_budget_bytes(sum(self._pager.export_footprints().values()))

    def _everybody(self) -> list[Target]:
        """All who may have memory in the GPU."""
        sessions = self._core.view().sessions
        return self._targets(s.id for s in sessions if s.state is not SessionState.LOST)

    def _runners(self) -> list[Target]:
        return self._targets(self._core.scheduler.holders)

    def _loose(self) -> list[Target]:
        return self._targets(self._core.scheduler.loose)

    def _targets(self, sessions: Iterable[SessionId]) -> list[Target]:
        members = map(self._members.get, sessions)
        return [member.target for member in members if member is not None]

    def _errors(self) -> list[str]:
        errors = [self._observer.error] if self._observer.error else []
        if self._roster_file.failing:
            errors.append("The state directory cannot be written; a crash could not be recovered.")
        if self._bookkeeper.failing:
            errors.append("Usage cannot be written (disk full?); it is kept in memory meanwhile.")
        if self._journal.dropped:
            errors.append(f"The journal lost {self._journal.dropped} lines (disk full?).")
        return errors

    # --- the end --------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """Everybody who is held or paged out comes back, as far as there is room."""
        self._leaving = True
        self._desk.close_all(but_held=True)
        self._core.wind_down()
        out_bytes = sum(self._pager.export_footprints().values())
        slowly_s = out_bytes / self._config.operation_deadline_bytes_per_s
        ends_at_s = time.monotonic() + LEAVE_WITHIN_S + slowly_s
        await self._operations_end(min(ends_at_s, time.monotonic() + FINISH_WITHIN_S))
        moving = self._core.operations.sessions
        members = sorted(self._members, key=lambda member: not member.in_burst)
        first = [member.target for member in members if member.id not in moving]
        left = await bring_back(self._pager, first, ends_at_s)
        if moving:
            await self._operations_end(ends_at_s)
            rest = [member.target for member in members if member.id in moving]
            left |= await bring_back(self._pager, rest, time.monotonic() + FINISH_WITHIN_S)
        for session, why in left.items():
            log.error(
                "session stays paged out; nothing is lost: start the daemon again to bring it back",
                session=session, why=why,
            )  # fmt: skip
            self._desk.tell_left_out(session, why)
        self._desk.close_all()
        for member in self._members:
            if member.id not in left:
                self._members.remove(member)
        self._save_roster()
        await self._bookkeeper.close(ACCOUNTS_WITHIN_S)
        self._journal.close()
        log.info("ended", left_behind=len(left))

    async def _operations_end(self, until_s: float) -> None:
        """Waits for those that run, but for none that is overdue: that one hangs."""
        operations = self._core.operations
        while operations.waiting_for and time.monotonic() < until_s:
            operations.take_overdue(time.monotonic_ns())
            await asyncio.sleep(LOOK_EVERY_S)


def _must_not_end(task: asyncio.Task[None]) -> None:
    """A daemon without its observer is blind: as bad as a crash, so make it one."""
    if not task.cancelled():
        task.get_loop().call_exception_handler(
            {"message": "the observer ended", "exception": task.exception()}
        )


async def run(options: ChildOptions, machine: Machine, config: Config = DEFAULTS) -> None:
    """Runs one GPU's daemon until SIGTERM, SIGINT, or the end of the supervisor (its pipe on
    standard input closes)."""
    daemon = GpuDaemon(options, machine, config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    loop.add_reader(sys.stdin.fileno(), partial(_supervisor_spoke, daemon))
    await daemon.run()


def _supervisor_spoke(daemon: GpuDaemon) -> None:
    """It never says anything: readable means that it is gone."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    log.warning("supervisor is gone; leaving")
    daemon.stop()
