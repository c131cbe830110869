"""The life of each session as a journal records it, and its conversion to a trace and measures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.simulate.model import GB
from kiwi_core.simulate.trace import Cell, Recorded, SessionTrace, Trace
from kiwi_core.units import MIB, NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kiwi_core.sched.replay import JournalHeader
    from kiwi_core.simulate.measure import Measures

ROUND_NS: Final = NS_PER_MS
ROUND_BYTES: Final = MIB
"""Times and sizes are rounded to these units: finer ones could help to identify a recording."""

Moves = dict[type, list[tuple[int, int]]]
"""Bytes and nanoseconds of each move, by the event that reported it."""


@dataclass(frozen=True, slots=True)
class Done:
    """A cell that has ended. Times count from the first event."""

    free_ns: int
    """When the cell before it ended, or the session joined."""
    asked_ns: int
    granted_ns: int
    ended_ns: int
    gpu_ns: int
    peak_bytes: int = 0

    def cell(self, since_ns: int) -> Cell:
        think_ns = self.asked_ns - max(self.free_ns, since_ns)
        return Cell(
            think_ns=rounded_ns(think_ns), cpu_ns=0, gpu_ns=self.gpu_ns, peak_bytes=self.peak_bytes
        )


@dataclass(eq=False)
class Life:
    """One session as recorded by the journal so far."""

    joined_ns: int
    free_since_ns: int
    """When its last cell ended, or it joined."""
    burst: int = 0
    asked_ns: int | None = None
    """When the open cell asked for the lease; ``None``: no cell is open."""
    granted_ns: int | None = None
    """When that cell began."""
    attained_ns: float = 0.0
    held_bytes: int = 0
    """Its memory by the last report, in the GPU or in system RAM."""
    out: bool = False
    moving: bool = False
    cells: list[Done] = field(default_factory=list)
    closed: Done | None = None
    """The last cell, until the memory that it left is known."""
    left_ns: int | None = None
    """When its process ended, if it did."""

    @property
    def leaves_ns(self) -> int | None:
        """The time from the end of its last cell to the end of its process, if that ended."""
        return None if self.left_ns is None else rounded_ns(self.left_ns - self.cells[-1].ended_ns)

    def seen(self, resident_bytes: int) -> None:
        if not self.out and not self.moving:
            self.held_bytes = resident_bytes

    def moved(self, event: ev.PagedOut | ev.PagedIn) -> None:
        self.out = isinstance(event, ev.PagedOut)
        if event.moved_bytes:
            self.held_bytes = event.moved_bytes

    def add_last_cell(self) -> None:
        """Add the last cell to ``cells``: the journal says nothing more about it."""
        if self.closed is not None:
            held_bytes = -(-self.held_bytes // ROUND_BYTES) * ROUND_BYTES
            self.cells.append(replace(self.closed, peak_bytes=held_bytes))
            self.closed = None


def as_trace(
    name: str,
    header: JournalHeader,
    policy: str,
    lives: Sequence[Life],
    since_ns: int,
    moves: Moves,
) -> Trace:
    """Return a trace of the cells in ``lives``; times count from ``since_ns`` on. ``policy`` is the
    one that was in force."""
    sessions = tuple(
        SessionTrace(
            id=f"s{number}",
            user=f"s{number}",
            starts_ns=rounded_ns(max(0, life.joined_ns - since_ns)),
            cells=tuple(cell.cell(since_ns) for cell in life.cells),
            leaves_ns=life.leaves_ns,
        )
        for number, life in enumerate(lives, start=1)
    )
    return Trace(
        name=name,
        total_bytes=header.total_bytes,
        sessions=sessions,
        recorded=Recorded(
            tq_s=header.tq_ns / NS_PER_S,
            anti_thrash=header.anti_thrash.value,
            policy=policy,
            host_budget_bytes=header.host_budget_bytes,
            out_gbps=_gbps(moves[ev.PagedOut]),
            in_gbps=_gbps(moves[ev.PagedIn]),
        ),
    )


def fill_measures(measures: Measures, lives: Sequence[Life], since_ns: int) -> None:
    """Enter the cells of ``lives`` as they were really served."""
    measures.users = [f"s{number}" for number in range(1, len(lives) + 1)]
    cells = [(cell, index) for index, life in enumerate(lives) for cell in life.cells]
    for cell, index in sorted(cells, key=_ended):
        asked_ns, granted_ns = cell.asked_ns - since_ns, cell.granted_ns - since_ns
        measures.cell(index, cell.gpu_ns, asked_ns, granted_ns, cell.ended_ns - since_ns)
    measures.given_ns = float(sum(measures.gpu_ns))
    measures.wanted_ns = _covered_ns((cell.asked_ns, cell.ended_ns) for cell, _ in cells)


def joined_ns(life: Life) -> int:
    return life.joined_ns


def _ended(cell: tuple[Done, int]) -> int:
    return cell[0].ended_ns


def _covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the time that at least one of ``spans`` covers."""
    covered_ns, until_ns = 0, 0
    for from_ns, to_ns in sorted(spans):
        covered_ns += max(0, to_ns - max(from_ns, until_ns))
        until_ns = max(until_ns, to_ns)
    return covered_ns


def rounded_ns(duration_ns: float) -> int:
    return round(duration_ns / ROUND_NS) * ROUND_NS


def _gbps(moves: list[tuple[int, int]]) -> float | None:
    """Return all bytes over all time: the effective speed, fixed costs included."""
    took_ns = sum(elapsed_ns for _, elapsed_ns in moves)
    moved_bytes = sum(moved for moved, _ in moves)
    return round(moved_bytes * NS_PER_S / took_ns / GB, 2) if took_ns and moved_bytes else None
