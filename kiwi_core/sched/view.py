"""What the surfaces show of one GPU's scheduler: a frozen copy, made by ``Scheduler.view``.

The daemon turns it into the wire's ``GpuStatus``; every field there that is the scheduler's to
know has its field here, with the same meaning. Times are durations in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.states import AntiThrash, Direction, HistoryKind, Notice, Priority, SessionState
    from kiwi_core.units import OpId, SessionId


@dataclass(frozen=True)
class SessionView:
    id: SessionId
    state: SessionState
    resident_bytes: int
    paged_out_bytes: int
    suspensions: int
    """How often it was stopped in mid-burst."""
    held_ns: int
    """How long it has had the lease, all bursts together, until now."""
    waited_ns: int
    """How long it has waited for the lease, all bursts together, until now."""
    burst: int
    mid_burst: bool
    lingering: bool
    priority: Priority
    guarded: bool
    """Without a gate it is not stopped in mid-burst: others wait until its burst ends."""
    stopped: str
    """Why its process does not run at all just now; "": it runs."""
    kept_out: str
    """Who keeps it out of the GPU; "": nobody."""
    leaving: bool
    """Detached; shown until its memory is back."""
    peak_bytes: int | None
    """The most it held in its last bursts; ``None`` while its needs are unknown."""
    expected_bytes: int
    """What it is expected to take while it runs; the whole GPU while unknown."""
    time_left_ns: int | None
    """At most, until it makes way for who is first in line (nobody waits: of its quantum);
    ``None`` unless it holds the lease and can be stopped. 0: goes on until asked for."""
    operation: OpId | None
    problem: Notice | None
    detail: str


@dataclass(frozen=True)
class QueueView:
    session: SessionId
    position: int
    """1 is next."""
    expected_wait_ns: int | None
    """``None`` where nobody can tell (blocked, or a driver call hangs)."""
    expected_low_ns: int | None
    """It is likely between this and ``expected_high_ns``; the same as ``expected_wait_ns`` where it
    can be told so exactly, ``None`` in a view that does not look ahead."""
    expected_high_ns: int | None
    expected_why: str
    """Why it takes longer than was told before; mostly ""."""
    waited_ns: int
    activity: str
    """What is being done for it right now, in words; "" while it waits for its turn."""
    blocked: Notice | None
    detail: str
    kept_out: str
    """Who keeps it out of the GPU: it is told after those that wait for their turn."""


@dataclass(frozen=True)
class SwapView:
    session: SessionId
    direction: Direction
    bytes_moved: int
    elapsed_ns: int
    at_ns: int
    """When it ended, on the clock of ``now_ns``."""


@dataclass(frozen=True)
class HistoryView:
    """A stretch of time in which ``session`` did one thing; times on the clock of ``now_ns``."""

    id: int
    serial: int
    """Counts the changes of the history; new when the entry ends."""
    session: SessionId
    kind: HistoryKind
    began_ns: int
    ended_ns: int | None
    """``None`` while it goes on."""
    bytes_moved: int
    ok: bool
    """Not refused and not failed; this and ``bytes_moved`` are known at the end of a move."""
    hinted: bool
    """A move that a hint was the reason of."""


@dataclass(frozen=True)
class GpuView:
    total_bytes: int
    free_bytes: int
    """By the books: total less ours less what programs outside hold; never negative."""
    outside_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    tq_ns: int
    anti_thrash: AntiThrash
    policy: str
    serialised: bool
    why: str
    """Why it serialises, or does not, in plain words."""
    swap_round_trip_ns: int | None
    """Of the largest session, out and in, at the measured speed; ``None`` before any swap."""
    floor_ns: int
    """How long the largest session runs before it may be suspended; smaller ones may sooner."""
    holders: tuple[SessionId, ...]
    queue: tuple[QueueView, ...]
    sessions: tuple[SessionView, ...]
    foretold: int
    """Of so many of the last waits (a hundred at most) it is known what was told first, and
    ``foretold_well`` of them came within two seconds or a quarter of it."""
    foretold_well: int
    swaps: tuple[SwapView, ...]
    """The last ones, oldest first; bounded."""
    ignored_events: int
    """Events of unknown sessions, stale bursts or unknown operations that were dropped."""

    def session(self, session: SessionId) -> SessionView | None:
        return next((view for view in self.sessions if view.id == session), None)

    def queued(self, session: SessionId) -> QueueView | None:
        return next((entry for entry in self.queue if entry.session == session), None)
