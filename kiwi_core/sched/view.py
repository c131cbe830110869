"""The view of one GPU's scheduler that users see: a frozen copy, made by ``Scheduler.view``.

The daemon turns it into the wire's ``GpuStatus``. Each field of that message that the scheduler
knows has a field here with the same meaning. Times are durations in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.states import AntiThrash, Direction, HistoryKind, Notice, Priority, SessionState
    from kiwi_core.units import SessionId


@dataclass(frozen=True)
class SessionView:
    id: SessionId
    state: SessionState
    resident_bytes: int
    paged_out_bytes: int
    suspensions: int
    """How often the session was suspended in mid-burst."""
    held_ns: int
    """How long it has held the lease until now, all bursts together."""
    waited_ns: int
    """How long it has waited for the lease until now, all bursts together."""
    mid_burst: bool
    lingering: bool
    priority: Priority
    guarded: bool
    """Whether it has a gate. Without one it is not suspended in mid-burst, and others wait."""
    stopped: str
    """Why its process does not run at all; "": it runs."""
    kept_out: str
    """The user who keeps it out of the GPU; "" if nobody does."""
    leaving: bool
    """Whether it has detached; it is shown until its memory is back."""
    peak_bytes: int | None
    """The most GPU memory it held in its last bursts; ``None`` while its needs are unknown."""
    time_left_ns: int | None
    """The longest time until it makes way for the first waiter (without one, until its quantum
    ends); ``None`` unless it holds the lease and can be suspended. 0: it runs until another
    asks."""
    keeps_ns: int | None
    """How long at most it keeps its place from a waiter in case its next cell comes; ``None``: it
    keeps none, or nobody needs it."""
    problem: Notice | None
    detail: str


@dataclass(frozen=True)
class QueueView:
    session: SessionId
    position: int
    """Place in the queue; 1 is next."""
    expected_wait_ns: int | None
    """``None`` where the wait cannot be estimated (blocked, or a driver call hangs), and in a view
    made without a forecast."""
    expected_low_ns: int | None
    """The wait is likely between this and ``expected_high_ns``. All three are equal where one
    figure is exact enough; ``None`` where ``expected_wait_ns`` is."""
    expected_high_ns: int | None
    expected_why: str
    """Why the forecast is longer than the one shown before; mostly ""."""
    waited_ns: int
    activity: str
    """The operation in progress on the session, in words; "" while it waits for its turn."""
    blocked: Notice | None
    detail: str
    kept_out: str
    """The user who keeps it out of the GPU, or "". Such sessions follow those that wait."""


@dataclass(frozen=True)
class SwapView:
    session: SessionId
    direction: Direction
    bytes_moved: int
    elapsed_ns: int
    at_ns: int
    """When the move ended, on the clock of ``now_ns``."""


@dataclass(frozen=True)
class HistoryView:
    """A stretch of time in which ``session`` did one thing; times on the clock of ``now_ns``."""

    id: int
    serial: int
    """Number of the history's change that made the entry; a new one when the entry ends."""
    session: SessionId
    kind: HistoryKind
    began_ns: int
    ended_ns: int | None
    """``None`` while the entry is in progress."""
    bytes_moved: int
    ok: bool
    """Neither refused nor failed; this and ``bytes_moved`` are known at the end of a move."""
    hinted: bool
    """Whether a hint caused the move."""


@dataclass(frozen=True)
class GpuView:
    total_bytes: int
    free_bytes: int
    """As recorded: the total less the memory of sessions and of programs outside; at least 0."""
    outside_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    tq_ns: int
    anti_thrash: AntiThrash
    policy: str
    serialised: bool
    why: str
    """Why the scheduler serialises, or does not, in plain words."""
    swap_round_trip_ns: int | None
    """Time to page the largest session out and in, as measured; ``None`` before any swap."""
    floor_ns: int
    """How long the largest session runs before it may be suspended; smaller ones may be sooner."""
    holders: tuple[SessionId, ...]
    queue: tuple[QueueView, ...]
    sessions: tuple[SessionView, ...]
    foretold: int
    """Number of recent waits (at most 100) whose first forecast is known; in ``foretold_well`` of
    them the forecast was right within two seconds or a quarter of the wait."""
    foretold_well: int
    swaps: tuple[SwapView, ...]
    """The last swaps, oldest first; bounded."""
    ignored_events: int
    """Number of dropped events: of unknown sessions, stale bursts or unknown operations."""

    def session(self, session: SessionId) -> SessionView | None:
        return next((view for view in self.sessions if view.id == session), None)

    def queued(self, session: SessionId) -> QueueView | None:
        return next((entry for entry in self.queue if entry.session == session), None)
