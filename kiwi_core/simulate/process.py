"""One kernel process of the simulation."""

from __future__ import annotations

import random
from enum import Enum
from typing import TYPE_CHECKING

from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.simulate.driver import Flight
    from kiwi_core.simulate.trace import Cell


class BurstPhase(Enum):
    THINKING = "thinking"
    WAITING = "waiting"
    RUNNING = "running"
    """The burst has begun; it may be suspended."""


class SimulatedProcess:
    """The real state of one kernel process, which may differ from the scheduler's record."""

    __slots__ = (
        "asked_ns", "burst", "cells", "flight", "granted_ns", "held", "host_bytes",
        "id", "index", "milestones", "next_cell", "phase", "resident_bytes", "rng",
    )  # fmt: skip

    def __init__(self, session_id: str, index: int, cells: tuple[Cell, ...], seed: str) -> None:
        self.id = SessionId(session_id)
        self.index = index
        """The index of its session in the trace."""
        self.cells = cells
        self.next_cell = 0
        self.rng = random.Random(seed)
        self.phase = BurstPhase.THINKING
        self.burst = 0
        self.asked_ns = self.granted_ns = 0
        self.milestones: list[tuple[float, Callable[[SimulatedProcess], None]]] = []
        """The remaining pieces of the cell's GPU part, the next one last: the work of each in
        nanoseconds, and the function to call at its end."""
        self.resident_bytes = self.host_bytes = 0
        self.held = False
        self.flight: Flight | None = None
