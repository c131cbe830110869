"""Count what happens on one GPU, for metrics servers.

``Tally`` is a fold over the scheduler's happenings: it decides nothing and has no clock. The counts
of a restarted daemon begin at zero again, as metrics servers expect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.happenings import MoveEnded, OperationFailed, OperationHung, StretchEnded
from kiwi_core.sched.model.operations import Doing
from kiwi_core.states import HistoryKind
from kiwi_core.units import NS_PER_S, ns_to_seconds
from kiwi_core.wire.metrics import WAIT_BOUNDS_S, Histogram, MoveTotals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.sched.model.happenings import Happening
    from kiwi_core.states import Reason

OPERATIONS: Final = {
    Doing.SUSPENDING: "suspend",
    Doing.RESUMING: "resume",
    Doing.PAGING_OUT: "page-out",
    Doing.PAGING_IN: "page-in",
    Doing.RESIDUE_IN: "residue-in",
}

_REFUSALS: Final = (
    ev.SuspendRefused, ev.ResumeFailed, ev.PageOutRefused, ev.PageInRefused, ev.ResidueRefused,
)  # fmt: skip
_OUT: Final = HistoryKind.OUT
_BOUNDS_NS: Final = [round(bound_s * NS_PER_S) for bound_s in WAIT_BOUNDS_S]


class Waits:
    """A histogram of durations."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, wait_ns: int) -> None:
        self._counts[bisect_left(_BOUNDS_NS, wait_ns)] += 1
        self.sum_ns += wait_ns

    def histogram(self) -> Histogram:
        return Histogram(
            bounds=list(WAIT_BOUNDS_S), counts=list(self._counts), sum=ns_to_seconds(self.sum_ns)
        )


@dataclass(slots=True)
class Moves:
    """Moves of memory in one direction that succeeded."""

    moves: int = 0
    bytes_moved: int = 0
    elapsed_ns: int = 0
    last_bytes_per_s: float | None = None

    def add(self, moved_bytes: int, elapsed_ns: int) -> None:
        self.moves += 1
        self.bytes_moved += moved_bytes
        self.elapsed_ns += elapsed_ns
        if moved_bytes and elapsed_ns:
            self.last_bytes_per_s = moved_bytes * NS_PER_S / elapsed_ns

    def totals(self) -> MoveTotals:
        return MoveTotals(
            moves=self.moves,
            bytes_moved=float(self.bytes_moved),
            seconds=ns_to_seconds(self.elapsed_ns),
            last_bytes_per_s=self.last_bytes_per_s,
        )


class Tally:
    """A subscriber (``steps``); ``take`` is the same without a daemon."""

    def __init__(self) -> None:
        self.first_waits = Waits()
        self.resumption_waits = Waits()
        self.waits_given_up = 0
        self.suspensions = 0
        self.moved_out = Moves()
        self.moved_in = Moves()
        self.refusals: Counter[tuple[str, Reason]] = Counter()
        self.lost_out = 0
        self.lost_in = 0
        self.overdue = 0
        self._held_ns = 0
        self._session_held_ns = 0
        self._holders = 0
        self._at_ns = 0
        """When the number of holders last changed."""

    def after(self, step: Step) -> None:
        self.take(step.happenings)

    def take(self, happenings: Iterable[Happening]) -> None:
        for happening in happenings:
            if isinstance(happening, StretchEnded):
                self._ended(happening)
            elif isinstance(happening, MoveEnded):
                if happening.ok:
                    moves = self.moved_out if happening.kind is _OUT else self.moved_in
                    moves.add(happening.bytes_moved, happening.elapsed_ns)
            elif isinstance(happening, OperationFailed):
                self._failed(happening)
            elif isinstance(happening, OperationHung):
                self.overdue += 1

    def held_ns(self, now_ns: int) -> int:
        """Return how long any session has held the lease, until now."""
        return self._held_ns + (now_ns - self._at_ns if self._holders else 0)

    def session_held_ns(self, now_ns: int) -> int:
        """Return the sum of the times that each session has held the lease, until now."""
        return self._session_held_ns + (now_ns - self._at_ns) * self._holders

    def _ended(self, ended: StretchEnded) -> None:
        if ended.then is HistoryKind.HELD:
            waits = self.first_waits if ended.kind is HistoryKind.WAITED else self.resumption_waits
            waits.add(ended.ended_ns - ended.began_ns)
            self._holders_change(1, ended.ended_ns)
        elif ended.kind is HistoryKind.HELD:
            self.suspensions += ended.then is HistoryKind.SUSPENDED
            self._holders_change(-1, ended.ended_ns)
        elif ended.kind is HistoryKind.WAITED and ended.then is None:
            self.waits_given_up += 1

    def _holders_change(self, by: int, at_ns: int) -> None:
        self._held_ns = self.held_ns(at_ns)
        self._session_held_ns = self.session_held_ns(at_ns)
        self._holders += by
        self._at_ns = at_ns

    def _failed(self, failure: OperationFailed) -> None:
        outcome = failure.outcome
        if isinstance(outcome, _REFUSALS):
            self.refusals[OPERATIONS[failure.doing], outcome.reason] += 1
        self.lost_out += isinstance(outcome, ev.PageOutLost)
        self.lost_in += isinstance(outcome, ev.PageInLost)
