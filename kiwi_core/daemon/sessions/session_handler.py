"""Handle connections with the role ``session``: sessions that join and leave, and their bursts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

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
    from kiwi_core.daemon.sessions.link_handler import LinkHandler
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.states import Priority
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

_NOT_FREE = (
    SessionState.SUSPENDED,
    SessionState.PAGING_OUT,
    SessionState.PAGED_OUT,
    SessionState.PAGING_IN,
)

DISCONNECTED_GRACE_S = 10.0
"""A living process may lose its connection and come back (an exec, a frozen thread). After this its
burst counts as over, and it leaves Kiwi."""


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
        self.libraries: LinkHandler
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
        record = self._registry.of_process(ref)
        if record is None:
            record = self.admit(ref, connection.peer.uid, hello.name, hello.kernel_id)
        self.expected.joined(connection.peer.uid, hello.kernel_id)
        self._name(record, hello.name, hello.kernel_id)
        record.folder = hello.folder or record.folder
        record.by_link = False
        self.guards.set_ungated(record, hello.ungated)
        self._bind(record, connection)
        return record

    def _expect(self, connection: Connection, message: m.Expect) -> None:
        if not self._has_joined(connection.peer.uid, message):
            self.expected.expect(connection.peer, message)
        connection.send(m.Ok())

    def _has_joined(self, uid: int, message: m.Expect) -> bool:
        """Return whether a program that is announced as running is a session already: it was
        faster than its announcer. Its predecessor before a restart has another process."""
        return message.pid > 0 and any(
            record.kernel_id == message.key and record.uid == uid and processes.alive(record.ref)
            for record in self._registry
        )

    def _acquire(self, connection: Connection, message: m.Acquire) -> None:
        self.places.request(self._speaker(connection), message.burst)

    def _give_up_waiting(self, connection: Connection, message: m.Withdraw) -> None:
        record = self._speaker(connection)
        self.places.withdraw(record, message.burst)
        # Another burst in progress is not the client's, as in ``_end_burst``.
        if record.client_burst == message.burst:
            self._withdraw(record)
        connection.send(m.Withdrawn(burst=message.burst))

    def _end_burst(self, connection: Connection, message: m.EndBurst) -> None:
        record = self._speaker(connection)
        self.places.withdraw(record, message.burst)
        if record.client_burst != message.burst:
            return  # the burst in progress, if any, is the daemon's, made for a call at the gate
        if message.lingering:
            self._core.feed(ev.BurstLingered(session=record.id, burst=record.burst))
        else:
            self._end(record)

    def _goodbye(self, connection: Connection, _message: m.Goodbye) -> None:
        self.dismiss(self._speaker(connection))

    def _speaker(self, connection: Connection) -> SessionRecord:
        """Raise ``PeerError("superseded")`` if the connection speaks for no session any more."""
        record = self._session_of.get(connection)
        if record is None:
            raise _superseded()
        return record

    def disconnected(self, connection: Connection, *, closing: bool) -> None:
        """Handle the end of a connection. ``closing``: the daemon is leaving."""
        record = self._session_of.pop(connection, None)
        if record is None or record.connection is not connection:
            return
        record.connection = None
        if closing or self._registry.get(record.id) is not record:
            return  # the daemon or the process has ended: it does not come back
        self.places.withdraw(record)
        if record.waiting and not record.in_burst and not record.own_burst:
            self._withdraw(record)
        self.expect_back(record)

    def not_free(self) -> set[Connection]:
        """Return the connections of sessions that are suspended, or whose memory is out or on its
        way."""
        return {m.connection for m in self._registry if m.connection and self._is_not_free(m)}

    # --- joining --------------------------------------------------------------------------------

    def admit(self, ref: ProcessRef, uid: int, name: str, kernel_id: str = "") -> SessionRecord:
        """Add a session. Raises ``PeerError``: "too-many-sessions" or "gone"."""
        if not self._registry.share.may(uid):
            raise PeerError(
                "too-many-sessions",
                "You have as many sessions on this GPU as you may have.",
                "Shut down notebooks that are no longer needed. Kiwi tries again by itself.",
            )
        record = SessionRecord(id=session_id(ref), ref=ref, uid=uid)
        self._registry.add(record)
        self._name(record, name, kernel_id)
        self._core.joined(record, self.priority_of(record))
        log.info("session joined", session=record.id, pid=ref.pid, name=record.name)
        self.libraries.joined(record)
        return record

    def admit_linked(
        self, ref: ProcessRef, uid: int, name: str, above: Collection[ProcessRef] = ()
    ) -> SessionRecord:
        """Add a session for a program whose preloaded library alone has connected. ``above`` are
        the process and its ancestors: if one was announced, the session has its name."""
        announced, kernel_id = self.expected.take(uid, above)
        record = self.admit(ref, uid, announced or name, kernel_id)
        record.by_link = True
        return record

    @staticmethod
    def _name(record: SessionRecord, name: str, kernel_id: str) -> None:
        record.name = name or record.name or f"process {record.ref.pid}"
        record.kernel_id = kernel_id or record.kernel_id

    def _bind(self, record: SessionRecord, connection: Connection) -> None:
        old = record.connection
        record.connection = connection
        self._session_of[connection] = record
        if record.forget is not None:
            record.forget.cancel()
            record.forget = None
        if old is not None and old is not connection:
            self._session_of.pop(old, None)
            old.end_with(_superseded())

    def priority_of(self, record: SessionRecord) -> Priority | None:
        return record.priority or self._priorities.get(user_name(record.uid))

    # --- bursts ---------------------------------------------------------------------------------

    def resume_burst(self, record: SessionRecord, hello: m.Hello) -> None:
        """Restore the burst that a reconnected client is in: a restarted daemon may know it from
        its roster (it stays), or has to line it up again."""
        in_burst = record.in_burst and not record.own_burst
        if hello.in_burst and not in_burst:
            self.places.request(record, hello.burst, runs=True)
        elif in_burst and not hello.in_burst and record.client_burst <= hello.burst:
            # The burst ended while there was no connection.
            self._end(record)

    def _request_lease(self, record: SessionRecord, client_burst: int) -> None:
        burst = record.number(client_burst)
        record.waiting, record.in_burst = True, False
        self._core.feed(ev.LeaseRequested(session=record.id, burst=burst))

    def _withdraw(self, record: SessionRecord) -> None:
        record.waiting = record.in_burst = False
        self._core.feed(ev.LeaseWithdrawn(session=record.id, burst=record.burst))

    def withdraw_own(self, record: SessionRecord) -> None:
        """Take back what only a call at the gate has asked for: a place, the lease, or its next
        turn."""
        self.places.withdraw(record, 0)
        if record.own_burst and record.waiting:
            self._withdraw(record)
        elif record.own_burst and record.in_burst:
            self._end(record)

    def _end(self, record: SessionRecord) -> None:
        record.waiting = record.in_burst = False
        self._core.end_burst(record, record.burst)

    # --- leaving --------------------------------------------------------------------------------

    def died(self, record: SessionRecord) -> None:
        """Remove ``record``, whose process has ended."""
        log.info("session ended", session=record.id, pid=record.ref.pid)
        self._leaving.pop(record, None)
        self.places.withdraw(record)
        record.waiting = False
        self._core.feed(ev.SessionLost(session=record.id))
        self._registry.remove(record)
        if record.connection is not None:
            record.connection.close()

    def is_leaving(self, record: SessionRecord) -> bool:
        """Return whether ``record`` was dismissed, or said goodbye, and waits for its memory."""
        return record in self._leaving

    def after(self, _step: Step) -> None:
        """Complete the leaving of sessions whose memory is back."""
        self.places.move_up_soon()
        for record in list(self._leaving):
            if self._core.scheduler.state_of(record.id) is None:
                self._send_farewell(record, self._leaving.pop(record))

    def expect_back(self, record: SessionRecord) -> None:
        """Dismiss ``record``, which lives but has no connection, unless it comes back soon."""
        if record.forget is not None:
            record.forget.cancel()
        loop = asyncio.get_running_loop()
        record.forget = loop.call_later(DISCONNECTED_GRACE_S, self._gone_silent, record)

    def dismiss(self, record: SessionRecord) -> None:
        """Let ``record`` leave Kiwi as soon as its memory is back."""
        self._leaving[record] = record.connection
        self.places.withdraw(record)
        record.waiting = record.in_burst = False
        record.kept_out = ""
        self._core.feed(ev.SessionDetached(session=record.id))

    def _gone_silent(self, record: SessionRecord) -> None:
        if self._is_not_free(record):
            # It cannot answer: it waits in the driver, perhaps with the interpreter's lock.
            self.expect_back(record)
            return
        if record in self._leaving or self.libraries.has_connected_library(record):
            return
        log.info("session did not come back", session=record.id, pid=record.ref.pid)
        self.dismiss(record)

    def _is_not_free(self, record: SessionRecord) -> bool:
        return self._core.scheduler.state_of(record.id) in _NOT_FREE

    def notify_left_out(self, session: SessionId, why: str) -> None:
        record = self._registry.get(session)
        if record is not None and record.connection is not None:
            text, remedy = user_texts.left_out(why)
            told = m.UserNotice(notice=Notice.PAGE_IN_REFUSED, text=text, remedy=remedy)
            record.connection.send(told)

    def _send_farewell(self, record: SessionRecord, asked: Connection | None) -> None:
        """Remove ``record``. ``asked`` is the connection that said goodbye, if any. A newer
        connection (the process came back meanwhile) is closed without an answer: it connects again,
        as a new session."""
        self._registry.remove(record)
        self.has_left(record.target)
        log.info("session left", session=record.id, pid=record.ref.pid)
        connection = record.connection
        if connection is not None:
            self._session_of.pop(connection, None)
            if connection is asked:
                connection.send(m.Ok())
            connection.close()


def _superseded() -> PeerError:
    return PeerError("superseded", "This process has opened a newer connection.")
