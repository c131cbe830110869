"""The results of a bench as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kiwi_core.bench.results import GB_PER_S, MICROSECONDS
from kiwi_core.cli.terminal import printable, table
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.bench.conductor import Bench
    from kiwi_core.bench.results import Report, Row
    from kiwi_core.cli.terminal import Style

_GROUPS: Final = {
    "copies": "This machine: copies between GPU and system RAM",
    "calls": "This machine: driver calls",
    "lease": "Kiwi: the lease",
}
_NEEDS_NO_GPU: Final = "lease"
"""The only group whose ratios mean something on an emulated GPU."""

EMULATED: Final = "EMULATED GPU: its speeds mean nothing."


def begin_lines(bench: Bench, style: Style) -> list[str]:
    gpu, room = bench.gpu, bench.room
    lines = [style.bold(printable(f"GPU {gpu.index}: {gpu.name}, driver {gpu.driver_version}"))]
    if bench.emulated:
        lines.append(style.loud(EMULATED))
    if bench.others:
        lines.append(style.yellow(_beside(bench.others)))
    of_free = f"{format_bytes(room.gpu_bytes)} of {format_bytes(room.gpu_free_bytes)}"
    lines.append(
        f"Takes up to {of_free} free GPU memory (for some seconds "
        f"{format_bytes(room.switch_bytes)}),"
    )
    lines.append(f"and up to {format_bytes(room.host_bytes)} of system RAM; less than two minutes.")
    return lines


def _beside(others: int) -> str:
    words = "Another program uses" if others == 1 else f"{others} other programs use"
    return f"{words} this GPU: the numbers are not this machine's limits."


def report_lines(report: Report, style: Style) -> list[str]:
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in report.rows):
        title = _GROUPS.get(group, f"Kiwi: moving memory, backend {group}")
        lines += ["", style.bold(title)]
        rows = [row for row in report.rows if row.group == group]
        if report.emulated and group != _NEEDS_NO_GPU:
            rows = [msgspec.structs.replace(row, limit=None) for row in rows]
        lines += [f"  {line}" for line in table([_cells(row) for row in rows], right=(1, 2))]
    if report.left_out:
        lines += ["", style.bold("Not measured")]
    for left in report.left_out:
        paint = style.red if left.failed else style.dim
        lines.append(paint(printable(f"  {left.title}: {left.reason}")))
    if report.remedies:
        lines += ["", style.bold("Below what is usual")]
        lines += [f"  → {printable(remedy)}" for remedy in report.remedies]
    lines += ["", f"Took {report.took_s:.0f} s."]
    if report.emulated:
        lines.append(style.loud(EMULATED))
    if report.others:
        lines.append(style.yellow(_beside(report.others)))
    return lines


def _cells(row: Row) -> list[str]:
    spread = row.spread
    unit = "µs" if row.unit == MICROSECONDS else row.unit
    between = f"{_number(spread.min)} … {_number(spread.max)}" if spread.runs > 1 else ""
    return [row.title, f"{_number(spread.median)} {unit}", between, _ratio(row)]


def _ratio(row: Row) -> str:
    if row.ratio is None or row.limit is None:
        return ""
    if row.unit == GB_PER_S:
        share = f"{row.ratio:.1%}" if row.ratio < 0.1 else f"{row.ratio:.0%}"
        return f"{share} {row.limit.of}"
    return f"{_number(row.ratio)} × {row.limit.of}"


def _number(value: float) -> str:
    """Format ``value`` with three significant figures."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
