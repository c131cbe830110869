"""The work to simulate.

Sessions are closed loops: a cell's think time begins at the end of the cell before it, so a policy
that serves cells sooner gets the next ones sooner, as in reality.
"""

from __future__ import annotations

from msgspec import Struct


class Cell(Struct, frozen=True, kw_only=True, gc=False):
    """One cell that uses the GPU."""

    think_ns: int
    """Time from the end of the cell before (or the start of the session) to its start."""
    cpu_ns: int
    """Time from its start to the first statement that needs the GPU, without the lease."""
    gpu_ns: int
    """Time from then on if it is alone on the GPU: the time that it holds the lease."""
    peak_bytes: int
    """The GPU memory at its end, contexts included; the session keeps it until the next cell."""


class SessionTrace(Struct, frozen=True, kw_only=True):
    id: str
    user: str
    starts_ns: int
    """When the session joins."""
    cells: tuple[Cell, ...]
    leaves_ns: int | None = None
    """Time from the end of its last cell to the end of its process; ``None``: the process lives on
    and keeps its memory."""


class Trace(Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    """Size of the GPU that the trace was made for or recorded on."""
    sessions: tuple[SessionTrace, ...]
    recorded: Recorded | None = None


class Recorded(Struct, frozen=True, kw_only=True):
    """The machine that a journal was recorded on. A speed of ``None``: nothing was moved."""

    tq_s: float
    anti_thrash: str
    policy: str = ""
    """The policy in force for most of the time; "": unknown."""
    host_budget_bytes: int
    out_gbps: float | None = None
    in_gbps: float | None = None
