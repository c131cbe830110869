"""The scheduler's cost per event by the number of sessions, and the time of simulated days.

    python benchmarks/bench_simulate.py [--json FILE] [--quick]

The curve is measured with sessions that do not fit together and all want the GPU (the mix
``heavy``), in the simulator, so with all events that a daemon would feed, in their proportions.
Only the calls of ``Scheduler.handle`` are timed, after all sessions have joined and had a first
turn; the results are means of processor time, for all events and for each kind of event.
"""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from common import arguments, report, table, target
from msgspec.structs import replace

from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.mixes import MIXES, generate
from kiwi_core.simulate.model import Setup, SimulatedMachine
from kiwi_core.simulate.policies import NAMES
from kiwi_core.units import NS_PER_S, TIB

if TYPE_CHECKING:
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event

TARGET_US = 10.0
SESSIONS = (10, 30, 100, 300, 1000, 3000)


class Timed(Simulation):
    """A simulation that records the time of each call of the scheduler."""

    def prepare(self) -> None:
        self.took_ns: dict[str, list[int]] = defaultdict(list)
        handle = self.scheduler.handle

        def timed(event: Event, now_ns: int) -> list[Action]:
            began_ns = time.thread_time_ns()  # without the time that other processes take
            actions = handle(event, now_ns)
            self.took_ns[type(event).__name__].append(time.thread_time_ns() - began_ns)
            return actions

        self.scheduler.handle = timed  # type: ignore[method-assign]

    def run_some(self, warm_up_ns: int, events: int) -> None:
        """Run ``events`` events; all sessions join at once, and times count from ``warm_up_ns``
        on."""
        self.begin()
        while self.now_ns < warm_up_ns:
            self.step()
        self.took_ns.clear()
        until = self.measures.events + events
        while self.measures.events < until:
            self.step()


def curve(policy: str, sessions: int, events: int) -> dict[str, float]:
    work = generate("heavy", hours=3.0, sessions=sessions, seed=1)
    at_once = tuple(replace(session, starts_ns=0) for session in work.sessions)
    machine = SimulatedMachine(host_budget_bytes=1000 * TIB)
    setup = Setup(policy=policy, tq_ns=2 * NS_PER_S)
    simulation = Timed(replace(work, sessions=at_once), machine, setup)
    simulation.prepare()
    gc.disable()
    simulation.run_some((120 + 4 * sessions) * NS_PER_S, events)
    gc.enable()
    took = simulation.took_ns
    everything = [one for kind in took.values() for one in kind]
    figures = {kind: sum(ones) / len(ones) / 1e3 for kind, ones in sorted(took.items())}
    return {"every event": sum(everything) / len(everything) / 1e3, **figures}


def days(policy: str, hours: float) -> dict[str, dict[str, float]]:
    found = {}
    for mix in MIXES:
        began = time.process_time()
        (measures,) = run([Plan(Work(mix=mix, hours=hours), setup=Setup(policy=policy))])
        seconds = time.process_time() - began
        found[mix] = {
            "seconds": seconds,
            "events": measures.events,
            "us_per_event": seconds / measures.events * 1e6,
        }
    return found


def main() -> None:
    args = arguments(__doc__)
    sizes = SESSIONS[:3] if args.quick else SESSIONS
    curves = {}
    for policy in NAMES:
        curves[policy] = {n: curve(policy, n, 2000 if args.quick else 10_000) for n in sizes}
        print(f"\n{policy}: µs per event of the scheduler, mean, by the number of sessions")
        kinds = sorted({kind for one in curves[policy].values() for kind in one} - {"every event"})
        rows = [
            [n, *(one.get(kind, math.nan) for kind in ("every event", *kinds))]
            for n, one in curves[policy].items()
        ]
        table(["sessions", "every event", *kinds], rows)
    whole = {policy: days(policy, 2.0 if args.quick else 24.0) for policy in NAMES}
    for policy, mixes in whole.items():
        print(f"\n{policy}: {'two hours' if args.quick else 'a day'} of each mix")
        table(
            ["mix", "seconds", "events", "µs per event, all in all"],
            [[mix, *one.values()] for mix, one in mixes.items()],
        )
    targets = [
        target(f"{policy}, {n} sessions, per event", one["every event"], TARGET_US, "µs")
        for policy, ones in curves.items()
        for n, one in ones.items()
        if n in (10, 1000)
    ]
    targets += [
        target(f"{policy}, a day of {mix}", one["seconds"], 5.0, "s")
        for policy, mixes in whole.items()
        for mix, one in mixes.items()
    ]
    report("simulate", {"targets": targets, "curves": curves, "days": whole}, args)


if __name__ == "__main__":
    main()
