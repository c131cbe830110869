"""Every policy against round robin with TQ 30 s, in the simulator: the gates of the default.

    python benchmarks/bench_policies.py [--json FILE] [--quick]

Five mixes (docs/simulate.md) at 5, 25 and 50 GB/s, pooled over held-out seeds: none of these seeds
was used to choose a policy's constants (those are 0 to 9). For each: the 95th percentile of the
waits of short cells (less than 30 s of GPU), the total time for the same work, and the longest
wait, all as ratios to round robin's; and the longest wait under each policy over the bound that the
policy states. Then the gain of a user who chops work into cells of 8 s while seven others run long
cells: GPU time over the fair share, while all of them want the GPU.

The last part is what people lose who think for seconds where memory does not fit, with moves at
2.3 GB/s out and 6 in, and at 45 and 50: GPU time that is lost (the total less the work), in
minutes, mean waits of short cells in seconds, and moves; the same with no place kept
(``tenancy_trips=0``) beside it, in the same run.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common import arguments, report, table, target
from msgspec.structs import replace as replace_struct

from kiwi_core.config import DEFAULTS
from kiwi_core.sched.model.policy import TurnSettings
from kiwi_core.sched.policy import DEFAULT, make
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.measure import summarise
from kiwi_core.simulate.mixes import MIXES, generate
from kiwi_core.simulate.model import GB, Setup, SimulatedMachine
from kiwi_core.simulate.policies import NAMES
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.units import GIB, NS_PER_MS, NS_PER_S, ns_to_seconds, seconds_to_ns

if TYPE_CHECKING:
    from kiwi_core.simulate.measure import Summary

BASE = "round-robin"
LONG_THOUGHTS = ("notebooks", "6+1", "6+2", "heavy", "small")
FIRST_SEED = 1000
SPEEDS = (5.0, 25.0, 50.0)

TOTAL_LIMITS = {5.0: 1.0, 25.0: 1.03, 50.0: 1.03}
CHOPPER_LIMIT = 1.2
BOUND_LIMIT = 2.0
CHOPS_S, LONG_S, OTHERS = 8.0, 600.0, 7


def wait_limit(mix: str, gbps: float) -> float:
    if gbps < 25.0:
        return 0.8
    return 0.35 if mix == "6+1" else 0.25


def machine(gbps: float) -> SimulatedMachine:
    return SimulatedMachine(out_bytes_per_s=gbps * GB, in_bytes_per_s=gbps * GB)


def summaries(seeds: int, hours: float, jobs: int) -> dict[tuple[str, float, str], Summary]:
    keys = [(mix, gbps, policy) for mix in LONG_THOUGHTS for gbps in SPEEDS for policy in NAMES]
    plans = [
        Plan(Work(mix=mix, hours=hours), machine(gbps), Setup(policy=policy), seed=FIRST_SEED,
             gpus=seeds)
        for mix, gbps, policy in keys
    ]  # fmt: skip
    measured = run(plans, jobs=jobs, progress=_progress)
    return {key: summarise(one) for key, one in zip(keys, measured, strict=True)}


def _progress(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\rsimulated: {share:4.0%}", end="\n" if share >= 1 else "", file=sys.stderr)


# --- nobody starves -----------------------------------------------------------------------------


def bounds_s(seeds: int, hours: float) -> dict[tuple[str, float, str], float]:
    """Return the bound of each policy if all other sessions want the GPU, too, and the largest has
    to move each time, at the lowest speed of the noise."""
    found = {}
    for mix in LONG_THOUGHTS:
        traces = [
            generate(
                mix, hours=hours, seed=FIRST_SEED + n, total_bytes=SimulatedMachine().total_bytes
            )
            for n in range(seeds)
        ]
        cells = (cell for trace in traces for one in trace.sessions for cell in one.cells)
        largest_bytes = max(cell.peak_bytes for cell in cells)
        for gbps in SPEEDS:
            swap_ns = _swap_ns(machine(gbps), largest_bytes)
            for policy in NAMES:
                turn_settings = TurnSettings(
                    DEFAULTS.tq_ns,
                    DEFAULTS.min_run_ns,
                    DEFAULTS.swap_floor_factor,
                    DEFAULTS.tenancy_trips,
                )
                bound_ns = make(policy).bound_ns(turn_settings, MIXES[mix].sessions - 1, swap_ns)
                if bound_ns is not None:
                    found[mix, gbps, policy] = ns_to_seconds(bound_ns)
    return found


def _swap_ns(where: SimulatedMachine, size_bytes: int) -> int:
    slowest = 1.0 - where.noise
    ways = (where.out_bytes_per_s, where.in_bytes_per_s)
    return sum(int(size_bytes * NS_PER_S / (speed * slowest)) + where.swap_fixed_ns
               for speed in ways)  # fmt: skip


def starving(
    found: dict[tuple[str, float, str], Summary], bounds: dict[tuple[str, float, str], float]
) -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Return the longest wait of any session over its policy's bound, for each policy."""
    rows: list[list[object]] = []
    targets = []
    for mix in LONG_THOUGHTS:
        for gbps in SPEEDS:
            row: list[object] = [f"{mix}, {gbps:g} GB/s"]
            for policy in NAMES:
                key = mix, gbps, policy
                longest_s = found[key].all.wait_s.max
                if key in bounds:
                    ratio = longest_s / bounds[key]
                    row += [longest_s, bounds[key], ratio]
                    what = f"{policy}, {mix}, {gbps:g} GB/s: longest wait over the bound"
                    targets.append(target(what, ratio, BOUND_LIMIT))
                else:
                    row += [longest_s, "none", "-"]
            rows.append(row)
    return rows, targets


