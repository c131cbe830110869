"""Traces written by hand, for the tests of the simulator and of policies."""

from __future__ import annotations

from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
from kiwi_core.units import GIB, seconds_to_ns


def cell(gpu_s: float, *, think_s: float = 0.0, cpu_s: float = 0.0, gib: float = 60.0) -> Cell:
    return Cell(
        think_ns=seconds_to_ns(think_s),
        cpu_ns=seconds_to_ns(cpu_s),
        gpu_ns=seconds_to_ns(gpu_s),
        peak_bytes=int(gib * GIB),
    )


def session(
    name: str,
    *cells: Cell,
    starts_s: float = 0.0,
    user: str = "",
    leaves_s: float | None = None,
) -> SessionTrace:
    return SessionTrace(
        id=name,
        user=user or name,
        starts_ns=seconds_to_ns(starts_s),
        cells=tuple(cells),
        leaves_ns=None if leaves_s is None else seconds_to_ns(leaves_s),
    )


def trace(*sessions: SessionTrace, name: str = "by hand") -> Trace:
    return Trace(name=name, total_bytes=80 * GIB, sessions=sessions)
