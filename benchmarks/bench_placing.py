"""Waits in a simulated cluster by the rule that places sessions: packing, spreading, shortest wait.

    python benchmarks/bench_placing.py [--json FILE] [--quick]

1,000 GPUs (125 nodes of 8) with ten notebooks each on average, which come and go within two
hours. The rule ``wait`` is simulated with weights that are read every 10 s, 60 s and 600 s. Packing
is the baseline: it is what Slurm and Kubernetes do with shares of GPUs unless told otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from common import arguments, report, table

from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.measure import Summary, summarise
from kiwi_core.simulate.model import Cluster, Placing, Setup
from kiwi_core.units import NS_PER_S

DELAYS_S = (10, 60, 600)


def plans(quick: bool) -> dict[str, Plan]:
    cluster = Cluster(nodes=5 if quick else 125, gpus=8, places=16, stay_hours=1.0)
    work = Work(mix="notebooks", hours=2.0, sessions=10)

    def plan(placing: Placing, delay_s: int = 60) -> Plan:
        return Plan(
            work=work,
            setup=Setup(placing=placing),
            cluster=replace(cluster, weight_delay_ns=delay_s * NS_PER_S),
        )

    return {
        "pack": plan(Placing.PACK),
        "spread": plan(Placing.SPREAD),
        **{f"wait, weights of {s} s": plan(Placing.WAIT, s) for s in DELAYS_S},
    }


def figures(summary: Summary, baseline: Summary) -> dict[str, float]:
    wait = summary.all.wait_s
    return {
        "cells": summary.cells,
        "wait_p50_s": round(wait.p50, 1),
        "wait_p95_s": round(wait.p95, 1),
        "wait_p99_s": round(wait.p99, 1),
        "wait_max_s": round(wait.max, 1),
        "p99_ratio": round(wait.p99 / max(baseline.all.wait_s.p99, 1e-9), 3),
        "max_ratio": round(wait.max / max(baseline.all.wait_s.max, 1e-9), 3),
        "waited_for_a_place": summary.place_wait_s.n,
        "place_wait_max_s": round(summary.place_wait_s.max, 1),
    }


def main() -> None:
    args = arguments(__doc__)
    played = plans(args.quick)
    print("simulated:", file=sys.stderr)
    measured = run(
        list(played.values()), jobs=2, progress=lambda share: print(f"{share:.0%}", file=sys.stderr)
    )
    summaries = dict(zip(played, map(summarise, measured), strict=True))
    results = {name: figures(one, summaries["pack"]) for name, one in summaries.items()}
    heads = list(next(iter(results.values())))
    table(
        ["placed by", *heads],
        [[name, *(f"{one[head]:,g}" for head in heads)] for name, one in results.items()],
    )
    report("placing", {"nodes": 5 if args.quick else 125, "gpus": 8, "placed by": results}, args)


if __name__ == "__main__":
    main()
