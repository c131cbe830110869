"""The scheduler's record of one session. Each field says what it must agree with.

Three independent fields make up the state of a session: where its memory is (``residency``), what
it wants (``want``), and which operation is in progress on it (``op``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.sched.model.cramped import Cramped
from kiwi_core.sched.model.failures import Failures
from kiwi_core.sched.model.history import Record
from kiwi_core.sched.model.memory import Memory
from kiwi_core.sched.model.needs import Needs
from kiwi_core.sched.model.program import Program
from kiwi_core.sched.model.tenancy import Tenancy
from kiwi_core.sched.model.turn import Turn, Want
from kiwi_core.states import NOT_FREE, Notice, Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.stories import Story


@dataclass(slots=True, eq=False)
class Session(Memory, Turn, Needs, Tenancy, Program, Failures, Cramped, Record):
    """The record of one session. Each of its parts, the base classes, is in a module of its own,
    which alone writes the fields of the part. A rule calls a method of the part
    (``session.came_in(...)``) and reads the fields freely.

    The parts are base classes rather than attributes because rules read some hundred fields per
    event: ``session.turn.want`` takes half as long again as ``session.want``. ``Record``, which
    brings ``Operations`` and ``Standing``, is the last one, so that ``id`` is the first argument.
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

    asked_bytes: int = 0
    """The sum of its ``RoomRequest``s: allocations that found no room and are not yet held."""

    footprint_bytes: int = 0
    """GPU memory that the session takes when all of it is in. Kept by ``refresh``."""
    need_bytes: int = 0
    """GPU memory that it is expected to take while it runs. Kept by ``refresh``."""
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
        holds = self.want is Want.RUNNING or self.turn_ending
        return now_ns - self.granted_ns if holds else 0

    def may_not_come_yet(self, now_ns: int) -> bool:
        """Return whether a page-in or resume was refused so recently that it is not tried again
        yet. A refused page-out does not keep a suspended session from going on: it is tried again
        and again while others wait, and meanwhile nobody would run.
        """
        if self.residency is Residency.RESIDENT or self.backoff_until_ns <= now_ns:
            return False
        return (
            self.residency is not Residency.SUSPENDED or self.problem is not Notice.PAGE_OUT_REFUSED
        )

    @property
    def waits(self) -> bool:
        """Return whether it waits for the first turn of a burst."""
        return self.want is Want.QUEUED and not self.mid_burst and not self.leaving

    @property
    def in_burst(self) -> bool:
        """Return whether it is in a burst, suspended or not."""
        return self.want is Want.RUNNING or self.mid_burst

    @property
    def only_recorded(self) -> bool:
        """Return whether only the scheduler's records have it as suspended or out: it had no GPU
        memory, so the driver could not lock it.
        """
        return self.residency in NOT_FREE and not self.footprint_bytes and self.op is None

    @property
    def aside(self) -> bool:
        """Return whether it wants the GPU, is kept out of it, and no longer holds it."""
        return bool(self.kept_out) and self.want is Want.QUEUED and not self.turn_ending


@dataclass(slots=True, eq=False)
class RoomRequest:
    """An allocation that found no room. It is in ``State.room_requests`` until it is denied, or
    promised and then seen in a reading of its session's memory."""

    session: Session
    request: int
    bytes: int
    asked_ns: int
    promised_ns: int | None = None
