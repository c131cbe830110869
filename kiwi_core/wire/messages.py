"""Every message of Kiwi's protocol, as tagged structs. ``docs/protocol.md`` explains them.

One JSON object per line over a Unix stream socket; ``type`` names the message. Unknown fields are
ignored (room for later versions), unknown types are an error. Times on the wire are seconds.

A connection begins with ``hello`` and ``welcome``. A *session* connection belongs to one process
(which the kernel's socket credentials name). An *observer* connection reads status and controls
sessions. A *pager* connection belongs to the preloaded library (see ``wire.pager``).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kiwi_core.states import AntiThrash, Notice, Priority
from kiwi_core.wire.base import INTEGER_LIMIT, Message
from kiwi_core.wire.metrics import GpuMetrics
from kiwi_core.wire.pager import (
    Gate,
    PagerDo,
    PagerDone,
    PagerLimits,
    PagerState,
    Room,
    WantLease,
    WantRoom,
)
from kiwi_core.wire.status import GaugesStatus as GaugesStatus
from kiwi_core.wire.status import GpuStatus as GpuStatus
from kiwi_core.wire.status import HistoryEntry as HistoryEntry
from kiwi_core.wire.status import HistorySession as HistorySession
from kiwi_core.wire.status import MemoryStatus as MemoryStatus
from kiwi_core.wire.status import OutsideProgram as OutsideProgram
from kiwi_core.wire.status import PolicyStatus as PolicyStatus
from kiwi_core.wire.status import QueueEntry as QueueEntry
from kiwi_core.wire.status import SchedulerStatus as SchedulerStatus
from kiwi_core.wire.status import SessionStatus as SessionStatus
from kiwi_core.wire.status import StoryLine as StoryLine
from kiwi_core.wire.status import SwapStatus as SwapStatus
from kiwi_core.wire.status import UsageRow as UsageRow

if TYPE_CHECKING:
    from kiwi_core.errors import KiwiError

PROTOCOL = 1
"""Version of the protocol. A peer with another version gets an error and is disconnected."""

Burst = Annotated[int, Meta(ge=1, lt=INTEGER_LIMIT)]
"""Number of a burst; counts up in its process, from 1."""

LastBurst = Annotated[int, Meta(ge=0, lt=INTEGER_LIMIT)]
"""Like ``Burst``; 0 means that there was none yet."""

Serial = Annotated[int, Meta(ge=0, lt=INTEGER_LIMIT)]
"""Number of a change in a GPU's history, from 1; 0 is before the first."""

UnixTime = Annotated[float, Meta(ge=0, lt=INTEGER_LIMIT)]
"""Seconds since 1970 (UTC)."""

PathText = Annotated[str, Meta(max_length=4096)]
"""A path on this machine; the limit is Linux's ``PATH_MAX``."""


Reasoning = Annotated[str, Meta(max_length=1024)]
"""A few sentences for people, including the remedy."""

PolicyName = Annotated[str, Meta(max_length=64)]
"""Name of a policy; the daemon checks it. See ``docs/policies.md``."""


class Role(str, Enum):
    SESSION = "session"
    OBSERVER = "observer"
    PAGER = "pager"
    """The library that is preloaded into programs."""


