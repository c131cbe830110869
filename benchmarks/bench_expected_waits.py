"""The accuracy of the waits that users are shown, in the simulator, and the cost of a forecast.

    python benchmarks/bench_expected_waits.py [--json FILE] [--quick] [--jobs N] [--hours H]
    python benchmarks/bench_expected_waits.py --cost [--json FILE]

Five mixes (docs/simulate.md), both policies, 5, 25 and 50 GB/s, pooled over held-out seeds: none of
these seeds was used to choose a constant (those are 6 to 9). The figure that a notebook is first
shown, at its request, is compared with its wait. It is right within max(2 s, 25 %) of the figure
or, if a range was shown, of the range, which is at most 2.5 × its low end + 5 s. Waits of a second
or less do not count. The results also have the figure alone ("expected"). Cells that were stopped
in the middle and wait to go on are counted apart: under the interactive policy later requests
overtake them, which cannot be foreseen. They are shown an upper bound, which holds if the wait was
no longer.

``--cost``: one forecast with all but one of 10, 50 and 200 sessions in the queue, in ms of
processor time; and how often a figure rose during a wait, if it is read each second.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, report, table, target

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant
from kiwi_core.sched.forecast.ranges import range_max_ns, tolerance_ns
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.sched.policy.registry import POLICIES
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.mixes import MIXES, generate
from kiwi_core.simulate.model import GB, Setup, SimulatedMachine
from kiwi_core.units import GIB, NS_PER_S, TIB, SessionId, ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.view import QueueView

FIRST_SEED = 1000
SPEEDS = (5.0, 25.0, 50.0)
SHARE_LIMIT = 0.85
DEFAULT_LIMITS = (("first", "right", 0.92), ("to go on", "holds", 0.95))
"""Shares that the default policy has to reach over all mixes and speeds."""
COST_LIMIT_MS = 1.0
COUNTS_NS = NS_PER_S


@dataclass
class Told:
    """The figures that a waiting session was first shown."""

    at_ns: int
    since_ns: int
    low_ns: int
    expected_ns: int
    high_ns: int
    goes_on: bool
    took_ns: int = -1

    def holds(self) -> bool:
        return self.took_ns <= self.high_ns

    def is_right(self) -> bool:
        slack_ns = tolerance_ns(self.took_ns)
        return self.low_ns - slack_ns <= self.took_ns <= self.high_ns + slack_ns

    def figure_is_right(self) -> bool:
        return abs(self.expected_ns - self.took_ns) <= tolerance_ns(self.took_ns)


class Watched(Simulation):
    """A simulation that makes a forecast whenever a session joins the queue, as the daemon does,
    and also every ``every_ns`` while any session waits."""

    every_ns = 0

    def begin(self) -> None:
        self.ended: list[Told] = []
        self.looks = self.rises = 0
        self._told: dict[SessionId, Told] = {}
        self._shown: dict[tuple[SessionId, int], int] = {}
        self._before_ns = 0
        super().begin()

    def _tell(self, event: ev.Event) -> None:
        if self.every_ns:
            self._look_on()
        super()._tell(event)
        queue = self.scheduler._st.queue  # a view after each event would cost more than the rest
        for session, told in tuple(self._told.items()):
            if session not in queue or queue[session].queued_ns != told.since_ns:
                del self._told[session]
                if session in self.scheduler.holders:
                    told.took_ns = self.now_ns - told.at_ns
                    self.ended.append(told)
        if any(session not in self._told for session in queue):
            self._note()

    def _note(self) -> None:
        for entry in self.scheduler.view(self.now_ns, ahead=True).queue:
            if entry.session in self._told or entry.expected_wait_ns is None:
                continue
            assert entry.expected_low_ns is not None
            assert entry.expected_high_ns is not None
            self._told[entry.session] = Told(
                self.now_ns, since_ns(entry, self.now_ns), entry.expected_low_ns,
                entry.expected_wait_ns, entry.expected_high_ns,
                self.scheduler._st.queue[entry.session].mid_burst,
            )  # fmt: skip

    def _look_on(self) -> None:
        """Record what people see while nothing happens."""
        while self._before_ns + self.every_ns < self.now_ns:
            self._before_ns += self.every_ns
            shown: dict[tuple[SessionId, int], int] = {}
            waiting = self.scheduler.waiting
            queue = self.scheduler.view(self._before_ns, ahead=True).queue if waiting else ()
            for entry in queue:
                if entry.expected_high_ns is not None:
                    key = entry.session, since_ns(entry, self._before_ns)
                    shown[key] = entry.expected_high_ns
                    self.looks += 1
                    self.rises += shown[key] > self._shown.get(key, shown[key])
            self._shown = shown


def since_ns(entry: QueueView, now_ns: int) -> int:
    return now_ns - entry.waited_ns


# --- how right ------------------------------------------------------------------------------------

Key = tuple[str, str, float]


def watched(key: Key, seed: int, hours: float, every_ns: int = 0) -> Watched:
    mix, policy, gbps = key
    machine = SimulatedMachine(out_bytes_per_s=gbps * GB, in_bytes_per_s=gbps * GB)
    trace = generate(mix, hours=hours, seed=seed)
    simulation = Watched(trace, machine, Setup(policy=policy), seed=seed)
    simulation.every_ns = every_ns
    simulation.run()
    return simulation


def waits_of(job: tuple[Key, int, float]) -> tuple[Key, list[Told]]:
    return job[0], watched(*job).ended


def steadiness(policy: str, hours: float) -> dict[str, Any]:
    """Return how often a figure rose, if it is read each second."""
    seen = watched(("6+1", policy, 25.0), FIRST_SEED, hours, every_ns=NS_PER_S)
    return {
        "policy": policy, "waits": len(seen.ended), "looks": seen.looks, "rises": seen.rises,
    }  # fmt: skip


def is_bound(key: Key, told: Told) -> bool:
    return told.goes_on and POLICIES[key[1]].overtakes


def summary(key: Key, kind: str, waits: list[Told]) -> dict[str, Any]:
    mix, policy, gbps = key
    ranges = [told for told in waits if told.high_ns > told.low_ns]
    loose = sorted(told.high_ns / told.took_ns for told in waits)
    widths_s = sorted(ns_to_seconds(told.high_ns - told.low_ns) for told in ranges)
    return {
        "mix": mix, "policy": policy, "gbps": gbps, "waits": kind, "n": len(waits),
        "right": _share(told.is_right() for told in waits),
        "holds": _share(told.holds() for told in waits),
        "bound_by_wait_p50": round(loose[len(loose) // 2], 2),
        "figure_right": _share(told.figure_is_right() for told in waits),
        "told_as_range": len(ranges) / max(1, len(waits)),
        "range_width_p50_s": widths_s[len(widths_s) // 2] if widths_s else 0.0,
        "too_short": _share(told.took_ns > told.high_ns and not told.is_right() for told in waits),
        "too_long": _share(told.took_ns < told.low_ns and not told.is_right() for told in waits),
        "wait_p50_s": ns_to_seconds(sorted(told.took_ns for told in waits)[len(waits) // 2]),
    }  # fmt: skip


def _share(cases: Iterable[bool]) -> float:
    every = list(cases)
    return round(sum(every) / max(1, len(every)), 4)


def accuracy(seeds: int, hours: float, jobs: int) -> list[dict[str, Any]]:
    keys = [(mix, policy, gbps) for mix in MIXES for policy in names() for gbps in SPEEDS]
    work = [(key, FIRST_SEED + n, hours) for key in keys for n in range(seeds)]
    pooled: dict[Key, list[Told]] = {key: [] for key in keys}
    with ProcessPoolExecutor(jobs) as pool:
        for done, (key, ended) in enumerate(pool.map(waits_of, work), start=1):
            pooled[key] += (told for told in ended if told.took_ns > COUNTS_NS)
            if sys.stderr.isatty():
                print(f"\rsimulated: {done} of {len(work)}", end="", file=sys.stderr)
    for key, told in ((key, told) for key, ended in pooled.items() for told in ended):
        assert is_bound(key, told) or told.high_ns <= range_max_ns(told.low_ns), "too wide"
    rows = []
    for key, ended in pooled.items():
        for kind, goes_on in (("first", False), ("to go on", True)):
            waits = [told for told in ended if told.goes_on is goes_on]
            if waits:
                rows.append(summary(key, kind, waits))
    return rows


# --- what it costs --------------------------------------------------------------------------------


def crowd(sessions: int, policy: str) -> tuple[Scheduler, int]:
    """Return a scheduler where all sessions but one wait; no two fit together, and the usual work
    of each is known."""
    scheduler = Scheduler(80 * GIB, host_budget_bytes=100 * TIB, policy=policy)
    ids = [SessionId(f"s{number}") for number in range(sessions)]
    now_ns, burst = 0, 0

    def feed(event: ev.Event, passed_ns: int = 0) -> None:
        nonlocal now_ns
        now_ns += passed_ns
        for action in scheduler.handle(event, now_ns):
            if type(action).__name__ == "PageOut":
                feed(ev.PagedOut(op=action.op, moved_bytes=60 * GIB, elapsed_ns=3 * NS_PER_S))
            elif type(action).__name__ == "PageIn":
                feed(ev.PagedIn(op=action.op, moved_bytes=60 * GIB, elapsed_ns=3 * NS_PER_S))
            else:
                assert isinstance(action, Grant) or type(action).__name__ == "Notify"

    for session in ids:
        feed(ev.SessionJoined(session=session))
    feed(ev.MemoryObserved(free_bytes=80 * GIB))
    for burst in range(1, 6):
        for number, session in enumerate(ids):
            feed(ev.LeaseRequested(session=session, burst=burst))
            seen = ev.MemoryObserved(free_bytes=20 * GIB, resident_bytes={session: 60 * GIB})
            feed(seen, (2 + number % 9) * NS_PER_S)
            feed(ev.BurstEnded(session=session, burst=burst))
    for session in ids:
        feed(ev.LeaseRequested(session=session, burst=burst + 1), NS_PER_S // 100)
    return scheduler, now_ns


def cost(looks: int) -> list[dict[str, Any]]:
    """Return processor times; each forecast comes so long after the previous one that none is
    cached."""
    rows = []
    for policy in names():
        for sessions in (10, 50, 200):
            scheduler, now_ns = crowd(sessions, policy)
            samples = Samples()
            for number in range(looks + 5):
                at_ns = now_ns + number * NS_PER_S // 3
                began_ns = time.thread_time_ns()
                scheduler._forecast.look(scheduler._st, at_ns)
                if number >= 5:
                    samples.add(time.thread_time_ns() - began_ns)
            found = samples.summary()
            rows.append({"policy": policy, "sessions": sessions, "looks": looks} | {
                name: round(found[f"{name}_us"] / 1e3, 3)
                for name in ("median", "p25", "p75", "p99")
            })  # fmt: skip
    return rows


def report_cost(args: Any, looks: int, hours: float) -> None:
    costs = cost(looks)
    figures = ("median", "p25", "p75", "p99")
    print("one look, in milliseconds")
    table(
        ["", *figures],
        [[f"{c['policy']}, {c['sessions']} sessions", *(c[n] for n in figures)] for c in costs],
    )
    steady = [steadiness(policy, hours) for policy in names()]
    for s in steady:
        print(
            f"{s['policy']}: figures rose {s['rises']} times in {s['looks']} looks, a second apart"
        )
    targets = [
        target(
            f"a look at {c['sessions']} sessions, {c['policy']}", c["median"], COST_LIMIT_MS, "ms"
        )
        for c in costs
        if c["sessions"] <= 50
    ]
    results = {"cost_ms": costs, "steady": steady, "steady_hours": hours, "targets": targets}
    report("expected_waits_cost", results, args)


def report_accuracy(args: Any, seeds: int, hours: float) -> None:
    rows = accuracy(seeds, hours, args.jobs)
    print(f"share of waits over 1 s that were foretold right, {seeds} seeds of {hours:g} h")
    table(
        ["", "n", "right", "holds", "bound/wait p50", "figure alone", "told as range",
         "width p50", "too short", "too long"],
        [[f"{r['mix']}, {r['policy']}, {r['gbps']:g} GB/s, {r['waits']}", r["n"], r["right"],
          r["holds"], r["bound_by_wait_p50"], r["figure_right"],
          r["told_as_range"], r["range_width_p50_s"], r["too_short"], r["too_long"]] for r in rows],
    )  # fmt: skip
    targets = [
        target(
            f"not right: {r['mix']}, {r['policy']}, {r['gbps']:g} GB/s",
            1 - r["right"], 1 - SHARE_LIMIT, "of the waits",
        )
        for r in rows
        if r["waits"] == "first"
    ]  # fmt: skip
    for kind, figure, limit in DEFAULT_LIMITS:
        of_default = [r for r in rows if r["policy"] == DEFAULT and r["waits"] == kind]
        share = sum(r[figure] * r["n"] for r in of_default) / sum(r["n"] for r in of_default)
        name = f"not so: {DEFAULT}, {kind}, {figure}"
        targets.append(target(name, 1 - share, 1 - limit, "of the waits"))
    seed_list = list(range(FIRST_SEED, FIRST_SEED + seeds))
    results = {"seeds": seed_list, "hours": hours, "rows": rows, "targets": targets}
    report("expected_waits", results, args)


def main() -> None:
    args = arguments(
        __doc__,
        lambda p: p.add_argument(
            "--cost", action="store_true", help="what a look costs, and rises"
        ),
        lambda p: p.add_argument("--seeds", type=int, default=6, metavar="N", help="default: 6"),
        lambda p: p.add_argument(
            "--hours", type=float, default=2.0, metavar="H", help="default: 2"
        ),
        lambda p: p.add_argument("--jobs", type=int, default=1, metavar="N", help="default: 1"),
    )
    seeds, hours = (1, 0.3) if args.quick else (args.seeds, args.hours)
    if args.cost:
        report_cost(args, 20 if args.quick else 200, hours)
    else:
        report_accuracy(args, seeds, hours)


if __name__ == "__main__":
    main()
