"""The cost of an event in the scheduler, by the number of sessions, for each policy.

    python benchmarks/bench_scheduler.py [--json FILE] [--quick]

There are two workloads: all sessions fit (request, grant, end, without contention), and no two fit
together (all wait, quanta end, memory moves; the driver does everything at once). The figure is the
median per event in the best of several passes: the others were disturbed.

The machine may be slow or busy, so the results also have the number of iterations of a loop that
adds numbers in the same time, timed in the same pass. It can be compared between machines.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from common import arguments, report, table, target

from kiwi_core.sched.actions import PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.events import (
    BurstEnded,
    DeadlinePassed,
    LeaseRequested,
    MemoryObserved,
    PagedIn,
    PagedOut,
    Resumed,
    SessionJoined,
    Suspended,
)
from kiwi_core.sched.policy import names
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.units import GIB, NS_PER_MS, NS_PER_S, TIB, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event

TARGETS_US: Final = {"all fit": 7.0, "none fits beside another": 15.0}
"""In the machine's quiet moments: in others compare the iterations of the loop."""
SESSIONS = (10, 30, 100, 300, 1000, 3000, 10_000)
TOTAL_BYTES = 80 * GIB
BIG_BYTES = 60 * GIB
LOOP: Final = 1000
BURSTS_BEFORE = 5
"""Bursts of each session before the measurement, after which even small needs are known."""


class Bench:
    """A benchmark that feeds events on a virtual clock and records the time of each."""

    def __init__(self, policy: str, sessions: int, resident_bytes: int) -> None:
        self.scheduler = Scheduler(TOTAL_BYTES, host_budget_bytes=10_000 * TIB, policy=policy)
        self.now_ns = 0
        self.took_ns: dict[str, list[int]] = {}
        self.ids = [SessionId(f"s{number}") for number in range(sessions)]
        self.bursts = dict.fromkeys(self.ids, 0)
        self.resident_bytes = dict.fromkeys(self.ids, 0)
        self.free_bytes = TOTAL_BYTES
        for session in self.ids:
            self.feed(SessionJoined(session=session))
        self.look()
        for session in self.ids:
            for _ in range(BURSTS_BEFORE):
                self.begin(session)
                self.hold(session, resident_bytes)
                self.end(session)
        self.took_ns.clear()

    def feed(self, event: Event, step_ns: int = NS_PER_MS) -> list[Action]:
        self.now_ns += step_ns
        began = time.perf_counter_ns()
        actions = self.scheduler.handle(event, self.now_ns)
        took = time.perf_counter_ns() - began
        self.took_ns.setdefault(type(event).__name__, []).append(took)
        for action in actions:
            self.answer(action)
        return actions

    def answer(self, action: Action) -> None:
        """Answer an action as a driver that does everything at once."""
        if isinstance(action, PageOut):
            moved = self.resident_bytes[action.session]
            self.move(action.session, -moved)
            self.feed(PagedOut(op=action.op, moved_bytes=moved, elapsed_ns=NS_PER_MS))
        elif isinstance(action, PageIn):
            moved = action.need_bytes
            self.move(action.session, moved)
            self.feed(PagedIn(op=action.op, moved_bytes=moved, elapsed_ns=NS_PER_MS))
        elif isinstance(action, Suspend):
            self.feed(Suspended(op=action.op))
        elif isinstance(action, Resume):
            self.feed(Resumed(op=action.op))

    def move(self, session: SessionId, more_bytes: int) -> None:
        self.resident_bytes[session] += more_bytes
        self.free_bytes -= more_bytes

    def hold(self, session: SessionId, size_bytes: int) -> None:
        self.move(session, size_bytes - self.resident_bytes[session])
        self.look(session)

    def look(self, *sessions: SessionId) -> None:
        resident = {session: self.resident_bytes[session] for session in sessions}
        self.feed(MemoryObserved(free_bytes=self.free_bytes, resident_bytes=resident))

    def begin(self, session: SessionId) -> None:
        self.bursts[session] += 1
        self.feed(LeaseRequested(session=session, burst=self.bursts[session]))

    def end(self, session: SessionId) -> None:
        self.feed(BurstEnded(session=session, burst=self.bursts[session]))


def parallel(policy: str, sessions: int) -> Callable[[int], Bench]:
    """Return a run where all sessions fit: request, grant, end, without contention."""
    bench = Bench(policy, sessions, TOTAL_BYTES // (2 * sessions) // 2)

    def run(cycles: int) -> Bench:
        for number in range(cycles):
            session = bench.ids[number % sessions]
            bench.begin(session)
            bench.end(session)
        return bench

    return run


def contended(policy: str, sessions: int) -> Callable[[int], Bench]:
    """Return a run where no two sessions fit together: all wait, quanta end, memory moves."""
    bench = Bench(policy, sessions, BIG_BYTES)
    for session in bench.ids:
        bench.begin(session)
    bench.took_ns.clear()

    def run(cycles: int) -> Bench:
        for number in range(cycles):
            bench.feed(DeadlinePassed(), step_ns=31 * NS_PER_S)
            holders = bench.scheduler.holders
            if number % 3 == 0 and holders:
                bench.end(holders[0])
                bench.begin(holders[0])
        return bench

    return run


WORKLOADS: Final = {"all fit": parallel, "none fits beside another": contended}


def loop_ns() -> float:
    """Return the time of an iteration of a loop that adds numbers."""
    began = time.perf_counter_ns()
    total = 0
    for number in range(LOOP):
        total += number
    return (time.perf_counter_ns() - began) / LOOP


def measure(run: Callable[[int], Bench], cycles: int, passes: int) -> dict[str, float]:
    """Return the pass with the smallest median."""
    found: list[dict[str, float]] = []
    for _ in range(passes):
        turn_ns = min(loop_ns() for _ in range(20))
        took = run(cycles).took_ns
        everything = sorted(one for kind in took.values() for one in kind)
        median_ns = statistics.median(everything)
        figures = {
            "median_us": median_ns / 1e3,
            "mean_us": statistics.fmean(everything) / 1e3,
            "p99_us": everything[len(everything) * 99 // 100] / 1e3,
            "loop_turns": median_ns / turn_ns,
            "loop_turn_ns": turn_ns,
            "events": float(len(everything)),
        }
        kinds = {kind: statistics.median(ones) / 1e3 for kind, ones in sorted(took.items())}
        found.append(figures | kinds)
        took.clear()
    return min(found, key=_median_us)


def _median_us(figures: dict[str, float]) -> float:
    return figures["median_us"]


def main() -> None:
    args = arguments(__doc__)
    sizes, cycles, passes = (SESSIONS[:3], 200, 2) if args.quick else (SESSIONS, 400, 5)
    gc.disable()
    curves: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for policy in names():
        curves[policy] = {}
        for name, make in WORKLOADS.items():
            curve = {n: measure(make(policy, n), cycles, passes) for n in sizes}
            curves[policy][name] = curve
            print(f"\n{policy}, {name}: µs per event, best of {passes} passes")
            columns = ("median_us", "mean_us", "p99_us", "loop_turns")
            rows = [[n, *(one[column] for column in columns)] for n, one in curve.items()]
            table(["sessions", "median", "mean", "p99", "turns of the loop"], rows)
    targets: list[dict[str, Any]] = [
        target(
            f"{policy}, {name}, {n} sessions, per event", one["median_us"], TARGETS_US[name], "µs"
        )
        for policy, workloads in curves.items()
        for name, curve in workloads.items()
        for n, one in curve.items()
    ]
    report("scheduler", {"targets": targets, "curves": curves}, args)


if __name__ == "__main__":
    main()
