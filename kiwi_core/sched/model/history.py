"""What happened on one GPU: the happenings of the present event, and the recent history.

The rules record on a session what it does (``turn_goes_on``, ``move_ended``); each fact is recorded
once, as a happening. Two folds over the happenings are kept here, because the scheduler itself
shows them: the history, and the sums of each session.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.accounts import Account
from kiwi_core.sched.model.happenings import MoveEnded, StretchEnded
from kiwi_core.sched.model.operations import Doing, Operations
from kiwi_core.sched.model.standing import Standing
from kiwi_core.states import HistoryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kiwi_core.sched.model.happenings import Happening
    from kiwi_core.sched.model.operations import OngoingOperation
    from kiwi_core.units import SessionId

MOVES: Final = {Doing.PAGING_OUT: HistoryKind.OUT, Doing.PAGING_IN: HistoryKind.IN}

SWAPS_KEPT: Final = 32
"""Recent moves shown to users: a few minutes of the busiest GPU."""


@dataclass(frozen=True)
class HistoryView:
    """A stretch of time in which ``session`` did one thing; times on the clock of ``now_ns``."""

    id: int
    serial: int
    """Number of the history's change that made the entry; a new one when the entry ends."""
    session: SessionId
    kind: HistoryKind
    began_ns: int
    ended_ns: int | None
    """``None`` while the entry is in progress."""
    bytes_moved: int
    ok: bool
    """Neither refused nor failed; this and ``bytes_moved`` are known at the end of a move."""
    hinted: bool
    """Whether a hint caused the move."""


class History:
    """What has ended, bounded in number and age. What is in progress is not stored here: the
    sessions record it (``stretch``, ``op``)."""

    def __init__(self, entries_max: int, kept_ns: int) -> None:
        self.happenings: list[Happening] = []
        """What has happened in the present event, in order."""
        self.serial = 0
        """The serial of the newest change; the first one is 1. A stretch and a move each make a
        change when they begin, which is also their id, and one when they end."""
        self.ended: Final[deque[StretchEnded | MoveEnded]] = deque(maxlen=entries_max)
        """In the order of their serials, which is the order in which they ended."""
        self.swaps: Final[deque[MoveEnded]] = deque(maxlen=SWAPS_KEPT)
        """The last moves that succeeded, however old, oldest first."""
        self._kept_ns: Final = kept_ns

    def next(self) -> int:
        """Return the serial of a new change."""
        self.serial += 1
        return self.serial

    def since(
        self, serial: int, sessions: Iterable[Record], now_ns: int
    ) -> tuple[HistoryView, ...]:
        """Return what began or ended after the change ``serial``, ordered by serial. ``sessions``
        are all that the scheduler has on record."""
        self._forget_before(now_ns - self._kept_ns)
        changed = [_past(ended) for ended in self._ended_after(serial)]
        changed += (view for view in _going_on(sessions) if view.serial > serial)
        return tuple(sorted(changed, key=_serial))

    def sessions(self) -> frozenset[SessionId]:
        """Return the ids of all sessions that have ended entries here."""
        return frozenset(ended.session for ended in self.ended)

    def _ended_after(self, serial: int) -> Iterator[StretchEnded | MoveEnded]:
        for ended in reversed(self.ended):
            if ended.serial <= serial:
                return
            yield ended

    def _forget_before(self, oldest_ns: int) -> None:
        while self.ended and self.ended[0].ended_ns < oldest_ns:
            self.ended.popleft()


