"""The desk where messages are taken: turns each legal message into an event, or an answer.

Knows connections and members; leaves every decision about the GPU to the scheduler.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kiwi_core import __version__
from kiwi_core.daemon import words
from kiwi_core.daemon.link_desk import LinkMessage
from kiwi_core.daemon.members import Member, session_id
from kiwi_core.daemon.metrics import Traffic
from kiwi_core.daemon.peers import process_of, user_name
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import check_name
from kiwi_core.states import Notice, SessionState
from kiwi_core.units import seconds_to_ns
from kiwi_core.wire import messages as m
from kiwi_core.wire.names import check_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.config import Config
    from kiwi_core.daemon.connection import Connection
    from kiwi_core.daemon.core import Core
    from kiwi_core.daemon.history_report import HistoryReporter
    from kiwi_core.daemon.link_desk import LinkDesk
    from kiwi_core.daemon.members import Members
    from kiwi_core.daemon.metrics_report import MetricsReporter
    from kiwi_core.daemon.peers import Rights
    from kiwi_core.daemon.report import Reporter
    from kiwi_core.daemon.usage_report import UsageReporter
    from kiwi_core.daemon.wishes import Wishes
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.states import Priority
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

_HELD = (
    SessionState.SUSPENDED,
    SessionState.PAGING_OUT,
    SessionState.PAGED_OUT,
    SessionState.PAGING_IN,
)

DISCONNECTED_GRACE_S = 10.0
"""A living process may lose its connection and come back (an exec, a frozen thread); after this
its burst counts as over, and it leaves Kiwi."""


class Desk:
    def __init__(
        self,
        config: Config,
        members: Members,
        rights: Rights,
        gpu: GpuInfo,
        emulation: m.Emulation | None,
    ) -> None:
        self._config = config
        self.members = self._members = members
        self._rights = rights
        self._gpu = gpu
        self._emulation = emulation
        self._connections: set[Connection] = set()
        self._session_of: dict[Connection, Member] = {}
        self._leaving: dict[Member, Connection | None] = {}
        self.closing = False
        self.traffic = Traffic()
        self.core: Core
        self.reporter: Reporter
        self.history: HistoryReporter
        self.usage: UsageReporter
        self.wishes: Wishes
        self.links: LinkDesk
        self.metrics: MetricsReporter
        self.priorities: Mapping[str, Priority] = {}
        """Classes by user name, as the daemon was started."""
        self.remember: Callable[[], None]
        """Writes the roster now: what was answered with ``ok`` outlives a crash."""

    # --- Receiver -------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        if len(self._connections) >= self._config.connections_max:
            raise PeerError(
                "too-many-connections",
                f"This daemon has {self._config.connections_max} connections already.",
                "Close notebooks that are no longer needed.",
            )
        self._check_share(connection.peer.uid)
        self._connections.add(connection)
        self.traffic.taken += 1

    def _check_share(self, uid: int) -> None:
        """One user must not be able to shut the others out."""
        most = self._config.connections_per_user_max
        if uid in (0, self._rights.daemon_uid) or len(self._connections) < most:
            return
        if sum(connection.peer.uid == uid for connection in self._connections) >= most:
            raise PeerError(
                "too-many-connections",
                f"You have {most} connections to this daemon already.",
                "Close notebooks that are no longer needed.",
            )

    def received(self, connection: Connection, message: m.ClientMessage) -> None:
        if self.closing and not isinstance(message, LinkMessage):
            return
        if isinstance(message, m.Acquire):  # asked first: its answer is waited for
            self.request(self._member_of(connection), message.burst)
        elif isinstance(message, m.Hello):
            self._hello(connection, message)
        elif isinstance(message, m.Set):
            self._set(connection, message)
        elif isinstance(message, m.Release):
            self.wishes.release(connection, self._session_of.get(connection), message)
        elif isinstance(message, m.BringBack):
            self.wishes.bring_back(connection, self._session_of.get(connection), message)
        elif isinstance(message, (m.Withdraw, m.EndBurst, m.Goodbye)):
            self._session_message(connection, message)
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
            connection.watching |= message.watch
            connection.send_line(self.reporter.status_line(connection.peer))
        elif isinstance(message, m.GetStory):
            connection.send(self.reporter.story(connection.peer, message.session))
        elif isinstance(message, m.GetHistory):
            connection.send_line(self.history.line(connection.peer, message.since))
        elif isinstance(message, m.GetMetrics):
            connection.send(self.metrics.report())
        elif isinstance(message, m.GetUsage):
            self.usage.answer(connection, message)
        else:
            connection.send(m.Pong())

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.links.disconnected(connection)
        member = self._session_of.pop(connection, None)
        if member is None or member.connection is not connection:
            return
        member.connection = None
        if self.closing or self._members.get(member.id) is not member:
            return  # the daemon or the process has ended: nobody is expected back
        if member.waiting and not member.in_burst and not member.own_burst:
            self._withdraw(member)
        self.expect_back(member)

    def turned_away(self, code: str) -> None:
        self.traffic.ended[code] += 1

    def expect_back(self, member: Member) -> None:
        """``member`` lives but has no connection: it leaves unless it comes back soon."""
        if member.forget is not None:
            member.forget.cancel()
        loop = asyncio.get_running_loop()
        member.forget = loop.call_later(DISCONNECTED_GRACE_S, self._gone_silent, member)

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def watchers(self) -> list[Connection]:
        return [c for c in self._connections if c.watching]

    def close_all(self, *, but_held: bool = False) -> None:
        """The daemon is leaving: no events from the connections any more. ``but_held``: those whose
        memory has yet to come back stay connected, to be told if it cannot; and the libraries
        that bring it back."""
        self.closing = True
        kept: set[Connection | None] = set()
        if but_held:
            kept = {m.connection for m in self._members if self._is_held(m)}
            kept |= self.links.connections()
        for connection in self._connections - kept:
            connection.close()

    def tell_left_out(self, session: SessionId, why: str) -> None:
        member = self._members.get(session)
        if member is not None and member.connection is not None:
            text, remedy = words.left_out(why)
            told = m.Told(notice=Notice.PAGE_IN_REFUSED, text=text, remedy=remedy)
            member.connection.send(told)

    # --- sessions -------------------------------------------------------------------------------

    def died(self, member: Member) -> None:
        """The process of ``member`` ended."""
        log.info("session ended", session=member.id, pid=member.ref.pid)
        self._leaving.pop(member, None)
        self.core.feed(ev.SessionLost(session=member.id))
        self._members.remove(member)
        if member.connection is not None:
            member.connection.close()

    def settled(self) -> None:
        """After any event: members that were leaving and whose memory is back may go."""
        if not self._leaving:
            return
        view = self.core.view()
        for member in list(self._leaving):
            if view.session(member.id) is None:
                self._say_farewell(member, self._leaving.pop(member))

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        member = linked = None
        if self._emulation is not None and hello.role is not m.Role.OBSERVER:
            _refuse_real_driver(hello.cuda_library, self._emulation)
        if hello.role is m.Role.SESSION:
            member = self._member_for(connection, hello)
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
            self._resume_burst(member, hello)
        if hello.role is m.Role.PAGER:
            self.links.welcomed(connection)

    def _member_for(self, connection: Connection, hello: m.Hello) -> Member:
        ref = process_of(connection.peer)
        member = self._members.of_process(ref)
        if member is None:
            member = self.admit(ref, connection.peer.uid, hello.name, hello.kernel_id)
        self._name(member, hello.name, hello.kernel_id)
        member.by_link = False
        self._bind(member, connection)
        return member

    def admit(self, ref: ProcessRef, uid: int, name: str, kernel_id: str = "") -> Member:
        """A new session. Raises ``PeerError``: "too-many-sessions" or "gone"."""
        if len(self._members) >= self._config.sessions_max:
            raise PeerError(
                "too-many-sessions",
                f"This GPU has {self._config.sessions_max} sessions already.",
                "Shut down notebooks that are no longer needed.",
            )
        member = Member(id=session_id(ref), ref=ref, uid=uid)
        self._members.add(member)
        self._name(member, name, kernel_id)
        self.core.joined(member, self.priority_of(member))
        log.info("session joined", session=member.id, pid=ref.pid, name=member.name)
        self.links.joined(member)
        return member

    def admit_linked(self, ref: ProcessRef, uid: int, name: str) -> Member:
        """A program that says nothing but what its preloaded library says."""
        member = self.admit(ref, uid, name)
        member.by_link = True
        return member

    @staticmethod
    def _name(member: Member, name: str, kernel_id: str) -> None:
        member.name = name or member.name or f"process {member.ref.pid}"
        member.kernel_id = kernel_id or member.kernel_id

    def _bind(self, member: Member, connection: Connection) -> None:
        old = member.connection
        member.connection = connection
        self._session_of[connection] = member
        if member.forget is not None:
            member.forget.cancel()
            member.forget = None
        if old is not None and old is not connection:
            self._session_of.pop(old, None)
            old.end_with(_superseded())

    def _resume_burst(self, member: Member, hello: m.Hello) -> None:
        """A client that came back says which burst it is in; a daemon that was restarted may know
        it from its roster (it stays), or has to line it up again."""
        in_burst = member.in_burst and not member.own_burst
        if hello.in_burst and not in_burst:
            self.request(member, hello.burst)
        elif in_burst and not hello.in_burst and member.client_burst <= hello.burst:
            # It ended while nobody listened.
            self._end(member)

    def _member_of(self, connection: Connection) -> Member:
        member = self._session_of.get(connection)
        if member is None:
            raise _superseded()
        return member

    def _session_message(
        self, connection: Connection, message: m.Withdraw | m.EndBurst | m.Goodbye
    ) -> None:
        member = self._member_of(connection)
        if isinstance(message, m.Goodbye):
            self.dismiss(member)
            return
        # Else that burst is over already, and another one, of our own, may be under way.
        current = member.client_burst == message.burst
        if isinstance(message, m.Withdraw):
            if current:
                self._withdraw(member)
            connection.send(m.Withdrawn(burst=message.burst))
        elif current and message.lingering:
            self.core.feed(ev.BurstLingered(session=member.id, burst=member.burst))
        elif current:
            self._end(member)

    def request(self, member: Member, client_burst: int) -> None:
        """A lease, for the burst of that number of the client's; 0: for one of our own."""
        burst = member.number(client_burst)
        member.waiting, member.in_burst = True, False
        self.core.feed(ev.LeaseRequested(session=member.id, burst=burst))

    def _withdraw(self, member: Member) -> None:
        member.waiting = member.in_burst = False
        self.core.feed(ev.LeaseWithdrawn(session=member.id, burst=member.burst))

    def _end(self, member: Member) -> None:
        member.waiting = member.in_burst = False
        self.core.end_burst(member, member.burst)

    def dismiss(self, member: Member) -> None:
        """It leaves Kiwi, as soon as its memory is back."""
        self._leaving[member] = member.connection
        member.waiting = member.in_burst = False
        self.core.feed(ev.SessionDetached(session=member.id))

    def _gone_silent(self, member: Member) -> None:
        if self._is_held(member):
            # It cannot answer: the driver holds it, perhaps with the interpreter's lock.
            self.expect_back(member)
            return
        if member in self._leaving or self.links.speaks_for(member):
            return
        log.info("session did not come back", session=member.id, pid=member.ref.pid)
        self.dismiss(member)

    def _is_held(self, member: Member) -> bool:
        session = self.core.view().session(member.id)
        return session is not None and session.state in _HELD

    def _say_farewell(self, member: Member, asked: Connection | None) -> None:
        """``asked`` is the connection that said goodbye, if one did. A newer one (the process came
        back meanwhile) is closed without an answer: it connects again and is a session anew."""
        self._members.remove(member)
        self.links.left(member.id)
        log.info("session left", session=member.id, pid=member.ref.pid)
        connection = member.connection
        if connection is not None:
            self._session_of.pop(connection, None)
            if connection is asked:
                connection.send(m.Ok())
            connection.close()

    # --- settings -------------------------------------------------------------------------------

    def _set(self, connection: Connection, message: m.Set) -> None:
        if not self._rights.may_set(connection.peer):
            raise CallerError(
                "not-allowed",
                "Only the daemon's owner or a member of its admin group may change settings.",
                "Ask the administrator of this machine.",
            )
        check_settings(message, self._config)
        if message.policy is not None:
            check_name(message.policy)
        if message.priority is not None:
            self._prioritise(message.session, message.priority)
        tq_ns = None if message.tq_s is None else seconds_to_ns(message.tq_s)
        log.info(
            "settings changed", by=connection.peer.owner, tq_s=message.tq_s,
            anti_thrash=message.anti_thrash.value if message.anti_thrash else None,
            policy=message.policy, session=message.session,
            priority=message.priority.value if message.priority else None,
        )  # fmt: skip
        self.core.feed(
            ev.SettingsChanged(tq_ns=tq_ns, anti_thrash=message.anti_thrash, policy=message.policy)
        )
        self.remember()
        connection.send(m.Ok())

    def _prioritise(self, session: str, priority: Priority) -> None:
        member = self._members.get(session)
        if member is None:
            raise CallerError(
                "no-such-session",
                f"There is no session {session!r} on this GPU.",
                "`kiwi status --json` lists them.",
            )
        member.priority = priority
        self.core.feed(ev.PriorityChanged(session=member.id, priority=priority))

    def priority_of(self, member: Member) -> Priority | None:
        return member.priority or self.priorities.get(user_name(member.uid))


def _superseded() -> PeerError:
    return PeerError("superseded", "This process has opened a newer connection.")


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
