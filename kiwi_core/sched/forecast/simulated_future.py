"""Simulate one future: a copy of the scheduler runs ahead until the waiters are granted.

The copy decides by the same code; the events are guessed. A burst takes as long as one of the
session's earlier bursts that were longer than it has been so far. With some chance (always, if no
earlier burst was longer) it does not end by itself, and the policy ends its turn. Operations take
the time that the measured speed gives for their bytes. No new requests arrive.
"""

from __future__ import annotations

import heapq
from statistics import median_low
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Operation
from kiwi_core.sched.forecast.queue_tail import begins_ns
from kiwi_core.sched.forecast.state_copy import copy_of
from kiwi_core.sched.model.happenings import SessionForgotten
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import arrivals, observations, outcomes
from kiwi_core.sched.rules.settle import settle
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_MS, SessionId

if TYPE_CHECKING:
    from kiwi_core.sched.model.operations import OngoingOperation
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import PlaceKept, State

NEVER_NS: Final = 1 << 62

STEPS_MAX: Final = 100
"""Limit of events in one run: 2 ms. Eight waiters and their swaps take about 30."""

GOLDEN: Final = 0.6180339887498949
"""The golden ratio's fraction: its multiples are spread evenly over a circle."""

HOLD_NS: Final = 10 * NS_PER_MS
"""Time to suspend or resume a process, without moving anything."""

NEWCOMERS_MAX: Final = 16
"""Number of newcomers of which one run takes account. Each is a whole quantum: with more of them
nobody needs to know how much longer it takes."""

_NEWCOMERS: Final = tuple(SessionId(f"newcomer {n}") for n in range(NEWCOMERS_MAX))
"""No real session has these names: the daemon's ids have no spaces."""

_MOVES: Final = (Doing.PAGING_OUT, Doing.PAGING_IN)
_HANDLERS: Final = {**arrivals.HANDLERS, **outcomes.HANDLERS, **observations.HANDLERS}


def burst_ns(session: Session, attained_ns: int, chance: float) -> int:
    """Return the total length of a burst that has held the lease for ``attained_ns``: the quantile
    ``chance`` of the possible lengths. These are the longer known ones and ``NEVER_NS`` (longer
    than ever before), all equally likely."""
    longer = sorted(length_ns for length_ns in session.durations_ns if length_ns > attained_ns)
    number = int(chance * (len(longer) + 1))
    return longer[number] if number < len(longer) else NEVER_NS


