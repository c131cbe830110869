"""What sessions and users ask of the daemon, one method for each message.

Sessions ask for the lease and give it up. Users change settings, page a session's memory out now
(``release``) or in before its use (``bring-back``), keep a session out of the GPU (``suspend``),
and end that (``resume``). The log says who asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.errors import CallerError
from kiwi_core.gpu import processes
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
    from kiwi_core.daemon.sessions.bursts import Bursts
    from kiwi_core.daemon.sessions.expected_sessions import ExpectedSessions
    from kiwi_core.daemon.sessions.membership import Membership

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
class Requests:
    """Errors are ``CallerError`` ("no-such-session"), also for a session that the peer may not act
    on. ``releases`` counts the requests that wait for a look at the GPU. ``remember`` writes the
    roster now: a setting that was answered with ``ok`` outlives a crash."""

    _config: Config
    _registry: SessionRegistry
    _rights: Rights
    _core: Core
    _members: Membership
    _bursts: Bursts
    _expected: ExpectedSessions
    _releases: Share
    _remember: Callable[[], None]
    hints_begun: int = 0
    """Hints since the daemon started, for metrics servers; the next one, too."""
    hints_declined: int = 0

    def handlers(self) -> Handlers:
        """Return the handler of each message of sessions and users, but for those that only ask
        for a report."""
        return {
            m.Acquire: self.acquire,
            m.Withdraw: self.withdraw,
            m.EndBurst: self.end_burst,
            m.Goodbye: self.goodbye,
            m.Expect: self.expect,
            m.Release: self.release,
            m.BringBack: self.bring_back,
            m.Suspend: self.suspend,
            m.Resume: self.resume,
            m.Rename: self.rename,
            m.Set: self.set,
        }

    # --- of sessions ----------------------------------------------------------------------------

    def acquire(self, connection: Connection, message: m.Acquire) -> None:
        self._bursts.request(self._members.speaker(connection), message.burst)

    def withdraw(self, connection: Connection, message: m.Withdraw) -> None:
        self._bursts.withdraw(self._members.speaker(connection), message.burst)
        connection.send(m.Withdrawn(burst=message.burst))

    def end_burst(self, connection: Connection, message: m.EndBurst) -> None:
        record = self._members.speaker(connection)
        self._bursts.end(record, message.burst, lingering=message.lingering)

    def goodbye(self, connection: Connection, _message: m.Goodbye) -> None:
        self._members.dismiss(self._members.speaker(connection))

    # --- about sessions -------------------------------------------------------------------------

    def expect(self, connection: Connection, message: m.Expect) -> None:
        """Expect a session, unless the program is a session already: it was faster than its
        announcer. Its predecessor before a restart has another process."""
        if message.pid <= 0 or not any(
            record.kernel_id == message.key
            and record.uid == connection.peer.uid
            and processes.alive(record.ref)
            for record in self._registry
        ):
            self._expected.expect(connection.peer, message)
        connection.send(m.Ok())

    def release(self, connection: Connection, message: m.Release) -> None:
        """Release the session, and answer later: what it has in the GPU is read first."""
        record = self._subject(connection, message.session)

        def answer(refused: CallerError | None) -> None:
            self._releases.give_back(connection.peer.uid)
            self._note("release", connection, record, refused=refused.code if refused else None)
            connection.send(m.Error.of(refused, about="release") if refused else m.Ok())

        self._take_share(connection)
        self._core.release(record, answer)

    def suspend(self, connection: Connection, message: m.Suspend) -> None:
        """Suspend the session after a look: a process that just began to use the GPU may have its
        gate by now. A session that an admin keeps out stays out, whatever else its user asks
        for."""
        record = self._subject(connection, message.session)

        def looked() -> None:
            self._releases.give_back(connection.peer.uid)
            known = self._core.scheduler.session(record.id)
            if known is not None and not known.guarded:
                connection.send(m.Error.of(_UNGUARDED, about="suspend"))
                return
            if known is not None and known.kept_out != ADMIN:
                by = ITS_USER if connection.peer.identity == record.identity else ADMIN
                self._note("suspend", connection, record)
                self._core.feed(ev.SuspensionRequested(session=record.id, by=by))
            self._remember()
            connection.send(m.Ok())

        self._take_share(connection)
        self._core.after_a_look(record, looked)

    def resume(self, connection: Connection, message: m.Resume) -> None:
        record = self._subject(connection, message.session)
        known = self._core.scheduler.session(record.id)
        kept_out = known.kept_out if known is not None else ""
        if kept_out == ADMIN and not self._rights.is_admin(connection.peer):
            raise CallerError(
                "not-allowed",
                "An admin keeps this session out of the GPU, so only an admin can let it go on.",
                "Ask the administrator of this machine.",
            )
        if kept_out:
            self._note("resume", connection, record)
            self._core.feed(ev.ResumptionRequested(session=record.id))
        self._remember()
        connection.send(m.Ok())

    def bring_back(self, connection: Connection, message: m.BringBack) -> None:
        """Feed the hint only if it leads to a page-in: users type a lot, so hints are many."""
        record = self._subject(connection, message.session)
        why = self._core.scheduler.hint_hindrance(record.id, clock.now_ns())
        if why:
            self.hints_declined += 1
        else:
            self.hints_begun += 1
            self._note("bring back", connection, record)
            self._core.feed(ev.UseExpected(session=record.id))
        connection.send(m.HintReport(begun=not why, why=why))

    def rename(self, connection: Connection, message: m.Rename) -> None:
        record = self._subject(connection, message.session)
        log.info("renamed", session=record.id, name=message.name, before=record.name)
        record.name, record.folder = message.name or record.name, message.folder
        self._remember()
        connection.send(m.Ok())

    def _subject(self, connection: Connection, session: str) -> SessionRecord:
        """Return the session that a message is about: the one that it names, or its sender's."""
        record = self._registry.get(session) if session else self._members.of(connection)
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

    def _take_share(self, connection: Connection) -> None:
        uid = connection.peer.uid
        if not self._releases.may(uid):
            raise CallerError(
                "busy", "Your last requests to move memory out are still waiting.", "Wait for them."
            )
        self._releases.take(uid)

    @staticmethod
    def _note(what: str, connection: Connection, record: SessionRecord, **more: object) -> None:
        log.info(
            what, by=connection.peer.owner, by_pid=connection.peer.pid, session=record.id,
            name=record.name, **more,
        )  # fmt: skip

    # --- settings -------------------------------------------------------------------------------

    def set(self, connection: Connection, message: m.Set) -> None:
        """Change settings. If none changes there is no event, journal line or write."""
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
            record = self._registry.get(message.session)
            if record is None:
                raise CallerError(
                    "no-such-session",
                    f"There is no session {message.session!r} on this GPU.",
                    "`kiwi status --json` lists them.",
                )
            record.priority = message.priority
            self._core.feed(ev.PriorityChanged(session=record.id, priority=message.priority))
        now = self._core.scheduler
        tq_ns = None if message.tq_s is None else seconds_to_ns(message.tq_s)
        wanted = (tq_ns, message.anti_thrash, message.policy)
        have = (now.tq_ns, now.anti_thrash, now.policy)
        changes = any(new not in (None, old) for new, old in zip(wanted, have, strict=True))
        if changes or message.priority is not None:
            log.info(
                "settings changed", by=connection.peer.owner, tq_s=message.tq_s,
                anti_thrash=message.anti_thrash.value if message.anti_thrash else None,
                policy=message.policy, session=message.session,
                priority=message.priority.value if message.priority else None,
            )  # fmt: skip
            self._core.feed(
                ev.SettingsChanged(
                    tq_ns=tq_ns, anti_thrash=message.anti_thrash, policy=message.policy
                )
            )
            self._remember()
        connection.send(m.Ok())
