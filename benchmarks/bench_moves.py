"""What it gains that only what is short goes out, simulated.

    python benchmarks/bench_moves.py [--json FILE] [--quick]

Five mixes (docs/simulate.md) at 5, 25 and 50 GB/s, pooled over seeds, each policy: the mean and the
95th percentile of the waits of short cells (less than 30 s of GPU), the total time for the same
work, and the bytes moved, as ratios to moves in one piece. Nobody computes faster or slower by it:
in the simulator moves cost those who compute nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from common import arguments, report, table

from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.measure import summarise
from kiwi_core.simulate.mixes import MIXES
from kiwi_core.simulate.model import GB, Machine, Moves, Setup
from kiwi_core.simulate.policies import NAMES

if TYPE_CHECKING:
    from kiwi_core.simulate.measure import Summary

FIRST_SEED = 2000
SPEEDS = (5.0, 25.0, 50.0)

Key = tuple[str, float, str, Moves]


def summaries(seeds: int, hours: float, jobs: int) -> dict[Key, Summary]:
    keys = [
        (mix, gbps, policy, moves)
        for mix in MIXES
        for gbps in SPEEDS
        for policy in NAMES
        for moves in Moves
    ]
    plans = [
        Plan(
            Work(mix=mix, hours=hours),
            Machine(out_bytes_per_s=gbps * GB, in_bytes_per_s=gbps * GB),
            Setup(policy=policy, moves=moves),
            seed=FIRST_SEED,
            gpus=seeds,
        )
        for mix, gbps, policy, moves in keys
    ]
    measured = run(plans, jobs=jobs, progress=_progress)
    return {key: summarise(one) for key, one in zip(keys, measured, strict=True)}


def _progress(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\rsimulated: {share:4.0%}", end="\n" if share >= 1 else "", file=sys.stderr)


def compared(found: dict[Key, Summary]) -> list[dict[str, Any]]:
    """Ratios to the same in one piece; 1 where nobody waited either way."""
    rows = []
    for (mix, gbps, policy, moves), one in found.items():
        if moves is Moves.WHOLE:
            continue
        whole = found[mix, gbps, policy, Moves.WHOLE]
        rows.append(
            {
                "mix": mix,
                "gbps": gbps,
                "policy": policy,
                "moves": moves.value,
                "short_mean": _ratio(one.short.wait_s.mean, whole.short.wait_s.mean),
                "short_p95": _ratio(one.short.wait_s.p95, whole.short.wait_s.p95),
                "total": _ratio(one.total_s, whole.total_s),
                "bytes": _ratio(one.swapped_bytes, whole.swapped_bytes),
                "out_of_memory": one.out_of_memory,
            }
        )
    return rows


def _ratio(one: float, other: float) -> float:
    return round(one / other, 3) if other else 1.0


def main() -> None:
    args = arguments(__doc__)
    seeds, hours = (1, 0.5) if args.quick else (2, 3.0)
    rows = compared(summaries(seeds, hours, jobs=1))
    cells = [
        [
            row["mix"], f"{row['gbps']:g}", row["policy"], row["short_mean"], row["short_p95"],
            row["total"], row["bytes"],
        ]
        for row in rows
    ]  # fmt: skip
    print(f"\nin part, as ratios to moves in one piece, {seeds} seeds of {hours:g} h")
    table(["mix", "GB/s", "policy", "mean wait", "95 %", "total time", "bytes"], cells)
    results = {
        "seeds": list(range(FIRST_SEED, FIRST_SEED + seeds)),
        "hours": hours,
        "ratios": rows,
    }
    report("moves", results, args)


if __name__ == "__main__":
    main()
