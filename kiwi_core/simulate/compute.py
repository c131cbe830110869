"""The speed of runners. Runners side by side share the GPU evenly: all have the same speed.

A clock of *work* runs at that common speed. A piece of work of length w that begins at reading v
ends at v + w, however often the speed changes meanwhile. So a change costs O(log n).
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kiwi_core.simulate.process import SimulatedProcess

NEVER_NS: Final = 1 << 62


class Compute:
    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._work_ns = 0.0
        """The clock of work."""
        self._at_ns = 0
        """The time at which the clock was last advanced."""
        self._ends: list[tuple[float, int, SimulatedProcess]] = []
        self._computing: dict[SimulatedProcess, tuple[float, int]] = {}
        """Where the piece of each process ends on the clock of work, and the piece's number."""
        self._seq = 0
        self.given_ns = 0.0
        """Work done by all processes together."""
        self.busy_ns = 0
        """Time in which at least one process computed."""
        self.next_end_ns = NEVER_NS
        """When the first piece ends if nothing changes before."""

    def begin(self, proc: SimulatedProcess, piece_ns: float, now_ns: int) -> None:
        """Let ``proc`` compute from now on, until ``piece_ns`` of work are done or ``stop``."""
        self._advance(now_ns)
        self._seq += 1
        end = self._work_ns + piece_ns
        self._computing[proc] = (end, self._seq)
        heapq.heappush(self._ends, (end, self._seq, proc))
        self._plan()

    def stop(self, proc: SimulatedProcess, now_ns: int) -> float:
        """Stop ``proc`` and return the rest of its piece; 0 if it did not compute."""
        if proc not in self._computing:
            return 0.0
        self._advance(now_ns)
        end, _ = self._computing.pop(proc)
        self._plan()
        return max(0.0, end - self._work_ns)

    def take_ended(self, now_ns: int) -> SimulatedProcess:
        """Remove and return the process whose piece ends now (``now_ns`` is ``next_end_ns``)."""
        self._advance(now_ns)
        _, _, proc = heapq.heappop(self._ends)
        del self._computing[proc]
        self._plan()
        return proc

    def __contains__(self, proc: SimulatedProcess) -> bool:
        return proc in self._computing

    def _speed(self) -> float:
        return 1.0 / (1.0 + self._contention * (len(self._computing) - 1))

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self._at_ns
        self._at_ns = now_ns
        if passed_ns and self._computing:
            done_ns = passed_ns * self._speed()
            self._work_ns += done_ns
            self.given_ns += done_ns * len(self._computing)
            self.busy_ns += passed_ns

    def _plan(self) -> None:
        while self._ends:
            end, seq, proc = self._ends[0]
            current = self._computing.get(proc)
            if current is not None and current[1] == seq:
                left_ns = max(0.0, end - self._work_ns)
                self.next_end_ns = self._at_ns + math.ceil(left_ns / self._speed())
                return
            heapq.heappop(self._ends)  # it was stopped meanwhile
        self.next_end_ns = NEVER_NS
