"""Handle the messages of preloaded libraries: hellos, states, answers, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kiwi_core.daemon.base.peers import process_of
from kiwi_core.errors import PeerError
from kiwi_core.sched import events as ev
from kiwi_core.states import Residency
from kiwi_core.wire.pager import PagerDone, PagerState, WantLease, WantRoom

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connection import Connection, Handlers
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.library_ram import LibraryRam
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.links.ownership import Ownership
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.daemon.sessions.gates import Gates
    from kiwi_core.daemon.sessions.session_handler import SessionHandler
    from kiwi_core.units import SessionId
    from kiwi_core.wire.messages import Hello

log = structlog.get_logger(__name__)

LinkMessage = PagerState | PagerDone | WantLease | WantRoom


@dataclass(eq=False, repr=False)
class LinkHandler:
    """``sessions`` admits programs that have only the library, and dismisses them."""

    _core: Core
    _links: Links
    _gates: Gates
    _registry: SessionRegistry
    _sessions: SessionHandler
    _library_ram: LibraryRam
    _ownership: Ownership
    _link_of: dict[Connection, Link] = field(default_factory=dict)

    def connections(self) -> set[Connection]:
        return set(self._link_of)

    def has_connected_library(self, record: SessionRecord) -> bool:
        """Return whether a library of a process of this session is connected."""
        return self._links.connected(record.id)

    def hello(self, connection: Connection, hello: Hello) -> SessionRecord | None:
        """Return the session that the process belongs to: an ancestor's or its own, a new one if
        need be. Return ``None`` if that session has left Kiwi.
        """
        ref = process_of(connection.peer)
        link = self._links.hello(ref, connection.peer.uid, hello.name)
        if link.uid != connection.peer.uid:
            raise PeerError("not-yours", f"Process {ref.pid} belongs to another user.")
        self._join_session(link)  # before it can be sent anything: the welcome must come first
        old = link.attach(connection)
        self._ownership.decide(link, self._registry.get(link.session or ""), hello)
        if old is not None:
            self._link_of.pop(old, None)
            self._gates.link_lost(link)
            old.end_with(PeerError("superseded", "This process has opened a newer connection."))
        self._link_of[connection] = link
        record = self._registry.get(link.session) if link.session else None
        log.info("linked", pid=ref.pid, name=link.name, session=link.session)
        return record

    def decision(self, connection: Connection) -> tuple[bool, str]:
        """Return whether the library owns, and the code of what speaks against that."""
        link = self._link_of[connection]
        return link.owns, link.objection.why.value if link.objection and not link.owns else ""

    def welcomed(self, connection: Connection) -> None:
        """Send the gate order: the welcome is on its way."""
        link = self._link_of[connection]
        open_ = link.session is None or self._core.scheduler.may_compute(link.session)
        self._gates.tell(link, open_)

    def handlers(self) -> Handlers:
        return {
            PagerState: self._state,
            PagerDone: self._done,
            WantLease: self._want_lease,
            WantRoom: self._want_room,
        }

    # A connection without a link was replaced while its last messages were on their way.

    def _state(self, connection: Connection, message: PagerState) -> None:
        if (link := self._link_of.get(connection)) is not None:
            self._links.handle_state(link, message)
            self._ownership.heard(link, message)
            self._library_ram.changed()
            self._believe(link)
            need_bytes = self._links.need_bytes(link, message)
            if need_bytes and link.session is not None:
                self._core.feed(ev.NeedReported(session=link.session, need_bytes=need_bytes))

    def _done(self, connection: Connection, message: PagerDone) -> None:
        link = self._link_of.get(connection)
        if link is not None and not self._links.done(link, message):
            log.info("answer that nobody waits for", pid=link.ref.pid, op=message.op)
            self._believe(link)

    def _want_lease(self, connection: Connection, message: WantLease) -> None:
        if (link := self._link_of.get(connection)) is None:
            return
        if message.context:
            self._gates.context_wanted(link)
        elif not message.waits:
            self._gates.lease_unwanted(link)
        else:
            self._gates.lease_wanted(link)

    def _want_room(self, connection: Connection, message: WantRoom) -> None:
        if (link := self._link_of.get(connection)) is not None:
            self._gates.room_wanted(link, message.request, message.bytes)

    def disconnected(self, connection: Connection) -> None:
        link = self._link_of.pop(connection, None)
        if link is None:
            return
        log.info("link lost", pid=link.ref.pid, session=link.session)
        link.lost()
        self._gates.link_lost(link)
        record = self._registry.get(link.session) if link.session else None
        if (
            record is not None
            and record.connection is None
            and not self.has_connected_library(record)
        ):
            self._sessions.expect_back(record)

    def died(self, link: Link) -> None:
        """Close the connections of a process that ended."""
        self._gates.link_lost(link)
        for connection, of in list(self._link_of.items()):
            if of is link:
                del self._link_of[connection]
                connection.close()

    # --- sessions that come and go --------------------------------------------------------------

    def joined(self, record: SessionRecord) -> None:
        """Give a new session the links of its process and of the descendants of that process,
        unless they belong to a session of a client."""
        for link in self._links.everybody():
            own = self._registry.get(link.session) if link.session else None
            if own is record or (own is not None and not own.by_link):
                continue
            if self._links.nearest(link, but=own) is not record:
                continue
            if own is not None:
                self._sessions.dismiss(own)  # its memory comes back first; then see ``left``
                continue
            link.off = False
            self._hand_over(link, record)

    def orphaned(self, session: SessionId) -> None:
        """Let the linked processes of a dead session become sessions, or join another one: those
        that are paged out must be able to come back in their turn."""
        for link in sorted(self._links.of(session), key=lambda one: one.ref.start_ticks):
            if link.session != session:
                continue  # its parent, which has just become a session, has taken it along
            other = self._links.nearest(link)
            if other is not None:
                self._hand_over(link, other)
                continue
            try:
                self._sessions.admit_linked(
                    link.ref, link.uid, link.name, link.above
                )  # see ``joined``
            except PeerError as error:  # it continues without Kiwi: see ``left``
                log.warning("cannot be a session", pid=link.ref.pid, why=str(error))
                self._gates.deny(link)

    def left(self, session: SessionId) -> None:
        """Give the linked processes of a session that is over to another one, or to none: they then
        run without Kiwi, which makes no room for them any more."""
        for link in self._links.of(session):
            other = self._links.nearest(link)
            if other is not None:
                self._hand_over(link, other)
                continue
            self._links.assign(link, None)
            link.off = True
            self._gates.tell(link, opens=True)
            self._gates.deny(link)

    def _hand_over(self, link: Link, record: SessionRecord) -> None:
        """Give ``link`` to the session of ``record``. It asks anew for what it still waits for."""
        self._links.assign(link, record.id)
        self._gates.tell(link, self._core.scheduler.may_compute(record.id))
        self._gates.moved_over(link)
        self._believe(link)

    def _join_session(self, link: Link) -> None:
        if link.off or (link.session and self._registry.get(link.session) is not None):
            return
        record = self._links.nearest(link)
        if record is None:
            record = self._sessions.admit_linked(link.ref, link.uid, link.name, link.above)
        if link.session != record.id:
            self._links.assign(link, record.id)

    def _believe(self, link: Link) -> None:
        """Feed what it reports and the scheduler does not know: the outcome of an operation that
        was given up, or that an earlier daemon began.
        """
        record = self._registry.get(link.session) if link.session else None
        if record is None or link.call is not None or record.id in self._core.operations.sessions:
            return
        residency = link.report.residency
        links = self._links.of(record.id)
        out_bytes = sum(one.report.paged_out_bytes for one in links)
        if residency is Residency.RESIDENT or not self._is_news(record, out_bytes):
            return
        log.warning("found", session=record.id, pid=link.ref.pid, residency=residency.value)
        self._core.feed(
            ev.SessionJoined(
                session=record.id,
                residency=residency,
                resident_bytes=sum(one.report.resident_bytes for one in links),
                paged_out_bytes=out_bytes,
                burst=record.burst,
            )
        )

    def _is_news(self, record: SessionRecord, out_bytes: int) -> bool:
        """Return whether more is out than the scheduler knows; after a restart it has only a
        guess."""
        if self._core.scheduler.believed_in(record.id):
            return True
        known_bytes = self._core.scheduler.out_bytes(record.id)
        return known_bytes is not None and out_bytes > known_bytes