# --- somebody who chops ------------------------------------------------------------------------


def chopping(hours: float, seed: int) -> Trace:
    """Return eight sessions that always want the GPU, the first in cells of 8 s, the others in long
    cells."""
    rng = random.Random(seed)

    def session(number: int, cell_s: float) -> SessionTrace:
        size = int(rng.uniform(0.3, 0.8) * 80 * GIB)
        cells = tuple(
            Cell(think_ns=NS_PER_S // 10, cpu_ns=0, gpu_ns=int(cell_s * NS_PER_S), peak_bytes=size)
            for _ in range(int(hours * 3600 / cell_s) + 1)
        )
        name = f"s{number}"
        return SessionTrace(id=name, user=name, starts_ns=0, cells=cells)

    sessions = [session(0, CHOPS_S), *(session(n, LONG_S) for n in range(1, OTHERS + 1))]
    return Trace(name="chopping", total_bytes=80 * GIB, sessions=tuple(sessions))


def choppers_gain(policy: str, gbps: float, seeds: int, hours: float) -> float:
    """Return the GPU time of the session that chops over the mean of all, in the first hours."""
    gains = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        simulation = Simulation(
            chopping(hours, seed), machine(gbps), Setup(policy=policy), seed=seed
        )
        simulation.begin()
        while ns_to_seconds(simulation.now_ns) < hours * 3600:
            simulation.step()
        held_ns = [one.held_ns for one in simulation.scheduler.view(simulation.now_ns).sessions]
        gains.append(held_ns[0] * len(held_ns) / sum(held_ns))
    return sum(gains) / len(gains)


# --- people who think for seconds ---------------------------------------------------------------

SLOW, FAST = (2.3, 6.0), (45.0, 50.0)

LIMITS: dict[tuple[str, tuple[float, float]], tuple[float, float]] = {
    ("training, 2 s", SLOW): (40, 5),
    ("training, 4 s", SLOW): (60, 7),
    ("training, 10 s", SLOW): (105, 10),
    ("training, 30 s", SLOW): (220, 16),
    ("training, 2 s", FAST): (34, 1.5),
    ("training, 4 s", FAST): (34, 2.4),
    ("training, 10 s", FAST): (34, 3),
    ("training, 30 s", FAST): (34, 3),
    ("two of 50 GiB, 5 s", SLOW): (70, 11),
    ("three of 50 GiB, 20 s", SLOW): (330, 60),
}
"""Under the default policy: minutes lost, and mean wait of short cells in seconds."""


def people(
    name: str, think_s: float, cell_s: float, gib: float, count: int, rng: random.Random
) -> SessionTrace:
    """Return a user who thinks for ``think_s`` (exponential), then runs a cell of 0.2 to 1.8 times
    ``cell_s``."""
    cells = tuple(
        Cell(
            think_ns=seconds_to_ns(rng.expovariate(1 / think_s)),
            cpu_ns=0,
            gpu_ns=seconds_to_ns(cell_s * rng.uniform(0.2, 1.8)),
            peak_bytes=int(gib * GIB),
        )
        for _ in range(count)
    )
    return SessionTrace(id=name, user=name, starts_ns=0, cells=cells)


def beside_a_training(think_s: float) -> Trace:
    cell = Cell(think_ns=NS_PER_S, cpu_ns=0, gpu_ns=72_000 * NS_PER_S, peak_bytes=60 * GIB)
    train = SessionTrace(id="train", user="t", starts_ns=0, cells=(cell,))
    user = people("n", think_s, 1.0, 40, 400, random.Random(1))
    user = replace_struct(user, starts_ns=60 * NS_PER_S)
    return Trace(name="training", total_bytes=80 * GIB, sessions=(train, user))


def together(count: int, think_s: float, gib: float) -> Trace:
    rng = random.Random(1)
    users = [people(f"n{k}", think_s, 2.0, gib, 300, rng) for k in range(count)]
    sessions = tuple(
        replace_struct(user, starts_ns=(1 + k) * NS_PER_S) for k, user in enumerate(users)
    )
    return Trace(name="together", total_bytes=80 * GIB, sessions=sessions)


QUICK: dict[str, Trace] = {
    **{f"training, {think_s} s": beside_a_training(think_s) for think_s in (2, 4, 10, 30)},
    "two of 50 GiB, 5 s": together(2, 5, 50),
    "three of 50 GiB, 20 s": together(3, 20, 50),
    "four of 30 GiB, 5 s": together(4, 5, 30),
}


def thinking() -> tuple[list[list[object]], list[dict[str, Any]], list[dict[str, Any]]]:
    rows: list[list[object]] = []
    targets, results = [], []
    for name, trace in QUICK.items():
        for gbps in (SLOW, FAST):
            where = SimulatedMachine(
                out_bytes_per_s=gbps[0] * GB,
                in_bytes_per_s=gbps[1] * GB,
                swap_fixed_ns=(200 if gbps is SLOW else 100) * NS_PER_MS,
            )
            row: list[object] = [f"{name}; {gbps[0]:g},{gbps[1]:g}"]
            for policy in NAMES:
                for trips in (0.0, DEFAULTS.tenancy_trips):
                    config = replace(DEFAULTS, tenancy_trips=trips)
                    setup = Setup(policy=policy, config=config)
                    one = summarise(Simulation(trace, where, setup).run())
                    lost_min, wait_s = one.lost_s / 60, one.short.wait_s.mean
                    row.append(f"{lost_min:.0f} min, {wait_s:.1f} s, {one.swaps:,}")
                    results.append(
                        {
                            "trace": name, "gbps": gbps, "policy": policy, "tenancy_trips": trips,
                            "lost_min": lost_min, "short_wait_mean_s": wait_s, "swaps": one.swaps,
                            "longest_wait_s": one.all.wait_s.max, "useful_share": one.useful_share,
                        }
                    )  # fmt: skip
                    if policy == DEFAULT and trips and (limits := LIMITS.get((name, gbps))):
                        what = f"{policy}, {row[0]} GB/s"
                        targets.append(target(f"{what}: lost", lost_min, limits[0], "min"))
                        targets.append(target(f"{what}: mean wait", wait_s, limits[1], "s"))
            rows.append(row)
    return rows, targets, results


# --- the verdict --------------------------------------------------------------------------------


def compare(
    found: dict[tuple[str, float, str], Summary], policy: str
) -> tuple[list[list[object]], list[dict[str, Any]]]:
    rows: list[list[object]] = []
    targets = []
    for mix in LONG_THOUGHTS:
        for gbps in SPEEDS:
            base, one = found[mix, gbps, BASE], found[mix, gbps, policy]
            waits = one.short.wait_s.p95 / base.short.wait_s.p95
            total = one.total_s / base.total_s
            rows.append(
                [f"{mix}, {gbps:g} GB/s", base.short.wait_s.p95, one.short.wait_s.p95, waits, total,
                 base.all.wait_s.max, one.all.wait_s.max, base.jain, one.jain]
            )  # fmt: skip
            where = f"{policy}, {mix}, {gbps:g} GB/s"
            targets.append(target(f"{where}: short waits", waits, wait_limit(mix, gbps)))
            targets.append(target(f"{where}: total time", total, TOTAL_LIMITS[gbps]))
    return rows, targets


HEAD = [
    "", "p95 wait short, RR", "p95", "ratio", "total", "longest, RR", "longest", "Jain, RR", "Jain",
]  # fmt: skip


def main() -> None:
    args = arguments(
        __doc__,
        lambda p: p.add_argument("--seeds", type=int, default=6, metavar="N", help="default: 6"),
        lambda p: p.add_argument("--jobs", type=int, default=1, metavar="N", help="default: 1"),
    )
    seeds, hours = (2, 1.0) if args.quick else (args.seeds, 24.0)
    found = summaries(seeds, hours, args.jobs)
    targets: list[dict[str, Any]] = []
    for policy in NAMES:
        if policy != BASE:
            rows, judged = compare(found, policy)
            print(f"\n{policy} against {BASE} TQ 30 s, {seeds} seeds of {hours:g} h")
            table(HEAD, rows)
            targets += judged
    bounds = bounds_s(seeds, hours)
    rows, judged = starving(found, bounds)
    print("\nthe longest wait and the bound that the policy states, seconds")
    table(["", *(f"{p}{what}" for p in NAMES for what in ("", ", bound", ", ratio"))], rows)
    targets += judged
    gains = {
        policy: {gbps: choppers_gain(policy, gbps, min(seeds, 3), hours / 4) for gbps in SPEEDS}
        for policy in NAMES
    }
    print("\nwhat somebody gains who chops their work into cells of 8 s")
    table(
        ["", *(f"{gbps:g} GB/s" for gbps in SPEEDS)], [[p, *g.values()] for p, g in gains.items()]
    )
    targets += [
        target(f"{policy}, chopping, {gbps:g} GB/s", gain, CHOPPER_LIMIT)
        for policy, by_speed in gains.items()
        if policy != BASE
        for gbps, gain in by_speed.items()
    ]
    rows, judged, thoughts = thinking()
    print("\npeople who think for seconds: lost, mean wait of short cells, moves")
    table(["", *(f"{p}{kept}" for p in NAMES for kept in (", nothing kept", ""))], rows)
    targets += judged
    results = {
        "seeds": list(range(FIRST_SEED, FIRST_SEED + seeds)),
        "hours": hours,
        "summaries": [
            {
                "mix": mix, "gbps": gbps, "policy": policy, "cells": one.cells,
                "short_wait_p50_s": one.short.wait_s.p50, "short_wait_p95_s": one.short.wait_s.p95,
                "longest_wait_s": one.all.wait_s.max, "bound_s": bounds.get((mix, gbps, policy)),
                "total_s": one.total_s,
                "useful_share": one.useful_share, "swaps": one.swaps, "jain": one.jain,
            }
            for (mix, gbps, policy), one in found.items()
        ],
        "chopping": gains,
        "thinking": thoughts,
        "targets": targets,
    }  # fmt: skip
    report("policies", results, args)


if __name__ == "__main__":
    main()
