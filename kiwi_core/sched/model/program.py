"""Facts about the program of a session: its gate, its process, and its use of the GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Program:
    """The part of ``Session`` about its program. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    guarded: bool = True
    """Kiwi's gate is in front of the driver in all its processes, as far as is known. A session
    without the gate is not suspended in mid-burst."""
    stopped: str = ""
    """Why its process does not run at all (Ctrl-Z ...), in words for users; "": it runs."""
    at_work: bool = False
    """The GPU worked for it at the last observation, or may still do so after its last burst. Only
    matters for a session without a gate that does not hold the lease."""
    busy: bool | None = None
    """Whether the GPU worked for it, by the last observation of this turn; None: unknown."""
    busy_at_ns: int = 0
    """When the session was last seen busy, or began to linger."""
    lingering: bool = False
    """Its cell is over but something that the cell started goes on; only while RUNNING or
    mid_burst."""

    def gate_found(self, guarded: bool) -> None:
        self.guarded = guarded

    def process_stops(self, why: str) -> None:
        self.stopped = why

    def process_runs(self) -> None:
        self.stopped = ""

    def turn_begins(self, now_ns: int) -> None:
        self.busy = None
        self.busy_at_ns = now_ns

    def seen_at_work(self, busy: bool) -> None:
        """Record whether the GPU works for it, whether or not it holds the lease."""
        self.at_work = busy

    def seen_in_turn(self, busy: bool, now_ns: int) -> None:
        self.busy = busy
        if busy:
            self.busy_at_ns = now_ns

    def cell_ends(self, now_ns: int) -> None:
        """Record that its cell is over, but not what the cell started."""
        self.lingering = True
        self.busy_at_ns = now_ns

    def lingers_no_more(self) -> None:
        self.lingering = False

    def burst_ends(self) -> None:
        self.at_work = False

    def may_work_on(self) -> None:
        """Record that the GPU may still work for it although its burst has ended."""
        self.at_work = True
