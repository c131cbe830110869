"""What a daemon's reports are made of: the structs inside ``status``, ``story``, ``history`` and
``usage``. ``docs/protocol.md`` says it in prose."""

from __future__ import annotations

from msgspec import Struct, field

from kiwi_core.states import AntiThrash, Direction, HistoryKind, MovedBy, Priority, SessionState


class MemoryStatus(Struct, frozen=True, kw_only=True):
    total_bytes: int
    free_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    outside_bytes: int = 0
    """Held by programs that are not Kiwi's."""
    arena_bytes: int = 0
    """System RAM that preloaded libraries hold: what is out through them, and what is for speed."""


class GaugesStatus(Struct, frozen=True, kw_only=True):
    """How hard the GPU works, as NVML said a few seconds ago. ``None``: nobody knows."""

    utilisation_percent: int | None = None
    """The share of the last moments in which any kernel ran."""
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


class OutsideProgram(Struct, frozen=True, kw_only=True):
    """A program outside Kiwi that has GPU memory. Another user's has neither name nor pid: ``name``
    is then "another user", ``pid`` 0, and one entry has the sum of all of them."""

    pid: int
    owner: str
    name: str
    used_bytes: int


class SchedulerStatus(Struct, frozen=True, kw_only=True):
    tq_s: float
    anti_thrash: AntiThrash
    serialised: bool
    why: str = ""
    swap_round_trip_s: float | None = None
    policy: str = ""
    floor_s: float | None = None
    """How long the largest session runs before it may be suspended: what swapping it costs, and a
    little at least. ``None``: an older daemon, which does not say."""
    foretold: int = 0
    """Of so many of the last waits (a hundred at most, of a second or more) it is known what was
    shown first; ``foretold_well`` of them came within two seconds or a quarter of it."""
    foretold_well: int = 0

    @property
    def sharing(self) -> str:
        """How notebooks share the GPU now, and why; in words, each said once."""
        now = "one at a time" if self.serialised else "in parallel"
        if now in self.why:
            return self.why
        return f"{now} ({self.why})" if self.why else now


class PolicyStatus(Struct, frozen=True, kw_only=True):
    """One that the daemon has. ``summary``: what it does, in a few words for people."""

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
    """These as in ``Waiting``."""
    blocked: bool = False
    """It is held up by something other than its turn; its session's ``problem_text`` says what."""
    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it ("an admin"). Such entries come last."""


class SwapStatus(Struct, frozen=True, kw_only=True):
    """One move of memory that ended. ``ago_s`` is its age."""

    session: str
    direction: Direction
    bytes_moved: int
    seconds: float
    ago_s: float


class SessionStatus(Struct, frozen=True, kw_only=True):
    """``mine``: the reader may act on it. Names and pids of other users' sessions are blank:
    ``name`` is then "another user", ``pid`` 0, ``kernel_id`` "". ``pager`` says what moves its
    memory; ``unowned`` has, by kind, what the preloaded library cannot move."""

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
    """A holder's: it makes way for the first in line by then, perhaps earlier."""
    problem: str = ""
    problem_text: str = ""
    priority: Priority = Priority.NORMAL
    pager: MovedBy = MovedBy.CHECKPOINT
    unowned: dict[str, int] = field(default_factory=dict)
    guarded: bool = True
    """Kiwi's gate is in front of the driver in all its processes that use the GPU. Without it the
    session is never stopped in mid-burst, and ``unguarded_text`` says why, and what to do."""
    unguarded_text: str = ""
    stopped: str = ""
    """Why its process does not run (Ctrl-Z, a frozen control group, a debugger); "": it runs."""
    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it, whether or not it waits; "": nobody."""
    ram_bytes: int | None = None
    """What its process, and its others that have Kiwi's gate, have of system RAM, with what is
    paged out. ``None``: not known, or not the reader's."""


class GpuStatus(Struct, frozen=True, kw_only=True):
    """``history_serial`` is the newest of the history's; ``may_set``: the reader may change
    settings; ``policies``: those that may be set."""

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
    errors: list[str] = field(default_factory=list)
    history_serial: int = 0
    may_set: bool = False
    policies: list[PolicyStatus] = field(default_factory=list)
    gauges: GaugesStatus = GaugesStatus()
    outside: list[OutsideProgram] = field(default_factory=list)
    """Who has ``memory.outside_bytes``, as far as NVML names them."""


class StoryLine(Struct, frozen=True, kw_only=True):
    ago_s: float
    text: str


class HistoryEntry(Struct, frozen=True, kw_only=True):
    """One stretch of time in which ``session`` did one thing. ``id`` stays; ``serial`` is new each
    time the entry changes (it began, it ended). ``ended_ago_s``: ``None`` while it goes on.

    ``bytes_moved``, ``ok`` and ``hinted`` (a hint was the reason) matter for "out" and "in" only,
    and the first two once that has ended.
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
    """Whose an entry is, as far as the reader may know; also of a session that ended."""

    name: str
    mine: bool
    kernel_id: str


class UsageRow(Struct, frozen=True, kw_only=True):
    """What one user, or one notebook of a user (``name``), has had. ``waited_s`` is of bursts that
    had not begun, ``suspended_s`` of those that had; ``moving_s`` is how long its memory was being
    moved. Of what the reader may not know in detail there is one sum: its ``owner`` is "another
    user"; and one for all rows that one message cannot hold: "all others"."""

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
