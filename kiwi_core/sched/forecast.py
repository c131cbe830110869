"""When everybody in the queue will probably be granted: a copy of the scheduler runs ahead.

The copy decides by the same code; what the world would do is guessed: a burst takes as long as this
session's bursts that took longer than it has by now, operations take what their bytes take at the
measured speed, and nobody new comes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import arrivals, observations, outcomes
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Notify
from kiwi_core.sched.history import History
from kiwi_core.sched.session import Doing, Running, Session
from kiwi_core.sched.settle import settle
from kiwi_core.sched.story import Stories
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.state import State
    from kiwi_core.units import SessionId

STEPS_MAX: Final = 400
"""Events that the copy goes through at most, some 15 ms; fifty waiters and their swaps take 200."""

RUNS: Final = 5
"""Of which the middle one is told. With nine a few more waits are right, at twice the cost."""

RUNS_MAX: Final = 50
"""Waiters times runs: the longer the queue, the less it matters whose burst is how long."""

GOLDEN: Final = 0.6180339887498949
"""Its multiples are spread evenly over a circle."""

UNKNOWN_BURST_NS: Final = 10 * NS_PER_S
"""A first burst, of which nothing is known: the median of measured notebook cells is below that."""

HOLD_NS: Final = 10 * NS_PER_MS
"""To hold a process, or to let it go, without moving anything."""

KEPT_NS: Final = 250 * NS_PER_MS
"""People do not see more than a few numbers a second."""

CHECKED: Final = 100
"""Waits of which is known how well they were foretold: an afternoon's."""

_HANDLERS: Final = {**arrivals.HANDLERS, **outcomes.HANDLERS, **observations.HANDLERS}


def burst_ns(session: Session, attained_ns: int, chance: float) -> int:
    """How long its burst will have held the lease in all, when it has for ``attained_ns``: with
    ``chance`` not longer than that."""
    longer = sorted(length_ns for length_ns in session.durations_ns if length_ns > attained_ns)
    if longer:
        return longer[int(chance * len(longer))]
    # Longer than ever: as often as not such a one takes as long again; a first one is anything.
    return round(max(attained_ns / (1.0 - chance), UNKNOWN_BURST_NS * chance / (1.0 - chance)))


@dataclass(frozen=True)
class Wait:
    """From now on, nanoseconds: as long as it takes in the middle one of the runs, and in the
    shortest and the longest one."""

    expected_ns: int
    low_ns: int
    high_ns: int

    def later(self, passed_ns: int) -> Wait:
        """The same, looked at so much later."""
        left = (max(0, ns - passed_ns) for ns in (self.expected_ns, self.low_ns, self.high_ns))
        return Wait(*left)


