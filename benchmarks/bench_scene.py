"""Compare a real training and four real notebooks with the simulator's prediction.

    python benchmarks/bench_scene.py [--json FILE] [--quick]

Real kernels and daemons on the emulated driver play one scene under each policy (scaled down, see
tests/support/scene.py), six times with other lengths of cells and pauses. The simulator gets each
journal as a trace and predicts the waits under the recorded policy, and under the other one. The
waits of all plays are pooled; their mean and 95th percentile should be within 20 % of each other.
Under ``interactive`` the mean wait of short cells should be at most 0.85 × that under round robin.
"""

from __future__ import annotations

from typing import Any

import common
import scene

LIMIT = 0.2
SHORTER = 0.85
SEEDS = 6


def main() -> None:
    args = common.arguments(__doc__)
    where = common.machine("emulated")
    played = [scene.play(seed) for seed in range(1 if args.quick else SEEDS)]
    rows: list[list[object]] = []
    targets: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    means_s: dict[str, float] = {}
    for policy in scene.POLICIES:
        real = scene.pooled(scene.measured(journals[policy]) for journals in played)
        means_s[policy] = real.mean_s
        rows.append([policy, *_columns(real)])
        figures.append({"policy": policy, "from": "measured", **_figures(real)})
        for told_by in sorted(scene.POLICIES, key=lambda name: name != policy):
            said = scene.pooled(scene.foretold(journals[told_by], policy) for journals in played)
            rows.append([f"  foretold from the journal of {told_by}", *_columns(said)])
            figures.append({"policy": policy, "from": told_by, **_figures(said)})
            targets += [
                common.target(
                    f"{policy} from {told_by}: {what}", abs(foretold / was - 1), LIMIT, ""
                )
                for what, foretold, was in (
                    ("mean wait", said.mean_s, real.mean_s),
                    ("p95 wait", said.p95_s, real.p95_s),
                )
            ]
    shorter = means_s["interactive"] / means_s["round-robin"]
    targets.append(common.target("mean wait, interactive / round robin", shorter, SHORTER))
    common.table(["waits of short cells", "n", "mean s", "p95 s", "longest s", "training s"], rows)
    results = {
        "machine": where, "seeds": len(played), "tq_s": scene.TQ_S, "figures": figures,
        "targets": targets,
    }  # fmt: skip
    common.report("scene", results, args)


def _columns(outcome: scene.Outcome) -> list[object]:
    n, longest_s = len(outcome.waits_s), max(outcome.waits_s)
    return [n, outcome.mean_s, outcome.p95_s, longest_s, outcome.training_s]


def _figures(outcome: scene.Outcome) -> dict[str, float]:
    return {
        "cells": len(outcome.waits_s),
        "mean_wait_s": round(outcome.mean_s, 3),
        "p95_wait_s": round(outcome.p95_s, 3),
        "longest_wait_s": round(max(outcome.waits_s), 3),
        "training_s": round(outcome.training_s, 2),
    }


if __name__ == "__main__":
    main()
