"""The structs inside the reports ``status``, ``story``, ``history`` and ``usage``.
``docs/protocol.md`` explains them."""

from __future__ import annotations

from msgspec import Struct, field

from kiwi_core import terms
from kiwi_core.states import AntiThrash, Direction, HistoryKind, MovedBy, Priority, SessionState


class MemoryStatus(Struct, frozen=True, kw_only=True):
    total_bytes: int
    free_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    outside_bytes: int = 0
    """GPU memory that programs outside Kiwi hold."""
    arena_bytes: int = 0
    """System RAM that preloaded libraries hold: paged-out memory, and what they keep for speed."""


class GaugesStatus(Struct, frozen=True, kw_only=True):
    """How hard the GPU works, as NVML said a few seconds ago. ``None``: not known."""

    utilisation_percent: int | None = None
    """Share of the last moments in which any kernel ran."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class OutsideProgram(Struct, frozen=True, kw_only=True):
    """A program outside Kiwi that has GPU memory. Another user's has neither name nor pid: ``name``
    is then "another user", ``pid`` 0, and one entry holds the sum of all of them."""

    pid: int
    owner: str
    name: str
    used_bytes: int
    left: bool = False
    """The memory is that of a program that has ended. This one was forked from it, and keeps it."""


class SchedulerStatus(Struct, frozen=True, kw_only=True):
    tq_s: float
    anti_thrash: AntiThrash
    serialised: bool
    why: str = ""
    swap_round_trip_s: float | None = None
    policy: str = ""
    floor_s: float | None = None
    """How long the largest session runs before it may be suspended: its swap time, at least a short
    minimum. ``None``: an older daemon, which does not send it."""
    foretold: int = 0
    """Number of the last waits (at most a hundred, of a second or more) whose first forecast is
    known. ``foretold_well`` of them came within two seconds or a quarter of their forecast."""
    foretold_well: int = 0

    @property
    def sharing(self) -> str:
        """Return how notebooks share the GPU now, and why, in words."""
        now = terms.ONE_AT_A_TIME if self.serialised else terms.IN_PARALLEL
        return f"{now}: {self.why}" if self.why else now


class PolicyStatus(Struct, frozen=True, kw_only=True):
    """A policy that the daemon has. ``summary`` says what it does, in a few words for people."""

    name: str
    summary: str


class QueueEntry(Struct, frozen=True, kw_only=True):
    session: str
    position: int
    expected_wait_s: float | None
    waited_s: float = 0.0
    expected_low_s: float | None = None
    expected_high_s: float | None = None
    expected_why: str = ""
    """The four ``expected_`` fields mean the same as those of ``Waiting``."""
    blocked: bool = False
    """Whether it waits because of a fault, not for its turn. Its session's ``problem_text`` names
    the fault."""
    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it ("an admin"). Such entries come last."""


class SwapStatus(Struct, frozen=True, kw_only=True):
    """A move of memory that ended. ``ago_s`` is its age; ``direction`` is "out" or "in". ``name``
    is the session's, which may have ended; "": not known any more."""

    session: str
    direction: Direction
    bytes_moved: int
    seconds: float
    ago_s: float
    name: str = ""


