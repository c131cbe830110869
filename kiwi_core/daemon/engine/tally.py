"""Count what happens on one GPU, for metrics servers.

``Tally`` is a fold over the scheduler's events and actions: it gets each event after the scheduler,
decides nothing, and has no clock. The counts of a restarted daemon begin at zero again, as metrics
servers expect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Notify, Operation, PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.model.accounts import MovedBytes
from kiwi_core.states import Notice, Residency
from kiwi_core.units import NS_PER_S, ns_to_seconds
from kiwi_core.wire.metrics import WAIT_BOUNDS_S, Histogram, MoveTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.sched.actions import Action
    from kiwi_core.states import Reason
    from kiwi_core.units import OpId, SessionId

OPERATIONS: Final[dict[type[Operation], str]] = {
    Suspend: "suspend",
    Resume: "resume",
    PageOut: "page-out",
    PageIn: "page-in",
}
_Outcome = (
    ev.Suspended | ev.Resumed | ev.PagedOut | ev.PagedIn
    | ev.SuspendRefused | ev.ResumeFailed | ev.PageOutRefused | ev.PageInRefused
    | ev.PageOutLost | ev.PageInLost
)  # fmt: skip
_STOPS: Final = frozenset({Notice.SUSPENDED, Notice.KEPT_OUT})
"""Notices to a burst that has the lease, when its turn ends."""

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


@dataclass(slots=True)
class _Burst:
    """A burst that was requested and has not ended. A session in a burst has one."""

    burst: int
    since_ns: int | None
    """When its wait began; ``None`` while it has the lease."""
    begun: bool = False
    """True if it had the lease before, and waits to go on."""
    stopping: bool = False


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
        self._bursts: dict[SessionId, _Burst] = {}
        self._kept_out: set[SessionId] = set()
        self._moved_bytes = MovedBytes()
        self._ops: dict[OpId, tuple[SessionId, str]] = {}
        """Operations that were ordered and have not reported, including overdue ones."""
        self._held_ns = 0
        self._session_held_ns = 0
        self._holders: Sequence[SessionId] = ()
        self._at_ns = 0

    def after(self, step: Step) -> None:
        self.take(step.event, step.actions, step.holders, step.now_ns)

    def take(
        self, event: ev.Event, actions: Sequence[Action], holders: Sequence[SessionId], now_ns: int
    ) -> None:
        """Count an event. ``holders`` have the lease now that the scheduler has taken ``event``."""
        if self._holders:
            elapsed_ns = now_ns - self._at_ns
            self._held_ns += elapsed_ns
            self._session_held_ns += elapsed_ns * len(self._holders)
        self._at_ns = now_ns
        self._holders = holders
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, now_ns)
        for action in actions:
            self._ordered(action, now_ns)

    def held_ns(self, now_ns: int) -> int:
        """Return how long any session has held the lease, until now."""
        return self._held_ns + (now_ns - self._at_ns if self._holders else 0)

    def session_held_ns(self, now_ns: int) -> int:
        """Return the sum of the times that each session has held the lease, until now."""
        return self._session_held_ns + (now_ns - self._at_ns) * len(self._holders)

    # --- actions --------------------------------------------------------------------------------

    def _ordered(self, action: Action, now_ns: int) -> None:
        if isinstance(action, Grant):
            self._granted(action, now_ns)
        elif isinstance(action, Notify):
            burst = self._bursts.get(action.session)
            if burst is not None and burst.since_ns is None and action.notice in _STOPS:
                burst.stopping = True
        elif isinstance(action, Operation):
            self._ops[action.op] = (action.session, OPERATIONS[type(action)])

    def _granted(self, grant: Grant, now_ns: int) -> None:
        burst = self._bursts.get(grant.session)
        if burst is None or burst.burst != grant.burst or burst.since_ns is None:
            return  # repeated to a client that came back
        if grant.session in self._holders:  # otherwise it only reports that memory is lost
            waits = self.resumption_waits if burst.begun else self.first_waits
            waits.add(now_ns - burst.since_ns)
        burst.since_ns, burst.begun = None, True

    # --- bursts ---------------------------------------------------------------------------------

    def _joined(self, event: ev.SessionJoined, now_ns: int) -> None:
        """Let a burst wait to go on if an earlier daemon stopped it midway."""
        if event.kept_out:
            self._kept_out.add(event.session)
        if event.mid_burst and event.residency is not Residency.LOST:
            self._bursts.setdefault(event.session, _Burst(event.burst, now_ns, begun=True))

    def _requested(self, event: ev.LeaseRequested, now_ns: int) -> None:
        known = self._bursts.get(event.session)
        if known is not None and known.burst >= event.burst:
            return  # requested again by a client that came back, or stale
        self._over(event.session)
        self._bursts[event.session] = _Burst(event.burst, now_ns)

    def _burst_over(self, event: ev.LeaseWithdrawn | ev.BurstEnded, _now_ns: int) -> None:
        known = self._bursts.get(event.session)
        if known is not None and known.burst == event.burst:
            self._over(event.session)

    def _lingers(self, event: ev.BurstLingered, _now_ns: int) -> None:
        known = self._bursts.get(event.session)
        if known is not None and known.burst == event.burst and not known.begun:
            self._over(event.session)  # it ended before it began

    def _session_over(self, event: ev.SessionLost | ev.SessionDetached, _now_ns: int) -> None:
        self._over(event.session)
        self._kept_out.discard(event.session)
        self._moved_bytes.forget(event.session)

    def _is_kept_out(self, event: ev.SuspensionRequested, _now_ns: int) -> None:
        self._kept_out.add(event.session)

    def _let_go(self, event: ev.ResumptionRequested, now_ns: int) -> None:
        """Restart the wait of its burst: it waits for its turn only from now on."""
        burst = self._bursts.get(event.session)
        if event.session in self._kept_out and burst is not None and burst.since_ns is not None:
            burst.since_ns = now_ns
        self._kept_out.discard(event.session)

    def _over(self, session: SessionId) -> None:
        burst = self._bursts.pop(session, None)
        if burst is not None and burst.since_ns is not None and not burst.begun:
            self.waits_given_up += 1

    # --- outcomes -------------------------------------------------------------------------------

    def _reported(self, event: _Outcome, now_ns: int) -> None:
        ordered = self._ops.pop(event.op, None)
        if ordered is None:
            return  # not ordered
        session, operation = ordered
        burst = self._bursts.get(session)
        if isinstance(event, (ev.PagedOut, ev.PagedIn)):
            moves = self.moved_out if isinstance(event, ev.PagedOut) else self.moved_in
            moves.add(self._moved_bytes.of(session, event), event.elapsed_ns)
        if isinstance(event, (ev.PageOutLost, ev.PageInLost)):
            self._contents_lost(event, burst, session)
        elif isinstance(event, (ev.Suspended, ev.PagedOut)):
            self._stopped(burst, now_ns)
        elif not isinstance(event, (ev.PagedIn, ev.Resumed)):
            self.refusals[operation, event.reason] += 1
            if burst is not None:
                burst.stopping = False  # it goes on

    def _stopped(self, burst: _Burst | None, now_ns: int) -> None:
        if burst is not None and burst.stopping:
            self.suspensions += 1
            burst.stopping = False
            burst.since_ns = now_ns

    def _contents_lost(
        self, event: ev.PageOutLost | ev.PageInLost, burst: _Burst | None, session: SessionId
    ) -> None:
        """End a burst that had begun. A burst that waits to begin learns of the loss by a grant."""
        if isinstance(event, ev.PageOutLost):
            self.lost_out += 1
        else:
            self.lost_in += 1
        if burst is not None and burst.begun:
            del self._bursts[session]

    def _late(self, event: ev.OperationOverdue, _now_ns: int) -> None:
        self.overdue += event.op in self._ops


_HANDLERS: Final[dict[type[ev.Event], Callable[..., None]]] = {
    ev.SessionJoined: Tally._joined,
    ev.SessionLost: Tally._session_over,
    ev.SessionDetached: Tally._session_over,
    ev.LeaseRequested: Tally._requested,
    ev.LeaseWithdrawn: Tally._burst_over,
    ev.BurstEnded: Tally._burst_over,
    ev.BurstLingered: Tally._lingers,
    ev.OperationOverdue: Tally._late,
    ev.SuspensionRequested: Tally._is_kept_out,
    ev.ResumptionRequested: Tally._let_go,
    **dict.fromkeys(get_args(_Outcome), Tally._reported),
}
