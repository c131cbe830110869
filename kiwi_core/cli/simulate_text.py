"""The results of a simulation as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kiwi_core.cli.terminal import printable, table
from kiwi_core.simulate.model import GB
from kiwi_core.units import NS_PER_S, format_bytes, format_duration_s, ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.cli.terminal import Style
    from kiwi_core.simulate.fleet import Plan
    from kiwi_core.simulate.measure import Quantiles, Summary
    from kiwi_core.simulate.model import Cluster, Setup

Column = tuple["Setup | None", "Summary"]
"""A configuration and its results. The configuration is ``None`` for the real results in the
journal.
"""


def column_name(setup: Setup | None, *, cluster: bool = False) -> str:
    if setup is None:
        return "as it was"
    placed = f", {setup.placing.value}" if cluster else ""
    return f"{setup.policy}, TQ {setup.tq_ns / NS_PER_S:g} s{placed}"


def table_lines(
    title: str,
    columns: Sequence[Column],
    style: Style,
    *,
    users: bool = False,
    cluster: bool = False,
) -> list[str]:
    """Return a table with a column for each configuration, after a column for the real results."""
    first = columns[0][1]
    rows = [["", *(column_name(setup, cluster=cluster) for setup, _ in columns)]]
    summaries = [summary for _, summary in columns]

    def row(name: str, value: Callable[[Summary], str]) -> None:
        rows.append([name, *map(value, summaries)])

    _wait_rows(row, f"wait, cells {first.short.cells} of GPU", lambda s: s.short.wait_s)
    _wait_rows(row, "wait, all cells", lambda s: s.all.wait_s)
    row("wait by GPU time, 50 % / 95 %", lambda _: "")
    for number, one in enumerate(first.classes):
        if one.wait_s.n:
            row(
                f"  {one.cells}",
                lambda s, n=number: (  # type: ignore[misc]
                    f"{format_duration_s(s.classes[n].wait_s.p50)}"
                    f" / {format_duration_s(s.classes[n].wait_s.p95)}"
                ),
            )
    row("slowdown, 50 % / 95 %", lambda s: f"{s.all.slowdown.p50:.1f} / {s.all.slowdown.p95:.1f}")
    row("useful share of the GPU", lambda s: f"{s.useful_share:.1%}")
    row("lost (idle or moving memory)", lambda s: format_duration_s(s.lost_s))
    row("total time", lambda s: format_duration_s(s.total_s))
    row("moves", lambda s: f"{s.swaps:,} ({format_bytes(s.swapped_bytes)})")
    row("stopped in mid-cell", lambda s: f"{s.suspensions:,}")
    row("fairness (Jain)", lambda s: f"{s.jain:.3f}")
    if cluster:
        row("sessions that waited for a place", lambda s: f"{s.place_wait_s.n:,}")
        row("  longest", lambda s: format_duration_s(s.place_wait_s.max))
    for name, value in _TROUBLES:
        if any(map(value, summaries)):
            row(name, lambda s, v=value: f"{v(s):,}")  # type: ignore[misc]
    asked_s = first.useful_share * first.wanted_share * first.total_s
    cells = f"{first.cells:,} cells, {format_duration_s(asked_s)} of GPU time asked for"
    lines = [style.bold(printable(title)), style.dim(cells), ""]
    lines += table(rows, right=range(1, len(columns) + 1))
    if users:
        for setup, summary in columns:
            name = column_name(setup, cluster=cluster)
            lines += ["", style.bold(name), *_users(summary)]
    return lines


def _wait_rows(
    row: Callable[[str, Callable[[Summary], str]], None],
    name: str,
    of: Callable[[Summary], Quantiles],
) -> None:
    row(name, lambda _: "")
    row("  50 %", lambda s: format_duration_s(of(s).p50))
    row("  95 %", lambda s: format_duration_s(of(s).p95))
    row("  99 %", lambda s: format_duration_s(of(s).p99))
    row("  longest", lambda s: format_duration_s(of(s).max))


_TROUBLES: tuple[tuple[str, Callable[[Summary], int]], ...] = (
    ("grew past what was free", lambda s: s.out_of_memory),
    ("operations refused", lambda s: s.refused),
    ("operations that hung", lambda s: s.hung),
    ("kernels that died", lambda s: s.killed),
)


def _users(summary: Summary) -> list[str]:
    rows = [["user", "cells", "GPU time", "wait 50 %", "wait 95 %", "share while wanting"]]
    rows += [
        [
            printable(user.user),
            f"{user.cells:,}",
            format_duration_s(user.gpu_s),
            format_duration_s(user.wait_p50_s),
            format_duration_s(user.wait_p95_s),
            f"{user.share_while_wanting:.0%}",
        ]
        for user in summary.users
    ]
    return table(rows, right=range(1, 6))


def report_json(plan: Plan, columns: Sequence[Column]) -> bytes:
    """Return the input and the results as JSON. It is an interface, described in the docs."""
    work, machine, faults = plan.work, plan.machine, plan.faults
    record = {
        "work": {
            "mix": work.mix or None,
            "trace": work.trace.name if work.trace is not None else None,
            "hours": work.hours if work.mix else None,
            "sessions": work.sessions if work.mix else len(work.trace.sessions),  # type: ignore[union-attr]
            "seed": plan.seed,
            "gpus": plan.gpus,
        },
        "cluster": None if plan.cluster is None else _cluster(plan.cluster),
        "machine": {
            "total_bytes": machine.total_bytes,
            "host_budget_bytes": machine.host_budget_bytes,
            "out_gbps": machine.out_bytes_per_s / GB,
            "in_gbps": machine.in_bytes_per_s / GB,
            "swap_latency_s": ns_to_seconds(machine.swap_fixed_ns),
            "noise": machine.noise,
            "contention": machine.contention,
        },
        "faults": {"refuse": faults.refuse, "hang": faults.hang, "kill": faults.kill},
        "results": [
            {
                "policy": setup.policy,
                "tq_s": ns_to_seconds(setup.tq_ns),
                "anti_thrash": setup.anti_thrash.value,
                **({} if plan.cluster is None else {"place": setup.placing.value}),
                **msgspec.structs.asdict(summary),
            }
            for setup, summary in columns
            if setup is not None
        ],
        "real": next((summary for setup, summary in columns if setup is None), None),
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def _cluster(cluster: Cluster) -> dict[str, object]:
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "places": cluster.places,
        "stay_hours": cluster.stay_hours,
        "weight_delay_s": ns_to_seconds(cluster.weight_delay_ns),
    }