class SimulatedFuture:
    """One future. ``chance`` is the quantile of each burst's length. With ``spread`` it applies to
    the first session only. The others get shifted quantiles, so that over several runs each session
    sees the whole range evenly."""

    def __init__(self, st: State, now_ns: int, chance: float, *, spread: bool) -> None:
        self._st = copied = copy_of(st)
        self._now_ns = self._began_ns = now_ns
        self.steps = 0
        """Number of events so far, which measures the run's cost."""
        self._reports: list[tuple[int, int, OngoingOperation, Session]] = []
        """Heap of the times when operations report, with the operation ids."""
        self._ends: list[tuple[int, SessionId, int]] = []
        """Heap of the times when runners' bursts end, with the time of the runner's grant."""
        self._free_at_ns: dict[Doing, int] = {}
        """When the bus is free for the next move, by direction."""
        self._lengths_ns: dict[SessionId, int] = {}
        self._chances: dict[SessionId, float] = {}
        """The quantile of each session's bursts and pauses."""
        step = GOLDEN if spread else 0.0
        for number, (id_, session) in enumerate(copied.sessions.items()):
            self._chances[id_] = (chance + number * step) % 1.0
            if session.counted_active_bytes:
                had_ns = session.attained_ns + session.run_ns(now_ns)
                self._lengths_ns[id_] = burst_ns(session, had_ns, self._chances[id_])
        for session in copied.cramped.values():
            # Its page-outs are refused: that of a runner is tried at the end of its turn.
            if session.want is not Want.RUNNING:
                session.try_not_before(NEVER_NS)
        for session in copied.ops.values():
            self._expect_report(session)
        for runner in copied.runners.values():
            self._expect_end(runner)
        if st.keeps is not None:
            self._expect_stay(copied.sessions[st.keeps.session.id], st.keeps)

    def waits_ns(self, grants_max: int, steps_max: int = STEPS_MAX) -> dict[SessionId, int]:
        """Return the waits of the first ``grants_max`` present waiters that are granted (or, if
        they only want to leave, are gone), in that order."""
        return self._play(set(self._st.queue), grants_max, steps_max)

    def newcomer_wait_ns(self, before: int) -> int | None:
        """Return the wait of a session of unknown needs, if it asked now, after ``before`` others
        like it. If that takes more than ``STEPS_MAX`` events, the turns that are left are added up.
        ``None``: the wait is not known.
        """
        newcomer, granted = _NEWCOMERS[before], False
        for one in _NEWCOMERS[: before + 1]:
            self._lengths_ns[one] = NEVER_NS
            self._feed(ev.SessionJoined(session=one))
            granted = one in self._feed(ev.LeaseRequested(session=one, burst=1))
        if granted:
            return 0
        found = self._play({newcomer}, 1, STEPS_MAX)
        if found or self.steps < STEPS_MAX:
            return found.get(newcomer)
        further_ns = begins_ns(self._st).get(newcomer)
        return None if further_ns is None else self._now_ns - self._began_ns + further_ns

    def _play(
        self, pending: set[SessionId], grants_max: int, steps_max: int
    ) -> dict[SessionId, int]:
        waits: dict[SessionId, int] = {}
        while pending and len(waits) < grants_max and self.steps < steps_max:
            event = self._next()
            if event is None:
                break
            self.steps += 1
            for session in self._feed(event):
                if session in pending:
                    pending.remove(session)
                    waits[session] = self._now_ns - self._began_ns
        return waits

    # --- time -----------------------------------------------------------------------------------

    def _next(self) -> ev.Event | None:
        """Return the next event and set the clock to its time; ``None``: there is none."""
        ends = self._ends
        while ends:  # those of turns that are over already: suspended, or ended otherwise
            runner = self._st.runners.get(ends[0][1])
            if runner is not None and runner.granted_ns == ends[0][2]:
                break
            heapq.heappop(ends)
        report_ns = self._reports[0][0] if self._reports else NEVER_NS
        end_ns = ends[0][0] if ends else NEVER_NS
        wake_ns = NEVER_NS if self._st.wake_ns is None else self._st.wake_ns
        at_ns = min(report_ns, end_ns, wake_ns)
        if at_ns >= NEVER_NS:
            return None
        self._now_ns = max(self._now_ns, at_ns)
        if at_ns == report_ns:
            _, _, op, session = heapq.heappop(self._reports)
            return _outcome(op, session, self._now_ns)
        if at_ns == end_ns:
            _, id_, _ = heapq.heappop(ends)
            return ev.BurstEnded(session=id_, burst=self._st.sessions[id_].burst)
        return ev.DeadlinePassed()

    def _expect_end(self, runner: Session) -> None:
        length_ns = self._lengths_ns[runner.id]
        if length_ns < NEVER_NS:
            ends_ns = max(self._now_ns, runner.granted_ns + length_ns - runner.attained_ns)
            heapq.heappush(self._ends, (ends_ns, runner.id, runner.granted_ns))

    def _expect_stay(self, session: Session, kept: PlaceKept) -> None:
        """Let ``session`` keep its place for the pauses and bursts to come, all in one: until one
        of its pauses is longer than its place is kept, or its tenancy ends."""
        if session.id in self._st.stays_ns:
            return
        began_ns = session.rested_ns or 0
        hold_ns = kept.until_ns - began_ns
        left = [pause_ns for pause_ns in session.pauses_ns if pause_ns > self._now_ns - began_ns]
        short = [pause_ns for pause_ns in left if pause_ns <= hold_ns]
        cell_ns = median_low(session.durations_ns) if session.durations_ns else 0
        at_ns, chance = began_ns, self._chances.get(session.id, 0.5)
        # Each further pause is short with the same probability: the number of cells is geometric.
        while short and at_ns < kept.ends_ns:
            returns = len(short) / (len(left) + 1)
            if chance >= returns:
                break
            chance /= returns
            at_ns += median_low(short) + cell_ns
            left = list(session.pauses_ns)
            short = [pause_ns for pause_ns in left if pause_ns <= hold_ns]
        self._st.foresee_stay(session, min(at_ns + hold_ns, kept.ends_ns))

    def _expect_report(self, session: Session) -> None:
        op = session.op
        if op is None or op.overdue:
            return  # it hangs: unknown
        took_ns = _cost_ns(self._st, session, op.doing)
        began_ns = op.started_ns
        if took_ns and op.doing in _MOVES:
            began_ns = max(began_ns, self._free_at_ns.get(op.doing, 0))
        ends_ns = max(self._now_ns, began_ns + took_ns)
        if op.doing in _MOVES:
            self._free_at_ns[op.doing] = ends_ns
        heapq.heappush(self._reports, (ends_ns, op.op, op, session))

    # --- the scheduler --------------------------------------------------------------------------

    def _feed(self, event: ev.Event) -> list[SessionId]:
        """Handle ``event`` and return the sessions that were granted, or are gone."""
        st = self._st
        actions = st.handle(self._now_ns)
        _HANDLERS[type(event)](st, event)
        if isinstance(event, ev.PageOutRefused):  # it is refused again, whenever it is tried
            for session in [s for s in st.cramped.values() if s.cramped_ns == self._now_ns]:
                session.try_not_before(NEVER_NS)
        settle(st)
        if st.keeps is not None:
            self._expect_stay(st.keeps.session, st.keeps)
        done = [one.session for one in st.history.happenings if isinstance(one, SessionForgotten)]
        for action in actions:
            if isinstance(action, Grant):
                self._expect_end(st.sessions[action.session])
                done.append(action.session)
            elif isinstance(action, Operation):
                self._expect_report(st.sessions[action.session])
        return done


