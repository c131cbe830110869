"""Every message of Kiwi's protocol, as tagged structs. ``docs/protocol.md`` says it in prose.

One JSON object per line over a Unix stream socket; ``type`` names the message. Unknown fields are
ignored (room for later versions), unknown types are an error. Times on the wire are seconds.

A connection begins with ``hello`` and ``welcome``. A *session* connection belongs to one process
(the one the kernel's socket credentials name); an *observer* connection only looks and steers.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct, field

from kiwi_core.states import AntiThrash, HistoryKind, Notice, Priority, SessionState
from kiwi_core.wire.metrics import GpuMetrics

PROTOCOL = 1
"""Version of the protocol; a peer with another one is told so and the connection is closed."""

BURST_LIMIT = 1 << 53
"""Burst numbers stay below: the largest integers that every JSON reader keeps exact."""

Burst = Annotated[int, Meta(ge=1, lt=BURST_LIMIT)]
"""Number of a burst: counts up in its process, from 1."""

LastBurst = Annotated[int, Meta(ge=0, lt=BURST_LIMIT)]
"""Like ``Burst``; 0 says that there was none yet."""

Serial = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Counts the changes of a GPU's history, from 1; 0 is before the first."""

UnixTime = Annotated[float, Meta(ge=0, lt=1 << 53)]
"""Seconds since 1970 (UTC)."""

PathText = Annotated[str, Meta(max_length=4096)]
"""A path of this machine; Linux's own limit (``PATH_MAX``)."""


PolicyName = Annotated[str, Meta(max_length=64)]
"""The daemon knows which there are; see ``docs/policies.md``."""


class Role(str, Enum):
    SESSION = "session"
    OBSERVER = "observer"


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=False):
    pass


