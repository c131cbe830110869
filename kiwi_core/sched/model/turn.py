"""What a session wants (nothing, its turn, or to go on running), and the times of its turns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.states import Notice


class Want(Enum):
    NONE = "none"
    QUEUED = "queued"
    """The session waits for the lease, or (``leaving``) for its memory to be paged in."""
    RUNNING = "running"
    """The session holds the lease."""


@dataclass(eq=False)
class Turn:
    """The part of ``Session`` about its bursts and turns. Only this module writes its fields.

    A burst waits (``asks``), runs (``granted``), may be suspended and wait again any number of
    times (``makes_way``, ``queues_again``), and ends (``rests``).
    """

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    want: Want = Want.NONE
    """RUNNING exactly while in ``State.runners``; QUEUED exactly while in ``State.queue``, or
    beside it if ``kept_out``."""
    burst: int = 0
    """The number of the burst that is wanted or runs, or else of the last one."""
    mid_burst: bool = False
    """The burst began and was suspended; only while QUEUED."""
    asked_ns: int = 0
    """When its burst was requested."""
    queued_ns: int = 0
    """When its wait began; only while QUEUED."""
    granted_ns: int = 0
    """When its quantum began; only while RUNNING or being suspended."""
    began_ns: int = 0
    """When its turn began on the clock of ``RecentUsage``; only while it holds the lease."""
    attained_ns: int = 0
    """How long this burst has held the lease in earlier quanta."""
    rested_ns: int | None = None
    """When its last burst ended; ``None`` before that."""
    hinted_ns: int | None = None
    """When a hint paged it in; ``None`` once the session has been used since."""
    blocked: Notice | None = None
    """Why it waits for something other than its turn; only while QUEUED."""
    blocked_detail: str = ""

    # --- waiting --------------------------------------------------------------------------------

    def asks(self, burst: int, mid_burst: bool, now_ns: int) -> None:
        """Wait for the first turn of ``burst``, or, if it was suspended before, for the next
        one."""
        self.want = Want.QUEUED
        self.burst = burst
        self.mid_burst = mid_burst
        self.asked_ns = self.queued_ns = now_ns
        self.attained_ns = 0
        self.hinted_ns = None

    def asks_to_leave(self, now_ns: int) -> None:
        """Wait without a burst until its memory is paged in."""
        self.want = Want.QUEUED
        self.queued_ns = now_ns

    def note_burst(self, burst: int) -> None:
        """Record the number of a burst that it neither waits for nor runs."""
        self.burst = max(self.burst, burst)

    def queues_again(self, now_ns: int) -> None:
        self.queued_ns = now_ns

    def block(self, notice: Notice, detail: str) -> None:
        """Record why it waits for something other than its turn."""
        self.blocked = notice
        self.blocked_detail = detail

    def unblock(self) -> None:
        """Record that only its turn is missing, or that it does not wait."""
        self.blocked = None
        self.blocked_detail = ""

    # --- holding the lease ----------------------------------------------------------------------

    def granted(self, now_ns: int, clock_ns: int) -> None:
        """Hold the lease from now on, for a fresh quantum. ``clock_ns`` is on the clock of
        ``RecentUsage``."""
        self.want = Want.RUNNING
        self.mid_burst = False
        self.granted_ns = now_ns
        self.began_ns = clock_ns
        self.blocked, self.blocked_detail = None, ""

    def runs_on(self) -> None:
        """Hold the lease as before, because it could not be suspended."""
        self.want = Want.RUNNING
        self.mid_burst = False
        self.unblock()

    def makes_way(self, now_ns: int) -> None:
        """Wait for the next turn. It holds the lease until it has been suspended."""
        self.want = Want.QUEUED
        self.mid_burst = True
        self.queued_ns = now_ns

    def held_for(self, had_ns: int) -> None:
        """Count a quantum that is over, in whatever way it ended."""
        self.attained_ns += had_ns

    # --- at rest --------------------------------------------------------------------------------

    def rests(self, now_ns: int) -> None:
        """Want nothing."""
        if self.want is not Want.NONE:
            self.rested_ns = now_ns
        self.want = Want.NONE
        self.mid_burst = False
        if self.blocked is not None:
            self.unblock()

    def brought_back(self, now_ns: int) -> None:
        """Record that its memory was paged in because of a hint."""
        self.hinted_ns = now_ns
