"""The waiters of one line, in turns of their owners: owners first, then the sessions of each.

Otherwise a user who runs three programs would get three turns in four beside a user who runs one.
The owner that was served last goes behind all others, and each owner's waiters keep their order of
arrival. Where each owner has one waiter, that is the order of arrival.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId


class OwnerTurns:
    def __init__(self) -> None:
        self.lines: dict[str, dict[SessionId, Session]] = {}
        """The waiters of each owner. The owners are in the order of their turns."""
        self._waiters = 0
        """The number of all waiters."""

    def add(self, session: Session) -> None:
        line = self.lines.get(session.owner)
        if line is None:
            line = self.lines[session.owner] = {}
        line[session.id] = session
        self._waiters += 1

    def remove(self, session: Session) -> None:
        line = self.lines[session.owner]
        del line[session.id]
        self._waiters -= 1
        if not line:
            del self.lines[session.owner]

    def served(self, session: Session) -> None:
        """Put the owner of ``session``, whose turn begins or ends, behind all others."""
        line = self.lines.pop(session.owner, None)
        if line is not None:
            self.lines[session.owner] = line

    def __iter__(self) -> Iterator[Session]:
        """Return the first waiter of each owner, then the second one of each, and so on."""
        if self._waiters == len(self.lines):  # each owner has one
            return chain.from_iterable(map(dict.values, self.lines.values()))
        return self._in_rounds()

    def _in_rounds(self) -> Iterator[Session]:
        more = []
        for line in self.lines.values():
            waiters = iter(line.values())
            yield next(waiters)
            if len(line) > 1:
                more.append(waiters)
        while more:
            for waiters in tuple(more):
                waiter = next(waiters, None)
                if waiter is None:
                    more.remove(waiters)
                else:
                    yield waiter
