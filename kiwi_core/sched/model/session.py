"""The scheduler's record of one session. Each field says what it must agree with.

Three independent fields make up the state of a session: where its memory is (``residency``), what
it wants (``want``), and which operation is in progress on it (``op``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.failures import Failures
from kiwi_core.sched.model.memory import Memory
from kiwi_core.sched.model.operations import Operations
from kiwi_core.sched.model.program import Program
from kiwi_core.sched.model.standing import Standing
from kiwi_core.sched.model.turn import QUEUED, RUNNING, Turn
from kiwi_core.states import NOT_FREE

if TYPE_CHECKING:
    from kiwi_core.sched.model.stories import Story

PEAKS_KEPT: Final = 8
"""Bursts whose peaks count for the expected need: the notebook's present phase only."""

DURATIONS_KEPT: Final = 20
"""Bursts whose lengths count for expected waits (the number that the simulations used)."""


@dataclass(slots=True, eq=False)
class Session(Memory, Operations, Turn, Program, Failures, Standing):
    """The record of one session. Its parts (the base classes) are each in a module of their own,
    which alone writes their fields: rules tell a part what happened (``session.process_stops``).
    """

    story: Story = field(default_factory=deque)
    """What happened to it lately; the same object is in ``State.stories``."""

    kept_out: str = ""
    """Who keeps it out of the GPU until they resume it, in words for users ("an admin"); "":
    nobody."""

    leaving: bool = False
    """Detached: to be forgotten as soon as its memory is in the GPU and its process is free."""
    gone: bool = False
    """Its process is dead, but ``op`` has not reported; it is in no queue and only counted."""

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
    def unlocked(self) -> bool:
        """Whether only the scheduler's records hold it: it had no GPU memory, so the driver could
        not lock it."""
        return self.residency in NOT_FREE and not self.footprint_bytes and self.op is None

    @property
    def aside(self) -> bool:
        """Return whether it wants the GPU, is kept out of it, and no longer holds it."""
        return bool(self.kept_out) and self.want is QUEUED and not self.stopping


@dataclass(slots=True, eq=False)
class RoomRequest:
    """An allocation that found no room. It is in ``State.room_requests`` until it is denied, or
    promised and then seen in a reading of its session's memory."""

    session: Session
    request: int
    bytes: int
    asked_ns: int
    promised_ns: int | None = None