# --- client to daemon ---------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of every connection.

    ``burst`` and ``in_burst`` matter on reconnection: the burst that this process is in (it holds,
    or believes to hold, the lease for it), or the last one it had. ``kernel_id`` is Jupyter's.
    ``cuda_library`` is the path of the ``libcuda`` that this process has already loaded, if any:
    a real driver and an emulating daemon do not mix.
    """

    protocol: int
    role: Role
    client: str
    name: str = ""
    kernel_id: str = ""
    burst: LastBurst = 0
    in_burst: bool = False
    cuda_library: PathText = ""


class Acquire(_Message, frozen=True, kw_only=True, tag="acquire"):
    """Ask for the GPU for ``burst`` (a number that counts up in this process). Answered by
    ``granted``, at once or later, with ``waiting`` in between."""

    burst: Burst


class Withdraw(_Message, frozen=True, kw_only=True, tag="withdraw"):
    """Stop waiting (the user interrupted). Answered by ``withdrawn``. Where ``granted`` was already
    on its way, this ends the burst; the answer is the same."""

    burst: Burst


class EndBurst(_Message, frozen=True, kw_only=True, tag="end-burst"):
    """The burst is over. ``lingering``: threads or tasks that it started live on; a second
    ``end-burst`` without it follows when they are done. No answer."""

    burst: Burst
    lingering: bool = False


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """Move the memory of ``session`` out of the GPU now (empty: one's own). Answered by ``ok``
    when it is under way. An observer must name one that it may act on."""

    session: str = ""


class BringBack(_Message, frozen=True, kw_only=True, tag="bring-back"):
    """A hint: the program of ``session`` (empty: one's own) is about to be used, so bring its
    memory back if that is in nobody's way. Never a lease. Answered by ``hint``."""

    session: str = ""


class Goodbye(_Message, frozen=True, kw_only=True, tag="goodbye"):
    """Leave Kiwi while the process lives on. Answered by ``ok`` once everything is back in the
    GPU; the daemon then closes."""


class GetStatus(_Message, frozen=True, kw_only=True, tag="get-status"):
    """Answered by ``status``. ``watch``: and again whenever something changes (at most a few times
    a second) until the connection ends."""

    watch: bool = False


class Set(_Message, frozen=True, kw_only=True, tag="set"):
    """Change settings; needs the daemon's owner or an allowed group. Answered by ``ok``.
    ``priority`` is the class of ``session`` from now on; the other three are the GPU's."""

    tq_s: float | None = None
    anti_thrash: AntiThrash | None = None
    policy: PolicyName | None = None
    session: str = ""
    priority: Priority | None = None


class GetStory(_Message, frozen=True, kw_only=True, tag="get-story"):
    """Answered by ``story``: the last things that happened to a session of one's own."""

    session: str


class GetMetrics(_Message, frozen=True, kw_only=True, tag="get-metrics"):
    """Answered by ``metrics``."""


class GetHistory(_Message, frozen=True, kw_only=True, tag="get-history"):
    """Answered by ``history``: who held, waited and moved, as far as it changed after the change
    of the number ``since``."""

    since: Serial = 0


class UsageBy(str, Enum):
    """What the sums of ``usage`` are of."""

    USER = "user"
    NOTEBOOK = "notebook"


class GetUsage(_Message, frozen=True, kw_only=True, tag="get-usage"):
    """Answered by ``usage``: what users or notebooks have had of the GPU since ``since_unix_s``
    (0: as far as it is known)."""

    by: UsageBy = UsageBy.USER
    since_unix_s: UnixTime = 0.0


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Answered by ``pong``."""


ClientMessage = (
    Hello
    | Acquire
    | Withdraw
    | EndBurst
    | Release
    | BringBack
    | Goodbye
    | GetStatus
    | Set
    | GetStory
    | GetHistory
    | GetMetrics
    | GetUsage
    | Ping
)


# --- daemon to client ---------------------------------------------------------------------------


class Emulation(Struct, frozen=True, kw_only=True):
    """How to run on the same emulated driver as the daemon: load these two libraries before the
    first driver call, with this environment (which children need too)."""

    libcuda: str
    libnvml: str
    env: dict[str, str]


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    protocol: int
    daemon: str
    gpu_uuid: str
    gpu_index: int
    gpu_name: str
    session: str = ""
    emulation: Emulation | None = None


class Granted(_Message, frozen=True, kw_only=True, tag="granted"):
    """The GPU is yours. Repeated, with the same burst, after each suspension in mid-burst."""

    burst: Burst
    quantum_s: float


class Waiting(_Message, frozen=True, kw_only=True, tag="waiting"):
    """Where you stand. Sent when it changes, and every second or so while waiting.

    ``holder`` says who has the GPU in words that the reader may see ("train.ipynb", "another
    user", ""); ``expected_wait_s`` is ``None`` where nobody can tell. ``blocked`` is set when the
    wait is not for a turn but for something that is wrong; ``detail`` then has the plain words.
    """

    burst: Burst
    position: int
    ahead: int
    holder: str = ""
    expected_wait_s: float | None = None
    activity: str = ""
    blocked: Notice | None = None
    detail: str = ""


class Withdrawn(_Message, frozen=True, kw_only=True, tag="withdrawn"):
    burst: Burst


class Told(_Message, frozen=True, kw_only=True, tag="notice"):
    """Something that the user of this session must know, in plain words."""

    notice: Notice
    text: str
    remedy: str = ""


class Ok(_Message, frozen=True, kw_only=True, tag="ok"):
    pass


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    pass


class Error(_Message, frozen=True, kw_only=True, tag="error"):
    """A message could not be done. ``about`` is the ``type`` of the message that this answers
    (empty: the oldest one without an answer). ``fatal``: the connection is closed after this."""

    code: str
    message: str
    remedy: str = ""
    fatal: bool = False
    about: str = ""


class MemoryStatus(Struct, frozen=True, kw_only=True):
    total_bytes: int
    free_bytes: int
    paged_out_bytes: int
    host_budget_bytes: int
    outside_bytes: int = 0
    """Held by programs that are not Kiwi's."""


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


class PolicyStatus(Struct, frozen=True, kw_only=True):
    """One that the daemon has. ``summary``: what it does, in a few words for people."""

    name: str
    summary: str


class QueueEntry(Struct, frozen=True, kw_only=True):
    session: str
    position: int
    expected_wait_s: float | None
    waited_s: float = 0.0


class SwapStatus(Struct, frozen=True, kw_only=True):
    """One move of memory that ended. ``ago_s`` is its age; ``direction`` is "out" or "in"."""

    session: str
    direction: str
    bytes_moved: int
    seconds: float
    ago_s: float


class SessionStatus(Struct, frozen=True, kw_only=True):
    """``mine``: the reader may act on it. Names and pids of other users' sessions are blank:
    ``name`` is then "another user", ``pid`` 0, ``kernel_id`` ""."""

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
    problem: str = ""
    problem_text: str = ""
    priority: Priority = Priority.NORMAL


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


class StatusReport(_Message, frozen=True, kw_only=True, tag="status"):
    gpu: GpuStatus


class StoryLine(Struct, frozen=True, kw_only=True):
    ago_s: float
    text: str


class StoryReport(_Message, frozen=True, kw_only=True, tag="story"):
    session: str
    lines: list[StoryLine]


class MetricsReport(_Message, frozen=True, kw_only=True, tag="metrics"):
    metrics: GpuMetrics


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


class HistoryReport(_Message, frozen=True, kw_only=True, tag="history"):
    """``entries`` in the order of their serials, none above ``last``. ``more``: there are more
    than one message holds; ask for those since ``last``."""

    last: int
    entries: list[HistoryEntry]
    sessions: dict[str, HistorySession]
    more: bool = False


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


class UsageReport(_Message, frozen=True, kw_only=True, tag="usage"):
    """``rows``: who held the GPU longest first. ``began_unix_s``: from when on it was counted, at
    the earliest; ``None``: nothing was. Not ``complete``: what came last could not be written."""

    began_unix_s: float | None
    rows: list[UsageRow]
    complete: bool = True


class HintReport(_Message, frozen=True, kw_only=True, tag="hint"):
    """``begun``: the memory is on its way in. If not, ``why``, in words for people."""

    begun: bool
    why: str = ""


DaemonMessage = (
    Welcome
    | Granted
    | Waiting
    | Withdrawn
    | Told
    | Ok
    | Pong
    | Error
    | StatusReport
    | StoryReport
    | HistoryReport
    | HintReport
    | MetricsReport
    | UsageReport
)
