"""What people ask for about a session's memory, from its own process or from outside: out now
(``release``), or back before it is used (``bring-back``). Who asked is in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.wire import messages as m

if TYPE_CHECKING:
    from kiwi_core.daemon.connection import Connection
    from kiwi_core.daemon.core import Core
    from kiwi_core.daemon.members import Member, Members
    from kiwi_core.daemon.peers import Rights
    from kiwi_core.daemon.shares import Share

log = structlog.get_logger(__name__)


class Wishes:
    """``own`` is the member that a connection speaks for, if any. Errors: ``CallerError``
    ("no-such-session"), also for a session that the peer may not act on. ``releases`` counts those
    that wait for a look at the GPU."""

    def __init__(self, members: Members, rights: Rights, core: Core, releases: Share) -> None:
        self._releases = releases
        self._members = members
        self._rights = rights
        self._core = core
        self.hints_begun = 0
        """Since the daemon started, for metrics servers, like the next one."""
        self.hints_declined = 0

    def release(self, connection: Connection, own: Member | None, message: m.Release) -> None:
        """Answers in its own time: what the session has in the GPU is read first."""
        member = self._subject(connection, own, message.session)
        uid = connection.peer.uid
        if not self._releases.may(uid):
            raise CallerError(
                "busy", "Your last requests to move memory out are still waiting.", "Wait for them."
            )
        self._releases.take(uid)

        def answer(refused: CallerError | None) -> None:
            self._releases.give_back(uid)
            log.info(
                "release", by=connection.peer.owner, by_pid=connection.peer.pid, session=member.id,
                name=member.name, refused=refused.code if refused else None,
            )  # fmt: skip
            connection.send(m.Error.of(refused, about="release") if refused else m.Ok())

        self._core.release(member, answer)

    def bring_back(self, connection: Connection, own: Member | None, message: m.BringBack) -> None:
        """A hint that leads to nothing is not told to the scheduler: people type a lot."""
        member = self._subject(connection, own, message.session)
        why = self._core.hint_hindrance(member)
        if why:
            self.hints_declined += 1
        else:
            self.hints_begun += 1
            log.info(
                "bring back", by=connection.peer.owner, by_pid=connection.peer.pid,
                session=member.id, name=member.name,
            )  # fmt: skip
            self._core.feed(ev.UseExpected(session=member.id))
        connection.send(m.HintReport(begun=not why, why=why))

    def _subject(self, connection: Connection, own: Member | None, session: str) -> Member:
        member = self._members.get(session) if session else own
        if member is None and not session:
            raise CallerError(
                "no-such-session",
                "An observer has no session of its own: the message must name one.",
                "`kiwi status` lists yours.",
            )
        if member is None or not self._rights.may_act(connection.peer, member.uid):
            raise CallerError(
                "no-such-session",
                f"You have no session {session!r} on this GPU.",
                "`kiwi status` lists yours.",
            )
        return member