def _cost_ns(st: State, session: Session, doing: Doing) -> int:
    if doing is Doing.PAGING_OUT:
        return st.speed.out_ns(session.resident_bytes)
    if doing is Doing.PAGING_IN:
        return st.speed.in_ns(session.footprint_bytes - session.resident_bytes)
    if doing is Doing.RESIDUE_IN:
        return st.speed.in_ns(session.taken_bytes)
    return HOLD_NS


def _outcome(op: OngoingOperation, session: Session, now_ns: int) -> ev.Event:
    elapsed_ns = now_ns - op.started_ns
    if op.doing is Doing.PAGING_OUT and session.cramped_ns >= 0:
        return ev.PageOutRefused(op=op.op, reason=Reason.NO_JOB_MEMORY)
    if op.doing is Doing.PAGING_OUT:
        moved_bytes = session.paged_out_bytes + session.resident_bytes
        return ev.PagedOut(op=op.op, moved_bytes=moved_bytes, elapsed_ns=elapsed_ns)
    if op.doing is Doing.PAGING_IN:
        moved_bytes = session.footprint_bytes - session.resident_bytes
        return ev.PagedIn(op=op.op, moved_bytes=moved_bytes, elapsed_ns=elapsed_ns)
    if op.doing is Doing.RESIDUE_IN:
        return ev.ResidueBack(op=op.op, moved_bytes=session.taken_bytes, elapsed_ns=elapsed_ns)
    return ev.Suspended(op=op.op) if op.doing is Doing.SUSPENDING else ev.Resumed(op=op.op)
