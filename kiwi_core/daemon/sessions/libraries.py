"""Preloaded libraries: their messages, and the session that each linked process belongs to.

A linked process changes its session when one joins or ends. It may be all that is left of a session
that has ended: it then becomes a session of its own. Processes without a library cannot ask for
anything, so the daemon releases them: a kernel that is killed while the driver has it locked may
leave a child that is locked, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from kiwi_core import clock
from kiwi_core.daemon.base.peers import process_of
from kiwi_core.errors import PeerError
from kiwi_core.pager.api import Refused
from kiwi_core.sched import events as ev
from kiwi_core.states import Reason, Residency
from kiwi_core.units import NS_PER_S
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
    from kiwi_core.daemon.sessions.membership import Membership
    from kiwi_core.daemon.sessions.rooms import RoomRequests
    from kiwi_core.pager.api import Pager, Target
    from kiwi_core.units import SessionId
    from kiwi_core.wire.messages import Hello

log = structlog.get_logger(__name__)

AGAIN_AFTER_S = 5.0
"""Pause between attempts while the GPU has no room for a child."""

ONE_TRY_S = 60.0
"""Time for one attempt: the lock, the room, the copy."""


@dataclass(eq=False, repr=False)
class PreloadedLibraries:
    """``members`` admits programs that have only the library, and dismisses them."""

    _core: Core
    _links: Links
    _gates: Gates
    _rooms: RoomRequests
    _registry: SessionRegistry
    _members: Membership
    _library_ram: LibraryRam
    _ownership: Ownership
    _pager: Pager
    _link_of: dict[Connection, Link] = field(default_factory=dict)
    _releases: set[asyncio.Task[None]] = field(default_factory=set)
    closed: bool = False
    """True when the daemon leaves: no process becomes a session any more."""

    def connections(self) -> set[Connection]:
        return set(self._link_of)

    # --- messages -------------------------------------------------------------------------------

    def handlers(self) -> Handlers:
        """Return the handler of each message of libraries."""
        return {
            PagerState: self.state,
            PagerDone: self.done,
            WantLease: self.want_lease,
            WantRoom: self.want_room,
        }

    def hello(self, connection: Connection, hello: Hello) -> Link:
        """Return the link of the process. It belongs to the session of an ancestor, or to its own,
        a new one if need be; to none if that session has left Kiwi."""
        ref = process_of(connection.peer)
        link = self._links.hello(ref, connection.peer.uid, hello.name)
        if link.uid != connection.peer.uid:
            raise PeerError("not-yours", f"Process {ref.pid} belongs to another user.")
        # Before it can be sent anything: the welcome must come first.
        if not link.off and not (link.session and self._registry.get(link.session)):
            record = self._links.nearest(link)
            if record is None:
                record = self._members.admit_linked(link.ref, link.uid, link.name, link.above)
            if link.session != record.id:
                self._links.assign(link, record.id)
        old = link.attach(connection)
        self._ownership.decide(link, self._registry.get(link.session or ""), hello)
        if old is not None:
            self._link_of.pop(old, None)
            self._rooms.link_lost(link)
            old.end_with(PeerError("superseded", "This process has opened a newer connection."))
        self._link_of[connection] = link
        log.info("linked", pid=ref.pid, name=link.name, session=link.session)
        return link

    def welcomed(self, link: Link) -> None:
        """Send the gate order: the welcome is on its way."""
        open_ = link.session is None or self._core.scheduler.may_compute(link.session)
        self._gates.tell(link, open_)

    # A connection without a link was replaced while its last messages were on their way.

    def state(self, connection: Connection, message: PagerState) -> None:
        if (link := self._link_of.get(connection)) is None:
            return
        self._links.handle_state(link, message)
        self._ownership.heard(link, message)
        self._library_ram.changed()
        self._believe(link)
        need_bytes = self._links.need_bytes(link, message)
        if need_bytes and link.session is not None:
            self._core.feed(ev.NeedReported(session=link.session, need_bytes=need_bytes))

    def done(self, connection: Connection, message: PagerDone) -> None:
        link = self._link_of.get(connection)
        if link is not None and not self._links.done(link, message):
            log.info("answer that nobody waits for", pid=link.ref.pid, op=message.op)
            self._believe(link)

    def want_lease(self, connection: Connection, message: WantLease) -> None:
        if (link := self._link_of.get(connection)) is None:
            return
        if message.context:
            self._gates.context_wanted(link)
        elif not message.waits:
            self._gates.lease_unwanted(link)
        else:
            self._gates.lease_wanted(link)

    def want_room(self, connection: Connection, message: WantRoom) -> None:
        if (link := self._link_of.get(connection)) is not None:
            self._rooms.wanted(link, message.request, message.bytes)

    def disconnected(self, connection: Connection) -> None:
        link = self._link_of.pop(connection, None)
        if link is None:
            return
        log.info("link lost", pid=link.ref.pid, session=link.session)
        link.lost()
        self._rooms.link_lost(link)
        record = self._registry.get(link.session) if link.session else None
        alone = record is not None and record.connection is None
        if record is not None and alone and not self._links.connected(record.id):
            self._members.expect_back(record)

    def died(self, link: Link) -> None:
        """Close the connections of a process that ended."""
        self._rooms.link_lost(link)
        for connection, of in list(self._link_of.items()):
            if of is link:
                del self._link_of[connection]
                connection.close()

    def _believe(self, link: Link) -> None:
        """Feed what it reports and the scheduler does not know: the outcome of an operation that
        was given up, or that an earlier daemon began. After a restart the scheduler has only a
        guess of what is out."""
        session, residency = link.session, link.report.residency
        if session is None or link.call is not None or residency is Residency.RESIDENT:
            return
        scheduler, links = self._core.scheduler, self._links.of(session)
        known = scheduler.session(session)
        if known is None or session in self._core.operations.sessions:
            return
        out_bytes = sum(one.report.paged_out_bytes for one in links)
        known_bytes = scheduler.out_bytes(session)
        more = known_bytes is not None and out_bytes > known_bytes
        if not (more or scheduler.believed_in(session)):
            return
        log.warning("found", session=session, pid=link.ref.pid, residency=residency.value)
        self._core.feed(
            ev.SessionJoined(
                session=session,
                residency=residency,
                resident_bytes=sum(one.report.resident_bytes for one in links),
                paged_out_bytes=out_bytes,
                burst=known.burst,
            )
        )

    # --- sessions that come and go --------------------------------------------------------------

    def session_joined(self, record: SessionRecord) -> None:
        """Give a new session the links of its process and of the descendants of that process,
        unless they belong to a session of a client."""
        for link in self._links.everybody():
            own = self._registry.get(link.session) if link.session else None
            if own is record or (own is not None and not own.by_link):
                continue
            if self._links.nearest(link, but=own) is not record:
                continue
            if own is not None:
                self._members.dismiss(own)  # its memory comes back first; then see ``_dissolve``
                continue
            link.off = False
            self._hand_over(link, record)

    def session_left(self, record: SessionRecord) -> None:
        """Release a session that has left with its memory in the GPU, as recorded. A failed move
        can still have left its gate shut."""
        if self._links.shut(record.id):
            self.session_died(record.target, was_leaving=True)
        else:
            self._dissolve(record.id)

    def session_died(self, target: Target, *, was_leaving: bool) -> None:
        """Release what a session has left behind, in a task that mostly finds nothing to do."""
        task = asyncio.ensure_future(self._release(target, was_leaving))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    @property
    def releasing(self) -> bool:
        """Return whether processes of ended sessions are still being released."""
        return bool(self._releases)

    async def _release(self, target: Target, was_leaving: bool) -> None:
        while target.session in self._core.operations.sessions:
            await asyncio.sleep(0.1)
        if not (was_leaving or self.closed):
            self._orphan(target.session)
        # No program stays shut for ever, whatever fails now.
        while True:
            deadline_ns = round((clock.now_s() + ONE_TRY_S) * NS_PER_S)
            try:
                outcome = await self._pager.page_in(target, deadline_ns)
            except Exception:
                log.exception("children left behind could not be let go", session=target.session)
                break
            if not isinstance(outcome, Refused) or outcome.reason is Reason.GONE:
                break
            if outcome.reason is not Reason.NO_ROOM and not self._links.shut(target.session):
                break
            await asyncio.sleep(AGAIN_AFTER_S)
        if not self.closed:
            self._dissolve(target.session)

    def _orphan(self, session: SessionId) -> None:
        """Let the linked processes of a dead session become sessions, or join another one: those
        that are paged out must be able to come back in their turn."""
        for link in sorted(self._links.of(session), key=lambda one: one.ref.start_ticks):
            if link.session != session:
                continue  # its parent, which has just become a session, has taken it along
            other = self._links.nearest(link)
            if other is not None:
                self._hand_over(link, other)
                continue
            try:  # ``session_joined`` gives it the link
                self._members.admit_linked(link.ref, link.uid, link.name, link.above)
            except PeerError as error:  # it continues without Kiwi: see ``_dissolve``
                log.warning("cannot be a session", pid=link.ref.pid, why=str(error))
                self._rooms.deny(link)

    def _dissolve(self, session: SessionId) -> None:
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
            self._rooms.deny(link)

    def _hand_over(self, link: Link, record: SessionRecord) -> None:
        """Give ``link`` to the session of ``record``. It asks anew for what it still waits for."""
        self._links.assign(link, record.id)
        self._gates.tell(link, self._core.scheduler.may_compute(record.id))
        self._rooms.moved_over(link)
        self._believe(link)