@dataclass(eq=False)
class Record(Operations, Standing):
    """The part of ``Session`` about what it did so far. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    stretch: HistoryKind | None = None
    """Whether it holds the lease, waits or is suspended; ``None`` while it wants nothing, or only
    its memory back to leave."""
    stretch_id: int = 0
    stretch_began_ns: int = 0
    stood_ns: int = 0
    """The part of the stretch in progress in which its process was stopped, and which does not
    count; without the present stop."""
    stands_since_ns: int | None = None
    """When its process was stopped; ``None``: it runs."""

    held_ns: int = 0
    """How long it has held the lease, all bursts together; this and the next two without the
    stretch in progress."""
    waited_ns: int = 0
    suspended_ns: int = 0
    """The part of ``waited_ns`` in which a burst was suspended."""
    suspensions: int = 0
    bursts_begun: int = 0
    moving_ns: int = 0
    """How long its memory was being paged out or in, in moves that succeeded."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0

    def turn_goes_on(self, then: HistoryKind | None, now_ns: int, history: History) -> None:
        """Record how its turn goes on; ``None``: it is over. Each lease cycle does this several
        times, hence it is written out."""
        kind = self.stretch
        if kind is not None:
            began_ns = self.stretch_began_ns
            lasted_ns = counts_ns = now_ns - began_ns
            if self.stood_ns or self.stands_since_ns is not None:
                counts_ns -= self._stood_ns(now_ns)
                self.stood_ns = 0
                if self.stands_since_ns is not None:
                    self.stands_since_ns = now_ns
            if kind is HistoryKind.HELD:
                self.held_ns += counts_ns
                if then is HistoryKind.SUSPENDED:
                    self.suspensions += 1
            else:
                self.waited_ns += counts_ns
                if kind is HistoryKind.SUSPENDED:
                    self.suspended_ns += counts_ns
                elif then is HistoryKind.HELD:
                    self.bursts_begun += 1
            if lasted_ns or then is not HistoryKind.HELD:
                history.serial = serial = history.serial + 1
                ended = StretchEnded(self.stretch_id, serial, self.id, kind, began_ns, now_ns, then)
                history.ended.append(ended)
            else:  # there was no wait: the history leaves it out
                ended = StretchEnded(self.stretch_id, 0, self.id, kind, began_ns, now_ns, then)
            history.happenings.append(ended)
        self.stretch = then
        if then is not None:
            history.serial = self.stretch_id = history.serial + 1
            self.stretch_began_ns = now_ns

    def stands_still(self, now_ns: int) -> None:
        """Record that its process was stopped: until it goes on, no time counts as held or
        waited."""
        if self.stands_since_ns is None:
            self.stands_since_ns = now_ns

    def goes_on(self, now_ns: int) -> None:
        if self.stretch is not None:
            self.stood_ns = self._stood_ns(now_ns)
        self.stands_since_ns = None

    def _stood_ns(self, now_ns: int) -> int:
        """Return how long its process has been stopped in the stretch in progress."""
        since_ns = self.stands_since_ns
        if since_ns is None:
            return self.stood_ns
        return self.stood_ns + now_ns - max(since_ns, self.stretch_began_ns)

    def move_ended(
        self,
        op: OngoingOperation,
        moved_bytes: int,
        took_ns: int | None,
        now_ns: int,
        history: History,
    ) -> None:
        """Record the end of ``op``, which was to move its memory. ``took_ns`` is ``None`` if it was
        refused or has failed."""
        ok, elapsed_ns = took_ns is not None, took_ns or 0
        history.serial = serial = history.serial + 1
        ended = MoveEnded(
            op.move_id, serial, self.id, MOVES[op.doing], op.started_ns, now_ns,
            op.hinted, ok, moved_bytes, elapsed_ns,
        )  # fmt: skip
        history.ended.append(ended)
        history.happenings.append(ended)
        if not ok:
            return
        history.swaps.append(ended)
        self.moving_ns += elapsed_ns
        if op.doing is Doing.PAGING_OUT:
            self.moved_out_bytes += moved_bytes
        else:
            self.moved_in_bytes += moved_bytes

    def account(self, now_ns: int) -> Account:
        """Return its sums until ``now_ns``, including the stretch in progress."""
        present_ns = 0
        if self.stretch is not None:
            present_ns = now_ns - self.stretch_began_ns - self._stood_ns(now_ns)
        return Account(
            self.held_ns + (present_ns if self.stretch is HistoryKind.HELD else 0),
            self.waited_ns + (0 if self.stretch is HistoryKind.HELD else present_ns),
            self.suspended_ns + (present_ns if self.stretch is HistoryKind.SUSPENDED else 0),
            self.moving_ns,
            self.moved_out_bytes,
            self.moved_in_bytes,
            self.bursts_begun,
            self.suspensions,
        )


def _past(one: StretchEnded | MoveEnded) -> HistoryView:
    what = one.id, one.serial, one.session, one.kind, one.began_ns, one.ended_ns
    if isinstance(one, MoveEnded):
        return HistoryView(*what, one.bytes_moved, one.ok, one.hinted)
    return HistoryView(*what, 0, True, False)


def _going_on(sessions: Iterable[Record]) -> Iterator[HistoryView]:
    for one in sessions:
        if one.stretch is not None:
            yield _present(one, one.stretch_id, one.stretch, one.stretch_began_ns)
        op = one.op
        if op is not None and op.move_id:
            yield _present(one, op.move_id, MOVES[op.doing], op.started_ns, op.hinted)


def _present(
    one: Record, id_: int, kind: HistoryKind, began_ns: int, hinted: bool = False
) -> HistoryView:
    return HistoryView(id_, id_, one.id, kind, began_ns, None, 0, True, hinted)


def _serial(view: HistoryView) -> int:
    return view.serial
