"""The ``metrics`` of one GPU on the wire: the counts of a daemon.

Totals count from the daemon's start and never go down; the rest is the current state. They hold no
names of users, notebooks or processes: everybody who may connect may read them, and a metrics
server shows them to many more.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct, field

from kiwi_core.states import AntiThrash, Reason, SessionState

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]

WAIT_BOUNDS_S: Final = (
    0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""From "nobody noticed" over a swap and a quantum to a coffee break."""


OPERATIONS: Final = ("suspend", "resume", "page-out", "page-in", "residue-in")


class Histogram(Struct, frozen=True, kw_only=True):
    """``counts`` has one more entry than ``bounds``: the number of values up to each bound and
    above the one before, and last the number above all bounds. In seconds."""

    bounds: list[float]
    counts: list[Count]
    sum: float


class MoveTotals(Struct, frozen=True, kw_only=True):
    """Moves of memory that succeeded, in one direction. ``bytes_moved`` is a float because it may
    pass 2^53. ``last_bytes_per_s`` is of the last move of any bytes; ``None``: there was none."""

    moves: Count = 0
    bytes_moved: float = 0.0
    seconds: float = 0.0
    last_bytes_per_s: float | None = None


class Refusals(Struct, frozen=True, kw_only=True):
    """``operation`` is one of ``OPERATIONS``."""

    operation: str
    reason: Reason
    count: Count


class PeerUse(Struct, frozen=True, kw_only=True):
    """The use of one thing that peers can make the daemon hold (``peer_limits``): how much is held,
    the limits for all and for one user, and how many requests were refused. ``most`` is ``None``
    for things that users take turns with."""

    what: str
    used: Count
    most: Count | None
    per_user: Count
    refused: Count


class GpuMetrics(Struct, frozen=True, kw_only=True):
    uuid: str
    index: int
    name: str
    """The GPU's model."""
    emulated: bool
    driver_version: str
    daemon_version: str
    uptime_s: float

    total_bytes: int
    free_bytes: int
    resident_bytes: int
    """Held in the GPU by sessions."""
    outside_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    arena_bytes: int
    """System RAM that preloaded libraries hold."""

    tq_s: float
    anti_thrash: AntiThrash
    serialised: bool
    holders: int
    queue_length: int
    sessions: dict[SessionState, int]
    operations_running: int
    """Includes overdue ones."""
    operations_stuck: int

    held_s: float
    """Time in which any session held the lease."""
    session_held_s: float
    """Sum of the times that each session held the lease."""
    first_waits: Histogram
    """From each burst's request to its first grant."""
    resumption_waits: Histogram
    """From each suspension in mid-burst to the next grant."""
    waits_given_up: Count
    """Requests that ended before their grant."""
    suspensions: Count
    moved_out: MoveTotals
    moved_in: MoveTotals
    refusals: list[Refusals]
    lost_out: Count
    """Sessions whose memory was lost during a page-out; ``lost_in``: during a page-in."""
    lost_in: Count
    overdue: Count
    """Operations that did not report by their deadline."""
    hints_begun: Count
    """Hints (a session is about to be used) that led to a page-in; ``hints_declined``: that did
    not."""
    hints_declined: Count
    ignored_events: Count

    connections: int
    connections_taken: Count
    connections_ended: dict[str, Count] = field(default_factory=dict)
    """Counts by the code of the fatal error with which the daemon ended the connection."""
    look_errors: Count = 0
    """Observations of the GPU's memory (driver, NVML) that failed, wholly or for one session."""
    journal_lines_lost: Count = 0
    policy: str = ""
    """Name of the policy; "" from an older daemon, which does not send it."""
    peers: list[PeerUse] = field(default_factory=list)
    log_lines_dropped: Count = 0
    utilisation_percent: int | None = None
    """``utilisation_percent``, ``temperature_c``, ``power_w`` and ``power_limit_w`` are as in
    ``GaugesStatus``."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    newcomer_wait_s: float | None = None
    """As in ``GpuStatus``."""
