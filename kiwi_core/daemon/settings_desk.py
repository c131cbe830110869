"""Settings that people change while the daemon runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.policy import check_name
from kiwi_core.units import seconds_to_ns
from kiwi_core.wire import messages as m
from kiwi_core.wire.names import check_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.config import Config
    from kiwi_core.daemon.connection import Connection
    from kiwi_core.daemon.core import Core
    from kiwi_core.daemon.members import Members
    from kiwi_core.daemon.peers import Rights
    from kiwi_core.states import Priority

log = structlog.get_logger(__name__)


class SettingsDesk:
    """``remember`` writes the roster now: what was answered with ``ok`` outlives a crash."""

    def __init__(
        self,
        config: Config,
        members: Members,
        rights: Rights,
        core: Core,
        remember: Callable[[], None],
    ) -> None:
        self._config = config
        self._members = members
        self._rights = rights
        self._core = core
        self._remember = remember

    def set(self, connection: Connection, message: m.Set) -> None:
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
        if message.priority is not None or self._changes(tq_ns, message):
            self._change(connection, tq_ns, message)
        connection.send(m.Ok())

    def _changes(self, tq_ns: int | None, message: m.Set) -> bool:
        """What is set already costs nothing: no event, no line in the journal, no write."""
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
        member = self._members.get(session)
        if member is None:
            raise CallerError(
                "no-such-session",
                f"There is no session {session!r} on this GPU.",
                "`kiwi status --json` lists them.",
            )
        member.priority = priority
        self._core.feed(ev.PriorityChanged(session=member.id, priority=priority))
