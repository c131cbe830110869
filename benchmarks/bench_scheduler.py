"""What one event costs in the scheduler, in microseconds, against a bare call in the same run.

    python benchmarks/bench_scheduler.py [--json FILE]

Three workloads, each many times over; the figure is the median per event. ``baseline`` is a
handler that does nothing but look up the event's type and return an empty list.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

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
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.units import GIB, NS_PER_MS, NS_PER_S, TIB, SessionId

if TYPE_CHECKING:
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event

TARGET_US = 10.0
TOTAL_BYTES = 80 * GIB


class Bench:
    """Feeds events on a virtual clock and keeps how long each took."""

    def __init__(self, sessions: int, resident_bytes: int) -> None:
        self.scheduler = Scheduler(TOTAL_BYTES, host_budget_bytes=100 * TIB)
        self.now_ns = 0
        self.took_ns: dict[str, list[int]] = {}
        self.ids = [SessionId(f"s{number}") for number in range(sessions)]
        self.bursts = dict.fromkeys(self.ids, 0)
        for session in self.ids:
            self.feed(SessionJoined(session=session))
        for _ in range(5):  # so many bursts each that even small needs are known and settled
            for session in self.ids:
                self.begin(session)
                self.observe({session: resident_bytes})
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
        """A driver that does everything at once."""
        if isinstance(action, PageOut):
            self.feed(PagedOut(op=action.op, moved_bytes=GIB, elapsed_ns=NS_PER_MS))
        elif isinstance(action, PageIn):
            moved = action.need_bytes
            self.feed(PagedIn(op=action.op, moved_bytes=moved, elapsed_ns=NS_PER_MS))
        elif isinstance(action, Suspend):
            self.feed(Suspended(op=action.op))
        elif isinstance(action, Resume):
            self.feed(Resumed(op=action.op))

    def begin(self, session: SessionId) -> None:
        self.bursts[session] += 1
        self.feed(LeaseRequested(session=session, burst=self.bursts[session]))

    def end(self, session: SessionId) -> None:
        self.feed(BurstEnded(session=session, burst=self.bursts[session]))

    def observe(self, resident: dict[SessionId, int]) -> None:
        view = self.scheduler.view(self.now_ns)
        known = {s.id: s.resident_bytes for s in view.sessions} | resident
        self.feed(
            MemoryObserved(free_bytes=TOTAL_BYTES - sum(known.values()), resident_bytes=resident)
        )

    def result(self) -> dict[str, float]:
        everything = [took for kind in self.took_ns.values() for took in kind]
        figures = {kind: statistics.median(took) / 1e3 for kind, took in self.took_ns.items()}
        figures["every event"] = statistics.median(everything) / 1e3
        figures["p99"] = sorted(everything)[len(everything) * 99 // 100] / 1e3
        figures["events"] = float(len(everything))
        return figures


def parallel(sessions: int, cycles: int) -> dict[str, float]:
    """All fit: request, grant, end; nobody in the way."""
    bench = Bench(sessions, TOTAL_BYTES // (2 * sessions) // 2)
    for number in range(cycles):
        session = bench.ids[number % sessions]
        bench.begin(session)
        bench.end(session)
    return bench.result()


def contended(sessions: int, cycles: int) -> dict[str, float]:
    """Nobody fits beside another: everybody waits, quanta end, memory moves."""
    bench = Bench(sessions, 60 * GIB)
    for session in bench.ids:
        bench.begin(session)
    for number in range(cycles):
        bench.feed(DeadlinePassed(), step_ns=31 * NS_PER_S)
        holder = bench.scheduler.view(bench.now_ns).holders
        if number % 3 == 0 and holder:
            bench.end(holder[0])
            bench.begin(holder[0])
    return bench.result()


def baseline(events: int) -> float:
    """The least that any handler costs: a look-up and an empty list."""
    handlers = {DeadlinePassed: lambda _event: []}
    event = DeadlinePassed()
    took = []
    for _ in range(events):
        began = time.perf_counter_ns()
        handlers[type(event)](event)
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--cycles", type=int, default=5000)
    options = parser.parse_args()
    gc.disable()
    bare_us = baseline(20_000)
    workloads = {
        "10 sessions, all fit": parallel(10, options.cycles),
        "10 sessions, none fits beside another": contended(10, options.cycles // 5),
        "1,000 sessions, all fit": parallel(1000, options.cycles),
        "1,000 sessions, none fits beside another": contended(1000, options.cycles // 50),
    }
    print(f"bare call {bare_us:.2f} µs; target {TARGET_US:.0f} µs per event")
    for name, figures in workloads.items():
        median = figures["every event"]
        verdict = "ok" if median <= TARGET_US else "over the target"
        print(f"{name}: {median:.2f} µs ({median / bare_us:.0f} × bare), {verdict}")
        for kind, us in figures.items():
            print(f"    {kind:16} {us:10.2f}")
    if options.json:
        record = {
            "what": "scheduler, µs per event (median)",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "target_us": TARGET_US,
            "bare_us": bare_us,
            "workloads": workloads,
        }
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
