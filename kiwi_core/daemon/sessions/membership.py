"""Who is a session: processes that join Kiwi, lose their connection, come back, leave and die."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.peers import process_of, user_name
from kiwi_core.daemon.roster.registry import SessionRecord, session_id
from kiwi_core.errors import PeerError
from kiwi_core.sched import events as ev
from kiwi_core.states import Notice, SessionState
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.guards import Guards
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.sessions.bursts import Bursts
    from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
    from kiwi_core.daemon.sessions.libraries import PreloadedLibraries
    from kiwi_core.gpu.processes import ProcessRef
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


class Membership:
    """A subscriber (``steps``). ``priorities`` are the classes by user name that the daemon was
    started with."""

    def __init__(
        self,
        registry: SessionRegistry,
        core: Core,
        links: Links,
        guards: Guards,
        bursts: Bursts,
        expected: ExpectedSessions,
        priorities: Mapping[str, Priority],
    ) -> None:
        self._registry = registry
        self._core = core
        self._links = links
        self._guards = guards
        self._bursts = bursts
        self._expected = expected
        self._priorities = priorities
        self._session_of: dict[Connection, SessionRecord] = {}
        self._leaving: dict[SessionRecord, Connection | None] = {}
        """Sessions that were dismissed, or said goodbye, and wait for their memory; with the
        connection that said goodbye, if any."""
        self.libraries: PreloadedLibraries

    def of(self, connection: Connection) -> SessionRecord | None:
        """Return the session that the connection speaks for."""
        return self._session_of.get(connection)

    def speaker(self, connection: Connection) -> SessionRecord:
        """Do the same; raise ``PeerError("superseded")`` if there is none any more."""
        record = self._session_of.get(connection)
        if record is None:
            raise _superseded()
        return record

    def priority_of(self, record: SessionRecord) -> Priority | None:
        return record.priority or self._priorities.get(user_name(record.uid))

    # --- joining --------------------------------------------------------------------------------

    def hello(self, connection: Connection, hello: m.Hello) -> SessionRecord:
        """Return the session of the process at the other end, a new one if need be. Its earlier
        connection, if any, ends."""
        ref = process_of(connection.peer)
        record = self._registry.of_process(ref)
        if record is None:
            record = self._admit(ref, connection.peer.uid, hello.name, hello.kernel_id)
        self._expected.joined(connection.peer.uid, hello.kernel_id)
        record.name = hello.name or record.name
        record.kernel_id = hello.kernel_id or record.kernel_id
        record.folder = hello.folder or record.folder
        record.by_link = False
        self._guards.set_ungated(record, hello.ungated)
        old, record.connection = record.connection, connection
        self._session_of[connection] = record
        if record.forget is not None:
            record.forget.cancel()
            record.forget = None
        if old is not None and old is not connection:
            self._session_of.pop(old, None)
            old.end_with(_superseded())
        return record

    def admit_linked(
        self, ref: ProcessRef, uid: int, name: str, above: Collection[ProcessRef] = ()
    ) -> SessionRecord:
        """Add a session for a program whose preloaded library alone has connected. ``above`` are
        the process and its ancestors: if one was announced, the session has its name. Raises
        ``PeerError`` as ``hello`` does."""
        announced, kernel_id = self._expected.take(uid, above)
        record = self._admit(ref, uid, announced or name, kernel_id)
        record.by_link = True
        return record

    def _admit(self, ref: ProcessRef, uid: int, name: str, kernel_id: str) -> SessionRecord:
        """Add a session. Raises ``PeerError``: "too-many-sessions" or "gone"."""
        if not self._registry.share.may(uid):
            raise PeerError(
                "too-many-sessions",
                "You have as many sessions on this GPU as you may have.",
                "Shut down notebooks that are no longer needed. Kiwi tries again by itself.",
            )
        record = SessionRecord(
            session_id(ref), ref, uid, name or f"process {ref.pid}", kernel_id=kernel_id
        )
        self._registry.add(record)
        self._core.joined(record, self.priority_of(record))
        log.info("session joined", session=record.id, pid=ref.pid, name=record.name)
        self.libraries.session_joined(record)
        return record

    # --- losing the connection --------------------------------------------------------------------

    def disconnected(self, connection: Connection, *, closing: bool) -> None:
        """Handle the end of a connection. ``closing``: the daemon is leaving."""
        record = self._session_of.pop(connection, None)
        if record is None or record.connection is not connection:
            return
        record.connection = None
        if closing or self._registry.get(record.id) is not record:
            return  # the daemon or the process has ended: it does not come back
        self._bursts.client_lost(record)
        self.expect_back(record)

    def expect_back(self, record: SessionRecord) -> None:
        """Dismiss ``record``, which lives but has no connection, unless it comes back soon."""

        def over() -> None:
            if self._is_not_free(record):
                # It cannot answer: it waits in the driver, perhaps with the interpreter's lock.
                self.expect_back(record)
            elif record not in self._leaving and not self._links.connected(record.id):
                log.info("session did not come back", session=record.id, pid=record.ref.pid)
                self.dismiss(record)

        if record.forget is not None:
            record.forget.cancel()
        record.forget = asyncio.get_running_loop().call_later(DISCONNECTED_GRACE_S, over)

    def not_free(self) -> set[Connection]:
        """Return the connections of sessions that are suspended, or whose memory is out or on its
        way."""
        those = filter(self._is_not_free, self._registry)
        return {record.connection for record in those if record.connection is not None}

    def _is_not_free(self, record: SessionRecord) -> bool:
        return self._core.scheduler.state_of(record.id) in _NOT_FREE

    # --- leaving --------------------------------------------------------------------------------

    def died(self, record: SessionRecord) -> bool:
        """Remove ``record``, whose process has ended. Return whether it was leaving."""
        log.info("session ended", session=record.id, pid=record.ref.pid)
        was_leaving = record in self._leaving
        self._leaving.pop(record, None)
        self._bursts.left(record)
        self._core.feed(ev.SessionLost(session=record.id))
        self._registry.remove(record)
        if record.connection is not None:
            record.connection.close()
        return was_leaving

    def dismiss(self, record: SessionRecord) -> None:
        """Let ``record`` leave Kiwi as soon as its memory is back."""
        self._leaving[record] = record.connection
        self._bursts.drop(record)
        self._core.feed(ev.SessionDetached(session=record.id))

    def after(self, _step: Step) -> None:
        """Complete the leaving of sessions whose memory is back. A connection that is newer than
        the goodbye (the process came back meanwhile) is closed without an answer: it connects
        again, as a new session."""
        for record in list(self._leaving):
            if self._core.scheduler.session(record.id) is not None:
                continue
            asked = self._leaving.pop(record)
            self._registry.remove(record)
            self._bursts.left(record)
            self.libraries.session_left(record)
            log.info("session left", session=record.id, pid=record.ref.pid)
            if (connection := record.connection) is not None:
                self._session_of.pop(connection, None)
                if connection is asked:
                    connection.send(m.Ok())
                connection.close()

    def notify_left_out(self, session: SessionId, why: str) -> None:
        record = self._registry.get(session)
        if record is not None and record.connection is not None:
            text, remedy = user_texts.left_out(why)
            told = m.UserNotice(notice=Notice.PAGE_IN_REFUSED, text=text, remedy=remedy)
            record.connection.send(told)


def _superseded() -> PeerError:
    return PeerError("superseded", "This process has opened a newer connection.")
