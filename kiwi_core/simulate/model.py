"""The simulated machine, its faults and the settings; the work itself is in ``trace``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kiwi_core.config import DEFAULTS, Config
from kiwi_core.sched.policy import DEFAULT
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, NS_PER_MS, TIB

GB: Final = 10**9
"""Speeds are given in decimal gigabytes per second, as vendors do."""


@dataclass(frozen=True)
class SimulatedMachine:
    """One GPU and its way to system RAM."""

    total_bytes: int = 80 * GIB
    host_budget_bytes: int = 2 * TIB
    out_bytes_per_s: float = 25.0 * GB
    in_bytes_per_s: float = 25.0 * GB
    swap_fixed_ns: int = 100 * NS_PER_MS
    """Cost of a move that does not depend on its size: locking the process, its contexts."""
    hold_ns: int = 10 * NS_PER_MS
    """Time to hold a process, or to release it, without moving anything."""
    noise: float = 0.2
    """The speed of each move is drawn evenly from 1 ± this."""
    contention: float = 1.0
    """How much runners side by side slow each other down. 1: the GPU's time is divided among
    them; 0: each runs as if alone."""
    look_ns: int = 3 * NS_PER_MS
    """Time from the end of a cell to the end of its burst, in which the daemon reads its memory."""


@dataclass(frozen=True)
class FaultRates:
    """Probabilities of faults: per operation, ``kill`` per cell."""

    refuse: float = 0.0
    """An operation is refused: the process did not come to rest in time, or the driver refused."""
    hang: float = 0.0
    """A driver call returns only long after its deadline."""
    kill: float = 0.0
    """The kernel dies in the middle of the cell's GPU part and is restarted by its user."""

    @property
    def any(self) -> bool:
        return bool(self.refuse or self.hang or self.kill)


NO_FAULTS: Final = FaultRates()
RESTART_NS: Final = 30_000 * NS_PER_MS
"""Time from the death of a kernel until its user has a new one."""
HANG_NS: Final = 60_000 * NS_PER_MS
"""Mean time by which a hanging call outlasts its deadline."""


class Placing(Enum):
    """The rule that chooses a node and a GPU for a session that starts."""

    PACK = "pack"
    """The first node and GPU that have a free place."""
    SPREAD = "spread"
    """The node, and there the GPU, with the fewest sessions."""
    WAIT = "wait"
    """The node of the shortest wait (of equals the fewest sessions), as the weights said when they
    were last read; and there the GPU of the shortest wait now."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of the same kind, and how their engine places sessions on them."""

    nodes: int
    gpus: int
    """GPUs of each node."""
    places: int = 16
    """The most sessions on one GPU; others wait until one ends."""
    stay_hours: float = 4.0
    """How long each session stays if it never waits."""
    weight_delay_ns: int = 60_000 * NS_PER_MS
    """Time between two readings of the nodes' waits (Slurm: ``HealthCheckInterval``)."""

    @property
    def gpus_in_all(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Setup:
    """A policy and its settings, to be compared with others."""

    policy: str = DEFAULT
    tq_ns: int = DEFAULTS.tq_ns
    anti_thrash: AntiThrash = AntiThrash.ON
    placing: Placing = Placing.WAIT
    """Only of a cluster."""
    config: Config = DEFAULTS
