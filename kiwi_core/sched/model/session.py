"""The scheduler's record of one session. Only data; every field says what it must agree with.

Three things are independent of each other and together are the session's state: where its memory
is (``home``), what it wants (``want``), and which operation is under way on it (``op``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.states import Priority

if TYPE_CHECKING:
    from kiwi_core.states import Notice
    from kiwi_core.units import OpId, SessionId

PEAKS_KEPT: Final = 8
"""Bursts whose peaks count for the expected need: a notebook's phase, not its whole past."""

DURATIONS_KEPT: Final = 20
"""Bursts whose length counts for expected waits (the number that simulations were run with)."""


class Home(Enum):
    """Where its memory is, by the last outcome that was reported."""

    IN = "in"
    """In the GPU; the process is free to run."""
    HELD = "held"
    """In the GPU; the process is held at its next driver call."""
    OUT = "out"
    """In system RAM; the process is held."""
    LOST = "lost"
    """The contents are gone."""


_HELD_HOMES: Final = frozenset({Home.HELD, Home.OUT})


class Want(Enum):
    NONE = "none"
    QUEUED = "queued"
    """Waits for the lease, or (``leaving``) for its memory to be brought back."""
    RUNNING = "running"
    """Holds the lease."""


class Doing(Enum):
    # Enum's own hash is a Python function; this is looked up in each operation.
    __hash__ = object.__hash__

    SUSPENDING = "suspending"
    RESUMING = "resuming"
    PAGING_OUT = "paging-out"
    PAGING_IN = "paging-in"