def waits(st: State, now_ns: int) -> dict[SessionId, Wait]:
    """Until the lease (or, of one that leaves, until its memory is back). Those that are not in it
    wait for something else than their turn, or too far down the queue. ``st`` is not changed."""
    runs = max(1, min(RUNS, RUNS_MAX // max(1, len(st.queue))))
    outcomes_ns: dict[SessionId, list[int]] = {}
    for number in range(runs):
        ahead = Run(st, now_ns, (number + 0.5) / runs)
        for session, wait_ns in ahead.until_all_are_granted(STEPS_MAX).items():
            outcomes_ns.setdefault(session, []).append(wait_ns)
    return {session: _middle(sorted(every)) for session, every in outcomes_ns.items()}


def _middle(every_ns: list[int]) -> Wait:
    return Wait(every_ns[len(every_ns) // 2], every_ns[0], every_ns[-1])


class Run:
    """``chance``: of the first burst; those of the others follow from it, so that over all runs
    each has all chances evenly, and no two always the same."""

    def __init__(self, st: State, now_ns: int, chance: float) -> None:
        self._st, clones = copy_of(st)
        self._now_ns = self._began_ns = now_ns
        self._reports: list[tuple[int, int, Running, Session]] = []
        """When operations report; by time and operation id."""
        self._ends: list[tuple[int, SessionId, int]] = []
        """When runners are through, with the time of the grant that this is about."""
        self._lengths_ns = {
            id_: burst_ns(
                clone, clone.attained_ns + clone.run_ns(now_ns), (chance + number * GOLDEN) % 1.0
            )
            for number, (id_, clone) in enumerate(clones.items())
            if clone.counted_active_bytes
        }
        self._free_at_ns = dict.fromkeys(Doing, now_ns)
        """When the bus is free for the next move in that direction."""
        self._waits_ns: dict[SessionId, int] = {}
        for session in self._st.ops.values():
            self._expect_report(session)
        for runner in self._st.runners.values():
            self._expect_end(runner)

    def until_all_are_granted(self, steps_max: int) -> dict[SessionId, int]:
        pending = set(self._st.queue)
        for _ in range(steps_max):
            event = self._next()
            if event is None or not pending:
                break
            for session in self._feed(event):
                if session in pending:
                    pending.remove(session)
                    self._waits_ns[session] = self._now_ns - self._began_ns
        return self._waits_ns

    # --- time -----------------------------------------------------------------------------------

    def _next(self) -> ev.Event | None:
        """What happens next, and makes it that time; ``None``: nothing will."""
        while self._ends and self._is_stale(*self._ends[0]):
            heapq.heappop(self._ends)
        report_ns = self._reports[0][0] if self._reports else None
        end_ns = self._ends[0][0] if self._ends else None
        wake_ns = self._st.wake_ns
        at_ns = min((at for at in (report_ns, end_ns, wake_ns) if at is not None), default=None)
        if at_ns is None:
            return None
        self._now_ns = max(self._now_ns, at_ns)
        if at_ns == report_ns:
            _, _, op, session = heapq.heappop(self._reports)
            return _outcome(op, session, self._now_ns)
        if at_ns == end_ns:
            _, id_, _ = heapq.heappop(self._ends)
            return ev.BurstEnded(session=id_, burst=self._st.sessions[id_].burst)
        return ev.DeadlinePassed()

    def _is_stale(self, _at_ns: int, id_: SessionId, granted_ns: int) -> bool:
        """It was stopped, or ended otherwise, meanwhile."""
        runner = self._st.runners.get(id_)
        return runner is None or runner.granted_ns != granted_ns

    def _expect_end(self, runner: Session) -> None:
        left_ns = self._lengths_ns[runner.id] - runner.attained_ns
        ends_ns = max(self._now_ns, runner.granted_ns + left_ns)
        heapq.heappush(self._ends, (ends_ns, runner.id, runner.granted_ns))

    def _expect_report(self, session: Session) -> None:
        op = session.op
        assert op is not None
        if op.overdue:
            return  # it hangs: nobody knows
        took_ns = _cost_ns(self._st, session, op.doing)
        began_ns = op.started_ns
        if op.doing in (Doing.PAGING_OUT, Doing.PAGING_IN):
            began_ns = max(began_ns, self._free_at_ns[op.doing] if took_ns else began_ns)
        ends_ns = max(self._now_ns, began_ns + took_ns)
        self._free_at_ns[op.doing] = ends_ns
        heapq.heappush(self._reports, (ends_ns, op.op, op, session))

    # --- the scheduler --------------------------------------------------------------------------

    def _feed(self, event: ev.Event) -> list[SessionId]:
        """Those that were granted, or are gone."""
        st, before = self._st, len(self._st.departed)
        st.now_ns = self._now_ns
        st.actions = []
        _HANDLERS[type(event)](st, event)
        settle(st)
        done = [id_ for id_, _ in list(st.departed)[before:]]
        for action in st.actions:
            if isinstance(action, Grant):
                self._expect_end(st.sessions[action.session])
                done.append(action.session)
            elif not isinstance(action, Notify):
                self._expect_report(st.sessions[action.session])
        return done


def _cost_ns(st: State, session: Session, doing: Doing) -> int:
    if doing is Doing.PAGING_OUT:
        return st.speed.out_ns(session.resident_bytes)
    if doing is Doing.PAGING_IN:
        return st.speed.in_ns(session.footprint_bytes - session.resident_bytes)
    return HOLD_NS


def _outcome(op: Running, session: Session, now_ns: int) -> ev.Event:
    if op.doing is Doing.PAGING_OUT:
        elapsed_ns = now_ns - op.started_ns
        return ev.PagedOut(op=op.op, moved_bytes=session.resident_bytes, elapsed_ns=elapsed_ns)
    if op.doing is Doing.PAGING_IN:
        moved_bytes = session.footprint_bytes - session.resident_bytes
        return ev.PagedIn(op=op.op, moved_bytes=moved_bytes, elapsed_ns=now_ns - op.started_ns)
    return ev.Suspended(op=op.op) if op.doing is Doing.SUSPENDING else ev.Resumed(op=op.op)


# --- the copy -------------------------------------------------------------------------------------


class _NoStories(Stories):
    """Nobody will read them."""

    def add(self, session: SessionId, at_ns: int, template: str, *arguments: object) -> None:
        pass

    def end(self, session: SessionId) -> None:
        pass


def copy_of(st: State) -> tuple[State, dict[SessionId, Session]]:
    """Shares nothing with ``st`` that can change, but for what no decision is made by: stories and
    history are empty."""
    clones = {id_: _clone(session) for id_, session in st.sessions.items()}
    copied = copy(st)
    copied.sessions = clones
    copied.queue = OrderedDict((id_, clones[id_]) for id_ in st.queue)
    copied.idle = OrderedDict((id_, clones[id_]) for id_ in st.idle)
    for name in ("chosen", "runners", "waiting_in", "astray", "lingerers"):
        setattr(copied, name, {id_: clones[id_] for id_ in getattr(st, name)})
    copied.ops = {op: clones[session.id] for op, session in st.ops.items()}
    copied.hinted = clones[st.hinted.id] if st.hinted is not None else None
    memo = {id(session): clones[id_] for id_, session in st.sessions.items()}
    vars(copied).update(
        policy=deepcopy(st.policy, memo),  # its own tables, with the clones in them
        usage=copy(st.usage),
        speed=deepcopy(st.speed),
        stories=_NoStories(0),
        history=History(0, 0),
        swaps=deque(maxlen=0),
        departed=deque(),
    )
    return copied, clones


def _clone(session: Session) -> Session:
    clone = copy(session)
    clone.peaks_bytes = session.peaks_bytes.copy()
    clone.durations_ns = session.durations_ns.copy()
    if session.op is not None:
        clone.op = copy(session.op)
    return clone


# --- what was told, and what came -----------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """What a waiter was told first."""

    queued_ns: int
    at_ns: int
    expected_ns: int


class Outlook:
    """Keeps a forecast for a moment, since many look at the same time, and how good they were."""

    def __init__(self) -> None:
        self._at_ns = 0
        self._serial = -1
        self._waits: dict[SessionId, Wait] = {}
        self._promises: dict[SessionId, Promise] = {}
        self.kept: deque[tuple[int, int]] = deque(maxlen=CHECKED)
        """What was told at first and how long it took then, of the last waits."""

    def waits(self, st: State, now_ns: int) -> dict[SessionId, Wait]:
        """Like ``waits``; but where nobody came, went or was granted since, hardly any older than
        ``KEPT_NS``."""
        self._settle(st)
        passed_ns = now_ns - self._at_ns
        if self._serial == st.history.serial and 0 <= passed_ns < KEPT_NS:
            return {id_: wait.later(passed_ns) for id_, wait in self._waits.items()}
        self._waits = waits(st, now_ns) if st.queue else {}
        self._at_ns, self._serial = now_ns, st.history.serial
        for id_, wait in self._waits.items():
            queued_ns = st.queue[id_].queued_ns
            if id_ not in self._promises and not st.queue[id_].leaving:
                self._promises[id_] = Promise(queued_ns, now_ns, wait.expected_ns)
        return self._waits

    def right(self) -> int:
        """How many of ``kept`` came within two seconds or a quarter of what was told."""
        return sum(_is_right(expected_ns, took_ns) for expected_ns, took_ns in self.kept)

    def _settle(self, st: State) -> None:
        """Compare what was told with what came, of those that do not wait for it any more."""
        for id_, promise in tuple(self._promises.items()):
            waiter = st.queue.get(id_)
            if waiter is not None and waiter.queued_ns == promise.queued_ns:
                continue
            del self._promises[id_]
            session = st.sessions.get(id_)
            if session is None or session.granted_ns < promise.at_ns:
                continue  # it gave up, or is gone
            took_ns = session.granted_ns - promise.at_ns
            if max(took_ns, promise.expected_ns) >= NS_PER_S:
                self.kept.append((promise.expected_ns, took_ns))


def _is_right(expected_ns: int, took_ns: int) -> bool:
    return abs(expected_ns - took_ns) <= max(2 * NS_PER_S, took_ns // 4)
