"""Users' requests while the daemon runs: change settings, page a session's memory out now
(``release``) or in before its use (``bring-back``), keep a session out of the GPU (``suspend``),
and end that (``resume``). The log says who asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import check_name
from kiwi_core.units import seconds_to_ns
from kiwi_core.wire import messages as m
from kiwi_core.wire.names import check_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.config import Config
    from kiwi_core.daemon.base.connection import Connection, Handlers
    from kiwi_core.daemon.base.peers import Rights
    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.states import Priority

log = structlog.get_logger(__name__)

ADMIN: Final = "an admin"
ITS_USER: Final = "its user"
"""Who keeps a session out of the GPU, in the words that every user may see."""


_UNGUARDED: Final = CallerError(
    "unguarded",
    "A program of this session has no gate of Kiwi's, so it cannot be stopped safely in the middle "
    "of its work: nothing was done.",
    "`kiwi release` moves its memory out while it idles.",
)


@dataclass(eq=False, repr=False)
class RequestHandler:
    """``own`` returns the session that a connection speaks for, if any. Errors are ``CallerError``
    ("no-such-session"), also for a session that the peer may not act on. ``releases`` counts the
    requests that wait for a look at the GPU. ``remember`` writes the roster now: a setting that was
    answered with ``ok`` outlives a crash."""

    _config: Config
    _registry: SessionRegistry
    _rights: Rights
    _core: Core
    _releases: Share
    _remember: Callable[[], None]
    _own: Callable[[Connection], SessionRecord | None]
    hints_begun: int = 0
    """Hints since the daemon started, for metrics servers; the next one, too."""
    hints_declined: int = 0

    def handlers(self) -> Handlers:
        return {
            m.Release: self._release,
            m.BringBack: self._bring_back,
            m.Suspend: self._suspend,
            m.Resume: self._resume,
            m.Rename: self._rename,
            m.Set: self._set,
        }

    def _release(self, connection: Connection, message: m.Release) -> None:
        """Release the session, and answer later: what it has in the GPU is read first."""
        record = self._subject(connection, message.session)

        def answer(refused: CallerError | None) -> None:
            self._releases.give_back(connection.peer.uid)
            log.info(
                "release", by=connection.peer.owner, by_pid=connection.peer.pid, session=record.id,
                name=record.name, refused=refused.code if refused else None,
            )  # fmt: skip
            connection.send(m.Error.of(refused, about="release") if refused else m.Ok())

        self._take_share(connection)
        self._core.release(record, answer)

    def _suspend(self, connection: Connection, message: m.Suspend) -> None:
        """Suspend the session after a look: a process that just began to use the GPU may have its
        gate by now. A session that an admin keeps out stays out, whatever else its user asks
        for."""
        record = self._subject(connection, message.session)

        def looked() -> None:
            self._releases.give_back(connection.peer.uid)
            if not record.guarded:
                connection.send(m.Error.of(_UNGUARDED, about="suspend"))
                return
            if record.kept_out != ADMIN:
                by = ITS_USER if connection.peer.identity == record.identity else ADMIN
                self._keep_out(connection, record, by)
                self._core.feed(ev.SuspensionRequested(session=record.id, by=by))
            self._remember()
            connection.send(m.Ok())

        self._take_share(connection)
        self._core.after_a_look(record, looked)

    def _take_share(self, connection: Connection) -> None:
        uid = connection.peer.uid
        if not self._releases.may(uid):
            raise CallerError(
                "busy", "Your last requests to move memory out are still waiting.", "Wait for them."
            )
        self._releases.take(uid)

    def _resume(self, connection: Connection, message: m.Resume) -> None:
        record = self._subject(connection, message.session)
        if record.kept_out == ADMIN and not self._rights.is_admin(connection.peer):
            raise CallerError(
                "not-allowed",
                "An admin keeps this session out of the GPU, so only an admin can let it go on.",
                "Ask the administrator of this machine.",
            )
        if record.kept_out:
            self._keep_out(connection, record, "")
            self._core.feed(ev.ResumptionRequested(session=record.id))
        self._remember()
        connection.send(m.Ok())

    @staticmethod
    def _keep_out(connection: Connection, record: SessionRecord, by: str) -> None:
        record.kept_out = by
        log.info(
            "suspend" if by else "resume", by=connection.peer.owner, by_pid=connection.peer.pid,
            session=record.id, name=record.name,
        )  # fmt: skip

    def _bring_back(self, connection: Connection, message: m.BringBack) -> None:
        """Feed the hint only if it leads to a page-in: users type a lot, so hints are many."""
        record = self._subject(connection, message.session)
        why = self._core.scheduler.hint_hindrance(record.id, clock.now_ns())
        if why:
            self.hints_declined += 1
        else:
            self.hints_begun += 1
            log.info(
                "bring back", by=connection.peer.owner, by_pid=connection.peer.pid,
                session=record.id, name=record.name,
            )  # fmt: skip
            self._core.feed(ev.UseExpected(session=record.id))
        connection.send(m.HintReport(begun=not why, why=why))

    def _rename(self, connection: Connection, message: m.Rename) -> None:
        record = self._subject(connection, message.session)
        log.info("renamed", session=record.id, name=message.name, before=record.name)
        record.name, record.folder = message.name or record.name, message.folder
        self._remember()
        connection.send(m.Ok())

    def _subject(self, connection: Connection, session: str) -> SessionRecord:
        record = self._registry.get(session) if session else self._own(connection)
        if record is None and not session:
            raise CallerError(
                "no-such-session",
                "An observer has no session of its own: the message must name one.",
                "`kiwi status` lists yours.",
            )
        if record is None or not self._rights.may_act(connection.peer, record.identity):
            raise CallerError(
                "no-such-session",
                f"You have no session {session!r} on this GPU.",
                "`kiwi status` lists yours.",
            )
        return record

    # --- settings -------------------------------------------------------------------------------

    def _set(self, connection: Connection, message: m.Set) -> None:
        if not self._rights.is_admin(connection.peer):
            raise CallerError(
                "not-allowed",
                "Only the daemon's owner or a record of its admin group may change settings.",
                "Ask the administrator of this machine.",
            )
        check_settings(message, self._config)
        if message.policy is not None:
            check_name(message.policy)
        if message.priority is not None:
            self._prioritise(message.session, message.priority)
        tq_ns = None if message.tq_s is None else seconds_to_ns(message.tq_s)
        if message.priority is not None or self._changes(tq_ns, message):
            self._change(connection, tq_ns, message)
        connection.send(m.Ok())

    def _changes(self, tq_ns: int | None, message: m.Set) -> bool:
        """Return whether a setting changes; if none does there is no event, journal line or
        write."""
        now = self._core.scheduler
        wanted = (tq_ns, message.anti_thrash, message.policy)
        have = (now.tq_ns, now.anti_thrash, now.policy)
        return any(
            one is not None and one != other for one, other in zip(wanted, have, strict=True)
        )

    def _change(self, connection: Connection, tq_ns: int | None, message: m.Set) -> None:
        log.info(
            "settings changed", by=connection.peer.owner, tq_s=message.tq_s,
            anti_thrash=message.anti_thrash.value if message.anti_thrash else None,
            policy=message.policy, session=message.session,
            priority=message.priority.value if message.priority else None,
        )  # fmt: skip
        self._core.feed(
            ev.SettingsChanged(tq_ns=tq_ns, anti_thrash=message.anti_thrash, policy=message.policy)
        )
        self._remember()

    def _prioritise(self, session: str, priority: Priority) -> None:
        record = self._registry.get(session)
        if record is None:
            raise CallerError(
                "no-such-session",
                f"There is no session {session!r} on this GPU.",
                "`kiwi status --json` lists them.",
            )
        record.priority = priority
        self._core.feed(ev.PriorityChanged(session=record.id, priority=priority))
