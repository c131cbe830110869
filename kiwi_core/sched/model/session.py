"""The scheduler's record of one session. Only data; each field says what it must agree with.

Three independent fields make up the state of a session: where its memory is (``residency``), what
it wants (``want``), and which operation is in progress on it (``op``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.failures import Failures
from kiwi_core.sched.model.program import Program
from kiwi_core.sched.model.standing import Standing
from kiwi_core.sched.model.turn import QUEUED, RUNNING, Turn
from kiwi_core.states import NOT_FREE, Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.stories import Story
    from kiwi_core.units import OpId

PEAKS_KEPT: Final = 8
"""Bursts whose peaks count for the expected need: the notebook's present phase only."""

DURATIONS_KEPT: Final = 20
"""Bursts whose lengths count for expected waits (the number that the simulations used)."""


class Doing(Enum):
    # Enum's own hash is a Python function, and each operation looks members up in dicts.
    __hash__ = object.__hash__

    SUSPENDING = "suspending"
    RESUMING = "resuming"
    PAGING_OUT = "paging-out"
    PAGING_IN = "paging-in"


# Each member under its own name. Python 3.11 takes 100 ns to read a member from its class and 6 ns
# to read a global name, and an event of the scheduler reads some thirty.
RESIDENT: Final = Residency.RESIDENT
SUSPENDED: Final = Residency.SUSPENDED
PAGED_OUT: Final = Residency.PAGED_OUT
LOST: Final = Residency.LOST
SUSPENDING: Final = Doing.SUSPENDING
RESUMING: Final = Doing.RESUMING
PAGING_OUT: Final = Doing.PAGING_OUT
PAGING_IN: Final = Doing.PAGING_IN


@dataclass(slots=True, eq=False)
class Running:
    """An operation that has not reported yet. It is in ``State.ops`` under ``op`` exactly as long
    as the session's ``op`` field refers to it."""

    op: OpId
    doing: Doing
    started_ns: int
    stops_runner: bool = False
    """The operation stops a session that held the lease; the session holds until it reports."""
    hinted: bool = False
    """The operation follows from a hint; no session waits for it."""
    move_id: int = 0
    """The id of its entry in the history; 0 unless it moves memory."""
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Session(Turn, Program, Failures, Standing):
    """The record of one session. Its parts (the base classes) are each in a module of their own,
    which alone writes their fields: rules tell a part what happened (``session.process_stops``).
    """

    story: Story = field(default_factory=deque)
    """What happened to it lately; the same object is in ``State.stories``."""

    residency: Residency = RESIDENT
    """Where its memory is, by the last reported outcome."""
    resident_bytes: int = 0
    """Memory in the GPU, by the last observation or outcome. Often 0 when ``residency`` is
    PAGED_OUT, but a library leaves what it cannot own, an interrupted page-out leaves some, and a
    process that had no GPU memory (so the driver could not lock it) may allocate."""
    paged_out_bytes: int = 0
    """Memory in system RAM; counts against the host budget. 0 unless PAGED_OUT."""
    restore_bytes: int = 0
    """GPU memory that a page-in takes (contexts included). Only meaningful while PAGED_OUT."""
    op: Running | None = None
    owned: bool = False
    """Libraries in its processes own its memory and move it, by the last observation. They can ask
    for room, and what they cannot own stays in the GPU when the session is out."""
    moved_at_ns: int = -1
    """When its last operation reported; a reading from before that is stale."""

    read_ns: int = -1
    """When the last reading of its memory began."""
    left_ns: int = -1
    """When the session last gave up the lease without reporting what it left in the GPU. A
    reading that began earlier is stale."""

    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it, in words for users ("an admin"); "":
    nobody."""

    leaving: bool = False
    """Detached: to be forgotten as soon as its memory is in the GPU and its process is free."""
    gone: bool = False
    """Its process is dead, but ``op`` has not reported; it is in no queue and only counted."""

    moving_ns: int = 0
    """How long its memory was being paged out or in, in moves that succeeded."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0

    bursts_ended: int = 0
    burst_peak_bytes: int = 0
    """The most memory that it held in this burst."""
    peaks_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=PEAKS_KEPT))
    """The peaks of its last bursts."""
    peak_bytes: int = 0
    """The largest of ``peaks_bytes``, including this burst's peak once it has lasted long."""
    earlier_peak_bytes: int = 0
    """The largest of ``peaks_bytes`` before the last burst."""
    growth_bytes: int = 0
    """How far the last burst grew beyond ``earlier_peak_bytes``."""
    quiet_bursts: int = 0
    """Bursts since the last one that grew; all of them if none did."""
    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=DURATIONS_KEPT))

    asked_bytes: int = 0
    """The sum of its ``RoomRequest``s: allocations that found no room and are not yet held."""

    footprint_bytes: int = 0
    """GPU memory that the session takes when all of it is in. Kept by ``State.refresh``."""
    need_bytes: int = 0
    """GPU memory that it is expected to take while it runs. Kept by ``State.refresh``."""
    counted_active_bytes: int = 0
    """Its part of ``State.active_need_bytes``."""
    counted_resident_bytes: int = 0
    """Its part of ``State.resident_bytes``."""
    counted_claim_bytes: int = 0
    """Its part of ``State.claimed_bytes``."""
    counted_host_bytes: int = 0
    """Its part of ``State.host_claimed_bytes``."""

    def run_ns(self, now_ns: int) -> int:
        """Return how long its present turn has lasted; 0 unless it holds the lease."""
        holds = self.want is RUNNING or self.stopping
        return now_ns - self.granted_ns if holds else 0

    @property
    def unread(self) -> bool:
        """Return whether its memory has not been read since it gave up the lease."""
        return self.read_ns < self.left_ns

    @property
    def partly_in(self) -> bool:
        """Return whether it is out and cannot run, but has some memory in the GPU."""
        return self.owned and self.residency is PAGED_OUT and self.resident_bytes > 0

    @property
    def unlocked(self) -> bool:
        """Whether only the scheduler's records hold it: it had no GPU memory, so the driver could
        not lock it."""
        return self.residency in NOT_FREE and not self.footprint_bytes and self.op is None

    @property
    def aside(self) -> bool:
        """Return whether it wants the GPU, is kept out of it, and no longer holds it."""
        return bool(self.kept_out) and self.want is QUEUED and not self.stopping

    @property
    def stuck(self) -> bool:
        return self.op is not None and self.op.overdue

    @property
    def stopping(self) -> bool:
        """Return whether it held the lease and is being stopped; it may run until the operation
        reports."""
        return self.op is not None and self.op.stops_runner


@dataclass(slots=True, eq=False)
class RoomRequest:
    """An allocation that found no room. It is in ``State.room_requests`` until it is denied, or
    promised and then seen in a reading of its session's memory."""

    session: Session
    request: int
    bytes: int
    asked_ns: int
    promised_ns: int | None = None