# --- client to daemon ---------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of every connection.

    ``burst`` and ``in_burst`` matter on reconnection: ``burst`` is the burst that this process is
    in (it holds the lease for it, or believes so), or the last one it had. ``folder``: see
    ``Rename``. ``kernel_id`` is Jupyter's. ``cuda_library`` is the path of the ``libcuda`` that
    this process has already loaded, if any: a real driver and an emulating daemon do not mix.
    ``owns`` and ``could_own`` matter for a preloaded library. ``owns``: it owns the program's GPU
    memory and can move it; if false, it is only the gate, and the driver moves the memory.
    ``could_own``: neither is so yet. The program has no context, ``owns`` is what it has asked for,
    and ``welcome`` decides. ``ungated`` says why this process has no gate in front of the driver
    ("": it has one, or does not say).
    """

    protocol: int
    role: Role
    client: str
    name: str = ""
    folder: PathText = ""
    kernel_id: str = ""
    burst: LastBurst = 0
    in_burst: bool = False
    cuda_library: PathText = ""
    owns: bool = True
    could_own: bool = False
    ungated: Reasoning = ""


class Acquire(Message, frozen=True, kw_only=True, tag="acquire"):
    """Ask for the GPU for ``burst`` (a number that counts up in this process). Answered by
    ``granted``, at once or later, with ``waiting`` in between.
    """

    burst: Burst


class Withdraw(Message, frozen=True, kw_only=True, tag="withdraw"):
    """Stop waiting (the user interrupted). Answered by ``withdrawn``. If ``granted`` was already on
    its way, this ends the burst; the answer is the same."""

    burst: Burst


class EndBurst(Message, frozen=True, kw_only=True, tag="end-burst"):
    """The burst is over. ``lingering``: threads or tasks that it started live on; a second
    ``end-burst`` without it follows when they are done. No answer."""

    burst: Burst
    lingering: bool = False


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """Move the memory of ``session`` (empty: one's own) out of the GPU now. Answered by ``ok`` when
    the move has begun. An observer must name a session that it may act on."""

    session: str = ""


class Suspend(Message, frozen=True, kw_only=True, tag="suspend"):
    """Keep ``session`` (empty: one's own) out of the GPU until ``resume``: its turn ends now, its
    memory goes out, and its bursts wait. Answered by ``ok`` when that has begun."""

    session: str = ""


class Resume(Message, frozen=True, kw_only=True, tag="resume"):
    """Let ``session`` (empty: one's own) have the GPU again; its burst joins the end of the queue.
    Answered by ``ok``, also if nobody kept it out."""

    session: str = ""


class BringBack(Message, frozen=True, kw_only=True, tag="bring-back"):
    """A hint that the program of ``session`` (empty: one's own) is about to be used: page its
    memory in if that delays nobody. Never grants a lease. Answered by ``hint``."""

    session: str = ""


class Rename(Message, frozen=True, kw_only=True, tag="rename"):
    """Give ``session`` (empty: one's own) another name: its notebook was renamed or moved.
    ``folder`` is shown with it only where two of one user's sessions have the same name. Answered
    by ``ok``."""

    session: str = ""
    name: str
    folder: PathText = ""


class Expect(Message, frozen=True, kw_only=True, tag="expect"):
    """Announce that a program of this user will soon be a session here: it counts when other
    programs choose between GPUs. ``key`` names it; a session that says hello with it as its
    ``kernel_id`` takes the place, or one of the process ``pid``, a child of the sender by its pid
    there (0: it does not run yet). The place ends with that process, or else with the sender. It
    lapses after ``for_s`` seconds; 0 takes it back. ``name`` is what the program is called while it
    uses the GPU without a name of its own. Answered by ``ok``.
    """

    key: str
    for_s: float
    pid: int = 0
    name: str = ""


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """Leave Kiwi while the process lives on. Answered by ``ok`` once everything is back in the
    GPU; the daemon then closes."""


class GetStatus(Message, frozen=True, kw_only=True, tag="get-status"):
    """Answered by ``status``. With ``watch`` the daemon sends another one whenever something
    changes (at most a few times a second), until the connection ends."""

    watch: bool = False


class Set(Message, frozen=True, kw_only=True, tag="set"):
    """Change settings; needs the daemon's owner or an allowed group. Answered by ``ok``.
    ``priority`` is the new class of ``session``; the other three settings are the GPU's."""

    tq_s: float | None = None
    anti_thrash: AntiThrash | None = None
    policy: PolicyName | None = None
    session: str = ""
    priority: Priority | None = None


class GetStory(Message, frozen=True, kw_only=True, tag="get-story"):
    """Ask for the last events of a session of one's own. Answered by ``story``."""

    session: str


class GetMetrics(Message, frozen=True, kw_only=True, tag="get-metrics"):
    """Answered by ``metrics``."""


class GetHistory(Message, frozen=True, kw_only=True, tag="get-history"):
    """Ask who held, waited and moved: all entries that changed after the change numbered ``since``.
    Answered by ``history``."""

    since: Serial = 0


class UsageBy(str, Enum):
    """What each row of ``usage`` sums up."""

    USER = "user"
    NOTEBOOK = "notebook"
    JOB = "job"
    """A batch job (Slurm's) of a user; ``name`` is its number, "" for what belongs to none."""


class GetUsage(Message, frozen=True, kw_only=True, tag="get-usage"):
    """Ask how much of the GPU users, notebooks or jobs have had since ``since_unix_s`` (0: for as
    long as there are records). Answered by ``usage``.
    """

    by: UsageBy = UsageBy.USER
    since_unix_s: UnixTime = 0.0


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Answered by ``pong``."""


ClientMessage = (
    Hello
    | Acquire
    | Withdraw
    | EndBurst
    | Release
    | Suspend
    | Resume
    | BringBack
    | Rename
    | Expect
    | Goodbye
    | GetStatus
    | Set
    | GetStory
    | GetHistory
    | GetMetrics
    | GetUsage
    | Ping
    | PagerState
    | PagerDone
    | WantLease
    | WantRoom
)


# --- daemon to client ---------------------------------------------------------------------------


class Emulation(Struct, frozen=True, kw_only=True):
    """How to run on the daemon's emulated driver: load these two libraries before the first driver
    call, and set this environment (children need it too)."""

    libcuda: str
    libnvml: str
    env: dict[str, str]


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """``own`` decides whether a preloaded library owns the program's GPU memory or is only the
    gate; ``None`` in the other roles. A library that has said ``could_own`` follows it; for others
    it only repeats their ``owns``. If false, ``own_why`` is the code of the reason
    (``states.GateOnly``).
    """

    protocol: int
    daemon: str
    gpu_uuid: str
    gpu_index: int
    gpu_name: str
    session: str = ""
    emulation: Emulation | None = None
    own: bool | None = None
    own_why: str = ""


class Granted(Message, frozen=True, kw_only=True, tag="granted"):
    """The client has the GPU. Sent again, with the same burst, after each suspension in mid-burst.

    ``burst`` is 0 if a call at the gate of the program asked for the GPU, not its client.
    """

    burst: LastBurst
    quantum_s: float


class Waiting(Message, frozen=True, kw_only=True, tag="waiting"):
    """The client's place in the queue. Sent when it changes, and about every second. ``burst`` is 0
    if a call waits at the gate of the program and its client has not asked.

    ``holder`` says who has the GPU in words that the reader may see ("train.ipynb", "another user",
    ""). ``expected_wait_s`` is ``None`` if there is no forecast. The wait is likely between
    ``expected_low_s`` and ``expected_high_s`` (``None``: not known; all three equal: the forecast
    is exact). During a wait they fall or stay; if they had to be set anew, ``expected_why`` says
    why. ``blocked`` is set when the wait is not for a turn but for a fault; ``detail`` then
    explains it in plain words.
    """

    burst: LastBurst
    position: int
    ahead: int
    holder: str = ""
    expected_wait_s: float | None = None
    expected_low_s: float | None = None
    expected_high_s: float | None = None
    expected_why: str = ""
    activity: str = ""
    blocked: Notice | None = None
    detail: str = ""


class Withdrawn(Message, frozen=True, kw_only=True, tag="withdrawn"):
    burst: Burst


class UserNotice(Message, frozen=True, kw_only=True, tag="notice"):
    """Something that the user of this session must know, in plain words."""

    notice: Notice
    text: str
    remedy: str = ""


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    pass


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    pass


class Error(Message, frozen=True, kw_only=True, tag="error"):
    """A message failed. ``about`` is the ``type`` of the message that this answers (empty: the
    oldest one without an answer). ``fatal``: the daemon closes the connection after this."""

    code: str
    message: str
    remedy: str = ""
    fatal: bool = False
    about: str = ""

    @classmethod
    def of(cls, error: KiwiError, *, fatal: bool = False, about: str = "") -> Error:
        """Return the message that reports ``error`` to the other end."""
        return cls(
            code=error.code, message=error.message, remedy=error.remedy, fatal=fatal, about=about
        )


class StatusReport(Message, frozen=True, kw_only=True, tag="status"):
    gpu: GpuStatus


class StoryReport(Message, frozen=True, kw_only=True, tag="story"):
    session: str
    lines: list[StoryLine]


class MetricsReport(Message, frozen=True, kw_only=True, tag="metrics"):
    metrics: GpuMetrics


class HistoryReport(Message, frozen=True, kw_only=True, tag="history"):
    """``entries`` are in the order of their serials, none above ``last``. ``more``: one message
    cannot hold all; ask for those since ``last``."""

    last: int
    entries: list[HistoryEntry]
    sessions: dict[str, HistorySession]
    more: bool = False


class UsageReport(Message, frozen=True, kw_only=True, tag="usage"):
    """``rows``: longest holders of the GPU first. ``began_unix_s``: when the records begin;
    ``None``: there are none. ``complete``: false if the latest records could not be written."""

    began_unix_s: float | None
    rows: list[UsageRow]
    complete: bool = True


class HintReport(Message, frozen=True, kw_only=True, tag="hint"):
    """``begun``: the memory is being paged in. If false, ``why`` says why not, in plain words."""

    begun: bool
    why: str = ""


DaemonMessage = (
    Welcome
    | Granted
    | Waiting
    | Withdrawn
    | UserNotice
    | Ok
    | Pong
    | Error
    | StatusReport
    | StoryReport
    | HistoryReport
    | HintReport
    | MetricsReport
    | UsageReport
    | Gate
    | PagerDo
    | PagerLimits
    | Room
)