@dataclass(slots=True, eq=False)
class Running:
    """An operation that has not reported. In ``State.ops`` under ``op`` exactly as long as the
    session's ``op`` field refers to it."""

    op: OpId
    doing: Doing
    started_ns: int
    stops_runner: bool = False
    """It stops a session that held the lease: until it reports, that one still holds."""
    hinted: bool = False
    """Nobody waits for it: it follows from a hint."""
    move_id: int = 0
    """Of its entry in the history; 0 unless it moves memory."""
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Session:
    id: SessionId

    home: Home = Home.IN
    resident_bytes: int = 0
    """In the GPU, by the last observation or outcome. Often 0 when ``home`` is OUT, but a library
    leaves what it cannot own, a page-out cut short leaves some, and a process that had nothing to
    hold may allocate."""
    paged_out_bytes: int = 0
    """In system RAM; counts against the host budget. 0 unless OUT."""
    restore_bytes: int = 0
    """What bringing it back takes in the GPU (contexts included). Only meaningful while OUT."""
    op: Running | None = None
    owned: bool = False
    """Libraries in its processes own its memory and move it, by the last observation. They can ask
    for room, and what they cannot own stays in the GPU when the session is out."""
    moved_at_ns: int = -1
    """When its last operation reported; what was read before that is old."""

    read_ns: int = -1
    """When the last reading of its memory began."""
    left_ns: int = -1
    """When it last gave up the lease without telling what it has left in the GPU. A reading that
    began earlier is old."""

    guarded: bool = True
    """Kiwi's gate is in front of the driver in all its processes, as far as is known. Without it
    the session is not stopped in mid-burst."""
    at_work: bool = False
    """The GPU worked for it at the last observation, or may still do so after its last burst. Only
    matters for one without a gate that does not hold the lease."""
    stopped: str = ""
    """Why its process does not run at all just now (Ctrl-Z ...), for people; "": it runs."""
    fixed: bool = False
    """Its memory could not be moved since its process was stopped: nobody tries again before the
    process goes on."""

    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it, for people ("an admin"); "": nobody."""

    want: Want = Want.NONE
    """RUNNING exactly while in ``State.runners``; QUEUED exactly while in ``State.queue``, or
    beside it if ``kept_out``."""
    burst: int = 0
    """Number of the burst that is wanted or runs, or of the last one."""
    mid_burst: bool = False
    """The burst began and was stopped; only while QUEUED."""
    lingering: bool = False
    """Its cell is over but something that it started goes on; only while RUNNING or mid_burst."""
    busy: bool | None = None
    """Whether the GPU worked for it, by the last observation of this burst; None: nobody knows."""
    busy_at_ns: int = 0
    """When it was last seen busy, or began to linger."""
    leaving: bool = False
    """Detached: to be forgotten as soon as its memory is in and the process free."""
    gone: bool = False
    """Its process is dead, but ``op`` has not reported; in no queue, only on the books."""

    asked_ns: int = 0
    """When its burst was asked for."""
    granted_ns: int = 0
    """When its quantum began; only while RUNNING or being stopped."""
    queued_ns: int = 0
    """Since when it waits; only while QUEUED."""
    turn_id: int = 0
    """Of the history's entry that goes on, exactly while ``history.turn_of`` has one."""
    attained_ns: int = 0
    """How long this burst has held the lease in earlier quanta."""
    held_ns: int = 0
    """How long it has held the lease in earlier quanta, all bursts together."""
    waited_ns: int = 0
    suspended_ns: int = 0
    """The part of ``waited_ns`` after its bursts had begun."""
    suspensions: int = 0
    bursts_begun: int = 0
    moving_ns: int = 0
    """How long its memory was on the move, out and in, in moves that succeeded."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0

    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    """Of its priority class; a power of two."""
    share: float = 0.0
    """That its priority class is to have at least; 0: none."""
    began_ns: int = 0
    """What the clock of ``Usage`` showed when its turn began; only while it holds the lease."""
    had: float = 0.0
    """What it has had of the GPU lately while others waited; only ``Usage`` can read it."""
    favoured: float = 0.0
    """Of that, what it had because the policy put it before others; likewise."""
    level: int = 0
    """The policy's: where it stands in the queue, or stood before its grant."""
    protected_until_ns: int = 0
    """The policy's: it does not make way before."""

    bursts_ended: int = 0
    burst_peak_bytes: int = 0
    """The most that it held in this burst."""
    peaks_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=PEAKS_KEPT))
    """Of its last bursts."""
    peak_bytes: int = 0
    """The largest of ``peaks_bytes``; and of this burst, once that has gone on for long."""
    earlier_peak_bytes: int = 0
    """The largest of ``peaks_bytes`` as they were before the last burst."""
    growth_bytes: int = 0
    """What the last burst grew by beyond that."""
    quiet_bursts: int = 0
    """Bursts since one that grew; all of them if none did."""
    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=DURATIONS_KEPT))

    rested_ns: int | None = None
    """When its last burst ended; ``None`` before that."""
    hinted_ns: int | None = None
    """When a hint brought it back; ``None`` once it was used since."""

    backoff_ns: int = 0
    """The last wait after a refusal; 0 after a success."""
    backoff_until_ns: int = 0
    """Nothing is tried on it before."""
    unmovable: bool = False
    """The driver cannot move its memory, or must not: while this burst goes on its program is not
    stopped for that again."""
    extra_room_bytes: int = 0
    """Asked for beyond its need because a restore was refused for room; 0 after a success."""

    problem: Notice | None = None
    """What is wrong with this session as a target of operations."""
    problem_detail: str = ""
    blocked: Notice | None = None
    """Why it waits for something other than its turn; only while QUEUED."""
    blocked_detail: str = ""

    asked_bytes: int = 0
    """Sum of its ``Wish``es: found no room for, and not yet seen to be held."""

    footprint_bytes: int = 0
    """What it takes in the GPU when all of it is in. Kept by ``State.refresh``."""
    need_bytes: int = 0
    """What it is expected to take while it runs. Kept by ``State.refresh``."""
    counted_active_bytes: int = 0
    """Its part of ``State.active_need_bytes``."""
    counted_resident_bytes: int = 0
    """Its part of ``State.resident_bytes``."""
    counted_claim_bytes: int = 0
    """Its part of ``State.claimed_bytes``."""
    counted_host_bytes: int = 0
    """Its part of ``State.host_claimed_bytes``."""

    def run_ns(self, now_ns: int) -> int:
        """How long its present turn has lasted; 0 unless it holds the lease."""
        holds = self.want is Want.RUNNING or self.stopping
        return now_ns - self.granted_ns if holds else 0

    @property
    def unread(self) -> bool:
        """Its memory has not been read since it gave up the lease."""
        return self.read_ns < self.left_ns

    @property
    def partly_in(self) -> bool:
        """It is out, cannot run, and has something in the GPU all the same."""
        return self.owned and self.home is Home.OUT and self.resident_bytes > 0

    @property
    def loose(self) -> bool:
        """Held by the books only: it had no GPU memory, so the driver could not hold it."""
        return self.home in _HELD_HOMES and not self.footprint_bytes and self.op is None

    @property
    def aside(self) -> bool:
        """It wants the GPU, is kept out of it, and does not hold it any more."""
        return bool(self.kept_out) and self.want is Want.QUEUED and not self.stopping

    @property
    def stuck(self) -> bool:
        return self.op is not None and self.op.overdue

    @property
    def stopping(self) -> bool:
        """It held the lease and is being stopped; until that has reported it may still run."""
        return self.op is not None and self.op.stops_runner


@dataclass(slots=True, eq=False)
class Wish:
    """An allocation that found no room. In ``State.wishes`` until it was denied, or promised and
    then seen in a reading of its session's memory."""

    session: Session
    request: int
    bytes: int
    asked_ns: int
    promised_ns: int | None = None
