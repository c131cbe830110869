"""Count what happens on one GPU, for metrics servers.

``Tally`` is a fold over the scheduler's happenings: it decides nothing and has no clock. The counts
of a restarted daemon begin at zero again, as metrics servers expect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Tally:
    """A subscriber (``steps``); ``take`` is the same without a daemon."""

    first_waits: Waits = field(default_factory=Waits)
    resumption_waits: Waits = field(default_factory=Waits)
    waits_given_up: int = 0
    suspensions: int = 0
    moved_out: Moves = field(default_factory=Moves)
    moved_in: Moves = field(default_factory=Moves)
    refusals: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    lost_out: int = 0
    lost_in: int = 0
    overdue: int = 0
    _held_ns: int = 0
    _session_held_ns: int = 0
    _holders: int = 0
    _at_ns: int = 0
    """When the number of holders last changed."""

    def after(self, step: Step) -> None:
        self.take(step.happenings)

    def take(self, happenings: Iterable[Happening]) -> None:
        for happening in happenings:
            if isinstance(happening, StretchEnded):
                if happening.then is HistoryKind.HELD:
                    first = happening.kind is HistoryKind.WAITED
                    waits = self.first_waits if first else self.resumption_waits
                    waits.add(happening.ended_ns - happening.began_ns)
                    self._holders_change(1, happening.ended_ns)
                elif happening.kind is HistoryKind.HELD:
                    self.suspensions += happening.then is HistoryKind.SUSPENDED
                    self._holders_change(-1, happening.ended_ns)
                elif happening.kind is HistoryKind.WAITED and happening.then is None:
                    self.waits_given_up += 1
            elif isinstance(happening, MoveEnded):
                if happening.ok:
                    moves = self.moved_out if happening.kind is _OUT else self.moved_in
                    moves.add(happening.bytes_moved, happening.elapsed_ns)
            elif isinstance(happening, OperationFailed):
                outcome = happening.outcome
                if isinstance(outcome, _REFUSALS):
                    self.refusals[OPERATIONS[happening.doing], outcome.reason] += 1
                self.lost_out += isinstance(outcome, ev.PageOutLost)
                self.lost_in += isinstance(outcome, ev.PageInLost)
            elif isinstance(happening, OperationHung):
                self.overdue += 1

    def held_ns(self, now_ns: int) -> int:
        """Return how long any session has held the lease, until now."""
        return self._held_ns + (now_ns - self._at_ns if self._holders else 0)

    def session_held_ns(self, now_ns: int) -> int:
        """Return the sum of the times that each session has held the lease, until now."""
        return self._session_held_ns + (now_ns - self._at_ns) * self._holders

    def _holders_change(self, by: int, at_ns: int) -> None:
        self._held_ns = self.held_ns(at_ns)
        self._session_held_ns = self.session_held_ns(at_ns)
        self._holders += by
        self._at_ns = at_ns
