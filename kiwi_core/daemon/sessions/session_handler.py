"""Handle connections with the role ``session``: sessions that join and leave, and their bursts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.peers import process_of, user_name
from kiwi_core.daemon.roster.registry import SessionRecord, session_id
from kiwi_core.daemon.sessions.queue_places import QueuePlaces
from kiwi_core.errors import PeerError
from kiwi_core.gpu import processes
from kiwi_core.sched import events as ev
from kiwi_core.states import Notice, SessionState
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kiwi_core.daemon.base.connection import Connection, Handlers
    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.guards import Guards
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
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
"""A living process may lose its connection and come back (an exec, a frozen thread). After this its
burst counts as over, and it leaves Kiwi."""


class LinkedLibraries(Protocol):
    """The preloaded libraries of programs."""

    def joined(self, member: SessionRecord) -> None:
        """Give the new session the libraries that belong to it."""

    def has_connected_library(self, member: SessionRecord) -> bool:
        """Return whether a library of a process of the session is connected."""


class SessionHandler:
    """``priorities`` are the classes by user name that the daemon was started with; ``places``
    counts the places in the queue."""

    def __init__(
        self,
        registry: SessionRegistry,
        core: Core,
        priorities: Mapping[str, Priority],
        places: Share,
        expected: ExpectedSessions,
    ) -> None:
        self._registry = registry
        self._core = core
        self._priorities = priorities
        self._session_of: dict[Connection, SessionRecord] = {}
        self.expected = expected
        self._leaving: dict[SessionRecord, Connection | None] = {}
        self.places = QueuePlaces(places, self._request_lease)
        self.libraries: LinkedLibraries
        self.guards: Guards
        self.has_left: Callable[[Target], None]
        """Called with a session that has left Kiwi and lives on."""

    # --- asked by the router ----------------------------------------------------------------------

    def handlers(self) -> Handlers:
        return {
            m.Acquire: self._acquire,
            m.Withdraw: self._give_up_waiting,
            m.EndBurst: self._end_burst,
            m.Goodbye: self._goodbye,
            m.Expect: self._expect,
        }

    def of(self, connection: Connection) -> SessionRecord | None:
        """Return the session that the connection speaks for."""
        return self._session_of.get(connection)

    def hello(self, connection: Connection, hello: m.Hello) -> SessionRecord:
        ref = process_of(connection.peer)
        member = self._registry.of_process(ref)
        if member is None:
            member = self.admit(ref, connection.peer.uid, hello.name, hello.kernel_id)
        self.expected.joined(connection.peer.uid, hello.kernel_id)
        self._name(member, hello.name, hello.kernel_id)
        member.by_link = False
        self.guards.set_ungated(member, hello.ungated)
        self._bind(member, connection)
        return member

    def _expect(self, connection: Connection, message: m.Expect) -> None:
        if not self._has_joined(connection.peer.uid, message):
            self.expected.expect(connection.peer, message)
        connection.send(m.Ok())

    def _has_joined(self, uid: int, message: m.Expect) -> bool:
        """Return whether a program that is announced as running is a session already: it was
        faster than its announcer. Its predecessor before a restart has another process."""
        return message.pid > 0 and any(
            member.kernel_id == message.key and member.uid == uid and processes.alive(member.ref)
            for member in self._registry
        )

    def _acquire(self, connection: Connection, message: m.Acquire) -> None:
        self.places.request(self._speaker(connection), message.burst)

    def _give_up_waiting(self, connection: Connection, message: m.Withdraw) -> None:
        member = self._speaker(connection)
        self.places.withdraw(member, message.burst)
        # Another burst in progress is not the client's, as in ``_end_burst``.
        if member.client_burst == message.burst:
            self._withdraw(member)
        connection.send(m.Withdrawn(burst=message.burst))

    def _end_burst(self, connection: Connection, message: m.EndBurst) -> None:
        member = self._speaker(connection)
        self.places.withdraw(member, message.burst)
        if member.client_burst != message.burst:
            return  # the burst in progress, if any, is the daemon's, made for a call at the gate
        if message.lingering:
            self._core.feed(ev.BurstLingered(session=member.id, burst=member.burst))
        else:
            self._end(member)

    def _goodbye(self, connection: Connection, _message: m.Goodbye) -> None:
        self.dismiss(self._speaker(connection))

    def _speaker(self, connection: Connection) -> SessionRecord:
        """Raise ``PeerError("superseded")`` if the connection speaks for no session any more."""
        member = self._session_of.get(connection)
        if member is None:
            raise _superseded()
        return member

    def disconnected(self, connection: Connection, *, closing: bool) -> None:
        """Handle the end of a connection. ``closing``: the daemon is leaving."""
        member = self._session_of.pop(connection, None)
        if member is None or member.connection is not connection:
            return
        member.connection = None
        if closing or self._registry.get(member.id) is not member:
            return  # the daemon or the process has ended: it does not come back
        self.places.withdraw(member)
        if member.waiting and not member.in_burst and not member.own_burst:
            self._withdraw(member)
        self.expect_back(member)

    def held(self) -> set[Connection]:
        """Return the connections of sessions whose memory is held, out, or on its way."""
        return {m.connection for m in self._registry if m.connection and self._is_held(m)}

    # --- joining --------------------------------------------------------------------------------

    def admit(self, ref: ProcessRef, uid: int, name: str, kernel_id: str = "") -> SessionRecord:
        """Add a session. Raises ``PeerError``: "too-many-sessions" or "gone"."""
        if not self._registry.share.may(uid):
            raise PeerError(
                "too-many-sessions",
                "You have as many sessions on this GPU as you may have.",
                "Shut down notebooks that are no longer needed. Kiwi tries again by itself.",
            )
        member = SessionRecord(id=session_id(ref), ref=ref, uid=uid)
        self._registry.add(member)
        self._name(member, name, kernel_id)
        self._core.joined(member, self.priority_of(member))
        log.info("session joined", session=member.id, pid=ref.pid, name=member.name)
        self.libraries.joined(member)
        return member

    def admit_linked(
        self, ref: ProcessRef, uid: int, name: str, above: Collection[ProcessRef] = ()
    ) -> SessionRecord:
        """Add a session for a program whose preloaded library alone has connected. ``above`` are
        the process and its ancestors: if one was announced, the session has its name."""
        announced, kernel_id = self.expected.take(uid, above)
        member = self.admit(ref, uid, announced or name, kernel_id)
        member.by_link = True
        return member

    @staticmethod
    def _name(member: SessionRecord, name: str, kernel_id: str) -> None:
        member.name = name or member.name or f"process {member.ref.pid}"
        member.kernel_id = kernel_id or member.kernel_id

    def _bind(self, member: SessionRecord, connection: Connection) -> None:
        old = member.connection
        member.connection = connection
        self._session_of[connection] = member
        if member.forget is not None:
            member.forget.cancel()
            member.forget = None
        if old is not None and old is not connection:
            self._session_of.pop(old, None)
            old.end_with(_superseded())

    def priority_of(self, member: SessionRecord) -> Priority | None:
        return member.priority or self._priorities.get(user_name(member.uid))

    # --- bursts ---------------------------------------------------------------------------------

    def resume_burst(self, member: SessionRecord, hello: m.Hello) -> None:
        """Restore the burst that a reconnected client is in: a restarted daemon may know it from
        its roster (it stays), or has to line it up again."""
        in_burst = member.in_burst and not member.own_burst
        if hello.in_burst and not in_burst:
            self.places.request(member, hello.burst, runs=True)
        elif in_burst and not hello.in_burst and member.client_burst <= hello.burst:
            # The burst ended while there was no connection.
            self._end(member)

    def _request_lease(self, member: SessionRecord, client_burst: int) -> None:
        burst = member.number(client_burst)
        member.waiting, member.in_burst = True, False
        self._core.feed(ev.LeaseRequested(session=member.id, burst=burst))

    def _withdraw(self, member: SessionRecord) -> None:
        member.waiting = member.in_burst = False
        self._core.feed(ev.LeaseWithdrawn(session=member.id, burst=member.burst))

    def _end(self, member: SessionRecord) -> None:
        member.waiting = member.in_burst = False
        self._core.end_burst(member, member.burst)

    # --- leaving --------------------------------------------------------------------------------

    def died(self, member: SessionRecord) -> None:
        """Remove ``member``, whose process has ended."""
        log.info("session ended", session=member.id, pid=member.ref.pid)
        self._leaving.pop(member, None)
        self.places.withdraw(member)
        member.waiting = False
        self._core.feed(ev.SessionLost(session=member.id))
        self._registry.remove(member)
        if member.connection is not None:
            member.connection.close()

    def is_leaving(self, member: SessionRecord) -> bool:
        """Return whether ``member`` was dismissed, or said goodbye, and waits for its memory."""
        return member in self._leaving

    def after(self, _step: Step) -> None:
        """Complete the leaving of sessions whose memory is back."""
        self.places.move_up_soon()
        for member in list(self._leaving):
            if self._core.scheduler.state_of(member.id) is None:
                self._send_farewell(member, self._leaving.pop(member))

    def expect_back(self, member: SessionRecord) -> None:
        """Dismiss ``member``, which lives but has no connection, unless it comes back soon."""
        if member.forget is not None:
            member.forget.cancel()
        loop = asyncio.get_running_loop()
        member.forget = loop.call_later(DISCONNECTED_GRACE_S, self._gone_silent, member)

    def dismiss(self, member: SessionRecord) -> None:
        """Let ``member`` leave Kiwi as soon as its memory is back."""
        self._leaving[member] = member.connection
        self.places.withdraw(member)
        member.waiting = member.in_burst = False
        member.kept_out = ""
        self._core.feed(ev.SessionDetached(session=member.id))

    def _gone_silent(self, member: SessionRecord) -> None:
        if self._is_held(member):
            # It cannot answer: the driver holds it, perhaps with the interpreter's lock.
            self.expect_back(member)
            return
        if member in self._leaving or self.libraries.has_connected_library(member):
            return
        log.info("session did not come back", session=member.id, pid=member.ref.pid)
        self.dismiss(member)

    def _is_held(self, member: SessionRecord) -> bool:
        return self._core.scheduler.state_of(member.id) in _HELD

    def notify_left_out(self, session: SessionId, why: str) -> None:
        member = self._registry.get(session)
        if member is not None and member.connection is not None:
            text, remedy = user_texts.left_out(why)
            told = m.UserNotice(notice=Notice.PAGE_IN_REFUSED, text=text, remedy=remedy)
            member.connection.send(told)

    def _send_farewell(self, member: SessionRecord, asked: Connection | None) -> None:
        """Remove ``member``. ``asked`` is the connection that said goodbye, if any. A newer
        connection (the process came back meanwhile) is closed without an answer: it connects again,
        as a new session."""
        self._registry.remove(member)
        self.has_left(member.target)
        log.info("session left", session=member.id, pid=member.ref.pid)
        connection = member.connection
        if connection is not None:
            self._session_of.pop(connection, None)
            if connection is asked:
                connection.send(m.Ok())
            connection.close()


def _superseded() -> PeerError:
    return PeerError("superseded", "This process has opened a newer connection.")
