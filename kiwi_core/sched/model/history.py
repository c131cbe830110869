"""The recent history of one GPU: when its sessions held the lease, waited and were moved.

The scheduler calls ``begin`` and ``end`` at the place where an entry begins and ends. Entries in
progress are not stored here: the sessions record when they began (``turn_of``, their ``op``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.operations import PAGING_IN, PAGING_OUT
from kiwi_core.sched.model.turn import QUEUED, RUNNING
from kiwi_core.sched.view import HistoryView
from kiwi_core.states import HistoryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId

MOVES: Final = {PAGING_OUT: HistoryKind.OUT, PAGING_IN: HistoryKind.IN}

_Ended = tuple[int, int, "SessionId", HistoryKind, int, int, int, bool, bool]
"""The fields of a ``HistoryView``, which is made only when a caller reads the history."""


class History:
    """Entries that have ended, bounded in number and age. Each lease cycle writes some, so
    writing is cheap."""

    def __init__(self, entries_max: int, kept_ns: int) -> None:
        self.serial = 0
        """The serial of the newest change; the first one is 1."""
        self._kept_ns: Final = kept_ns
        self._ended: Final[deque[_Ended]] = deque(maxlen=entries_max)
        """Entries in the order of their serials, which is the order in which they ended."""

    def begin(self) -> int:
        """Return the id of a new entry, which is also its serial until it ends."""
        self.serial += 1
        return self.serial

    def end(
        self,
        id_: int,
        session: SessionId,
        kind: HistoryKind,
        began_ns: int,
        now_ns: int,
        bytes_moved: int = 0,
        ok: bool = True,
        hinted: bool = False,
    ) -> None:
        self.serial += 1
        self._ended.append(
            (id_, self.serial, session, kind, began_ns, now_ns, bytes_moved, ok, hinted)
        )

    def since(
        self, serial: int, sessions: Iterable[Session], now_ns: int
    ) -> tuple[HistoryView, ...]:
        """Return the entries that began or ended after the change ``serial``, ordered by serial.
        ``sessions`` are all that the scheduler has on record."""
        self._forget_before(now_ns - self._kept_ns)
        changed = [HistoryView(*ended) for ended in self._ended_after(serial)]
        changed += (view for view in _going_on(sessions) if view.serial > serial)
        return tuple(sorted(changed, key=_serial))

    def sessions(self) -> frozenset[SessionId]:
        """Return the ids of all sessions that have an entry that has ended."""
        return frozenset(ended[2] for ended in self._ended)

    def _ended_after(self, serial: int) -> Iterator[_Ended]:
        for ended in reversed(self._ended):
            if ended[1] <= serial:
                return
            yield ended

    def _forget_before(self, oldest_ns: int) -> None:
        while self._ended and self._ended[0][5] < oldest_ns:
            self._ended.popleft()


def turn_of(session: Session) -> tuple[HistoryKind, int] | None:
    """Return whether ``session`` holds the lease, waits or is suspended, and since when. A session
    that is being stopped still holds; a session that leaves waits for no turn."""
    if session.want is RUNNING or session.stopping:
        return HistoryKind.HELD, session.granted_ns
    if session.want is QUEUED and not session.leaving:
        kind = HistoryKind.SUSPENDED if session.mid_burst else HistoryKind.WAITED
        return kind, session.queued_ns
    return None


def _going_on(sessions: Iterable[Session]) -> Iterator[HistoryView]:
    for session in sessions:
        if (turn := turn_of(session)) is not None:
            yield _view(session, session.turn_id, *turn)
        op = session.op
        if op is not None and op.doing in MOVES:
            yield _view(session, op.move_id, MOVES[op.doing], op.started_ns, op.hinted)


def _view(
    session: Session, id_: int, kind: HistoryKind, began_ns: int, hinted: bool = False
) -> HistoryView:
    return HistoryView(id_, id_, session.id, kind, began_ns, None, 0, True, hinted)


def _serial(view: HistoryView) -> int:
    return view.serial
