"""The connections of a daemon, how many there were, and how they ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError
from kiwi_core.peer_limits import WATCHES

if TYPE_CHECKING:
    from kiwi_core.daemon.base.admission import Admission
    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.shares import Shares


@dataclass(eq=False, repr=False)
class Connections:
    _admission: Admission
    _shares: Shares
    open: set[Connection] = field(default_factory=set)
    taken: int = 0
    """Connections since the daemon started."""
    ended: Counter[str] = field(default_factory=Counter)
    """Connections that a fatal error ended, by its code."""

    def add(self, connection: Connection) -> None:
        self.open.add(connection)
        self._admission.connected(connection)
        self.taken += 1

    def remove(self, connection: Connection) -> None:
        self.open.discard(connection)
        self._admission.left(connection)
        if connection.watching:
            self._shares[WATCHES].give_back(connection.peer.uid)

    def greeted(self, connection: Connection) -> None:
        """Record that the first message has come: the connection is no longer a silent one."""
        self._admission.greeted(connection)

    def watch(self, connection: Connection) -> None:
        """Send each new status to ``connection`` from now on. Raises ``CallerError("busy")``."""
        if connection.watching:
            return
        watches, uid = self._shares[WATCHES], connection.peer.uid
        if not watches.may(uid):
            raise CallerError(
                "busy",
                "You watch this GPU from as many connections as you may.",
                "Close some of them, or ask without `watch` now and then.",
            )
        watches.take(uid)
        connection.watching = True

    @property
    def watchers(self) -> list[Connection]:
        return [connection for connection in self.open if connection.watching]

    def close(self, *, but: set[Connection]) -> None:
        for connection in self.open - but:
            connection.close()