class SessionStatus(Struct, frozen=True, kw_only=True):
    """``mine``: the reader may act on it. Names and pids of other users' sessions are blank:
    ``name`` is then "another user", ``pid`` 0, ``kernel_id`` "". ``pager`` says what moves its
    memory; ``unowned`` is what the preloaded library cannot move, by kind."""

    id: str
    pid: int
    owner: str
    name: str
    state: SessionState
    resident_bytes: int
    paged_out_bytes: int
    suspensions: int
    held_s: float
    waited_s: float
    mine: bool = False
    kernel_id: str = ""
    connected: bool = True
    lingering: bool = False
    peak_bytes: int | None = None
    time_left_s: float | None = None
    """For a holder, the most that is left of its turn while others wait; it may be less."""
    keeps_s: float | None = None
    """How long at most it keeps its place in the GPU from a waiter, in case its next cell comes;
    ``None``: it keeps none, or nobody needs it."""
    problem: str = ""
    problem_text: str = ""
    priority: Priority = Priority.NORMAL
    pager: MovedBy = MovedBy.CHECKPOINT
    pager_text: str = ""
    """Why the driver moves its memory although Kiwi's library was asked to, and the remedy; "":
    nothing to say, or not for the reader."""
    unowned: dict[str, int] = field(default_factory=dict)
    guarded: bool = True
    """True if Kiwi's gate is in front of the driver in all its processes that use the GPU. If not,
    it is never stopped in mid-burst; ``unguarded_text`` gives the reason and the remedy."""
    unguarded_text: str = ""
    stopped: str = ""
    """Why its process does not run (Ctrl-Z, a frozen control group, a debugger); "": it runs."""
    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it, whether or not it waits; "": nobody."""
    ram_bytes: int | None = None
    """System RAM of its process and of its other processes with Kiwi's gate, including what is
    paged out. ``None``: not known, or not for the reader."""


class GpuStatus(Struct, frozen=True, kw_only=True):
    """``history_serial`` is the newest serial of the history; ``may_set``: the reader may change
    settings; ``policies`` are those that may be set."""

    uuid: str
    name: str
    index: int
    emulated: bool
    memory: MemoryStatus
    scheduler: SchedulerStatus
    holders: list[str]
    queue: list[QueueEntry]
    sessions: list[SessionStatus]
    swaps: list[SwapStatus] = field(default_factory=list)
    driver_version: str = ""
    daemon_version: str = ""
    daemon_pid: int = 0
    uptime_s: float = 0.0
    pager_text: str = ""
    """What moves the memory of programs that ask for nothing, and why; "": an older daemon."""
    errors: list[str] = field(default_factory=list)
    history_serial: int = 0
    may_set: bool = False
    policies: list[PolicyStatus] = field(default_factory=list)
    gauges: GaugesStatus = GaugesStatus()
    outside: list[OutsideProgram] = field(default_factory=list)
    """The programs that hold ``memory.outside_bytes``, as far as NVML names them."""
    newcomer_wait_s: float | None = None
    """How long a new session would wait if it asked now, after the expected ones. ``None``: not
    known, because a fault or a program outside Kiwi holds it up.
    """
    expected: int = 0
    """Number of programs that servers have placed here and that neither are sessions yet nor use
    the GPU outside Kiwi."""


class StoryLine(Struct, frozen=True, kw_only=True):
    ago_s: float
    text: str


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """A stretch of time in which ``session`` did one thing. ``id`` stays; ``serial`` is new each
    time the entry changes (it began, it ended). ``ended_ago_s`` is ``None`` while it goes on.

    ``bytes_moved``, ``ok`` and ``hinted`` (a hint was the reason) matter for "out" and "in" only,
    and the first two only after the end.
    """

    id: int
    serial: int
    session: str
    kind: HistoryKind
    began_ago_s: float
    ended_ago_s: float | None
    bytes_moved: int = 0
    ok: bool = True
    hinted: bool = False


class HistorySession(Struct, frozen=True, kw_only=True):
    """The session of history entries, as far as the reader may know it; it may have ended."""

    name: str
    mine: bool
    kernel_id: str


class UsageRow(Struct, frozen=True, kw_only=True):
    """What one user, or one notebook or job of a user (``name``), has had. ``waited_s`` is for
    bursts that had not begun, ``suspended_s`` for those that had; ``moving_s`` is how long its
    memory was being moved. Rows that the reader may not see in detail are one sum with the
    ``owner`` "another user"; rows that do not fit in one message are one sum with the ``owner``
    "all others"."""

    owner: str
    name: str
    mine: bool
    held_s: float
    waited_s: float
    suspended_s: float
    moving_s: float
    moved_out_bytes: int
    moved_in_bytes: int
    bursts: int
    suspensions: int
