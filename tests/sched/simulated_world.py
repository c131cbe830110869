"""The parts of the simulation's world: its plan, its processes, its counts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.sched.policy import names
from kiwi_core.states import AntiThrash, Notice, Reason
from kiwi_core.units import MIB, NS_PER_MS, NS_PER_S, SessionId

if TYPE_CHECKING:
    from kiwi_core.sched import actions as act

TOTAL_BYTES = 1000 * MIB
CONFIG = replace(
    DEFAULTS,
    min_run_ns=500 * NS_PER_MS,
    lingering_idle_ns=NS_PER_S,
    hint_interval_ns=4 * NS_PER_S,
    hint_protect_ns=NS_PER_S,
    residue_idle_ns=NS_PER_S,
    residue_pause_ns=NS_PER_S,
    room_patience_ns=3 * NS_PER_S,
)
BYTES_PER_S = 2000 * MIB
FIXED_NS = 2 * NS_PER_MS
JITTER_NS = 5 * NS_PER_MS
REASONS = (
    Reason.LOCK_TIMEOUT, Reason.DRIVER, Reason.NO_HOST_MEMORY, Reason.UNSUPPORTED,
    Reason.NOT_PERMITTED, Reason.NO_JOB_MEMORY,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The settings of a world. Probabilities are per operation or per occasion."""

    sessions: int = 5
    owners: int = 0
    """Number of users whose sessions they are; 0: each is its own user's."""

    mode: AntiThrash = AntiThrash.ON
    policy: str = "round-robin"
    tq_ns: int = 2 * NS_PER_S
    bytes_max: int = 700 * MIB
    host_budget_bytes: int = 1 << 40
    refuse: float = 0.0
    lose: float = 0.0
    hang: float = 0.0
    mischief: float = 0.0
    """Probability, at each observation, of a kill, detachment, change of settings, restart …"""

    asks_for_room: bool = False
    """Whether programs that find no room for an allocation ask for it."""

    owned: float = 0.0
    """Probability that a library owns a session's memory and a page-out leaves some; may change."""

    residue_bytes: int = 20 * MIB
    """The most that such a page-out leaves, unless it is interrupted."""

    away: bool = False
    """Whether users are away for long between their bursts."""

    unguarded: float = 0.0
    """Probability that a program has no gate; may change. Programs are stopped now and then."""

    cramped: float = 0.0
    """Probability that the job of a session has too little RAM for its memory to be paged out; that
    may change."""

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong, so that the bound on waits must hold."""
        faults = self.refuse or self.lose or self.hang or self.mischief or self.cramped
        return not faults and self.host_budget_bytes > 1 << 36


def plan_of(seed: int) -> Plan:
    """Return a different world for each seed; every third one is calm."""
    rng = random.Random(seed ^ 0x5EED)
    modes = (AntiThrash.ON, AntiThrash.ON, AntiThrash.ALWAYS, AntiThrash.OFF)
    plan = Plan(
        sessions=rng.randint(2, 9),
        owners=rng.choice((0, 0, 1, 2, 3)),
        mode=rng.choice(modes),
        policy=names()[seed % len(names())],
        tq_ns=rng.choice((NS_PER_S // 2, 2 * NS_PER_S, 6 * NS_PER_S)),
        bytes_max=rng.choice((200, 450, 700, 950)) * MIB,
        asks_for_room=rng.random() < 0.5,
    )
    if seed % 3 == 0:
        return plan
    return replace(
        plan,
        refuse=rng.choice((0.0, 0.1, 0.4)),
        lose=rng.choice((0.0, 0.03)),
        hang=rng.choice((0.0, 0.05)),
        mischief=rng.choice((0.02, 0.2)),
        host_budget_bytes=rng.choice((300 * MIB, 1500 * MIB, 1 << 40)),
    )


def owned_plan_of(seed: int) -> Plan:
    """Return the same world with libraries that own the memory."""
    return replace(plan_of(seed), owned=(0.6, 1.0)[seed % 2])


def away_plan_of(seed: int) -> Plan:
    """Return a similar world in which the contexts of idle sessions take much of the GPU."""
    plan = replace(owned_plan_of(seed), sessions=10 + seed % 4, away=True)
    budget_bytes = max(plan.host_budget_bytes, 1500 * MIB)
    sizes = {"residue_bytes": 110 * MIB, "bytes_max": 450 * MIB}
    return replace(plan, host_budget_bytes=budget_bytes, **sizes)


def unguarded_plan_of(seed: int) -> Plan:
    """Return the same world with programs that have no gate."""
    return replace(plan_of(seed), unguarded=(0.3, 0.6, 1.0)[seed // 3 % 3])


def cramped_plan_of(seed: int) -> Plan:
    """Return a similar world with jobs that have too little RAM and that idle for long. There is
    enough system RAM, or nobody would try to move them."""
    plan = replace(plan_of(seed), cramped=(0.3, 0.7)[seed % 2], bytes_max=950 * MIB)
    return replace(plan, sessions=3 + seed % 4, refuse=plan.refuse / 4, host_budget_bytes=1 << 40)


@dataclass(eq=False)
class Flight:
    """An operation in the simulated driver."""

    action: act.Operation
    verdict: str
    incoming_bytes: int = 0
    """GPU memory that is reserved for a page-in."""
    done: bool = False
    overdue: bool = False


@dataclass(eq=False)
class Proc:
    """The real state of one notebook's process."""

    id: SessionId
    out: bool = False
    held: bool = False
    owned: bool = False
    device_bytes: int = 0
    host_bytes: int = 0
    taken_bytes: int = 0
    """The part of ``host_bytes`` that the driver took of what a library had left in the GPU."""
    taken_ns: int = -(10**18)
    """When it was last taken."""
    stands: bool = False
    """A call of it is known to wait for that."""
    flight: Flight | None = None

    phase: str = "idle"
    """idle · waiting · running · lingering"""
    burst: int = 0
    begun: bool = False
    work_ns: int = 0
    since_ns: int = 0
    token: int = 0
    wanted: tuple[int, int] | None = None
    """Number and bytes of its request for room."""
    asked_ns: int = 0
    bound_ns: int | None = None
    rested_ns: int = -(10**18)
    granted_ns: int = 0
    brought_back_ns: int = -(10**18)
    lost: bool = False
    leaving: bool = False
    guarded: bool = True
    stopped: bool = False
    cramped: bool = False
    """Its job has too little RAM: page-outs are refused."""
    beside: set[SessionId] = field(default_factory=set)
    """Who was refusing to be stopped when its last operation began."""
    kept_out: bool = False
    held_since_ns: int | None = None
    """When it began to hold the lease without a gate; ``None``: it does not."""
    overtime_ns: int = 0
    """How long sessions had held the lease without a gate when this one asked."""


@dataclass
class Counts:
    events: int = 0
    grants: int = 0
    suspensions: int = 0
    page_ins: int = 0
    refusals: int = 0
    no_room: int = 0
    overdue: int = 0
    lost: int = 0
    kills: int = 0
    restarts: int = 0
    out_of_memory: int = 0
    room_made: int = 0
    room_denied: int = 0
    granted_in_parallel: int = 0
    brought_back: int = 0
    rests: int = 0
    """Number of page-outs of memory that an earlier page-out had left."""
    rests_early: int = 0
    """Number of those that nobody needed the room of."""
    rests_back: int = 0
    rests_back_at_once: int = 0
    """Number of rests that came back because a call was known to wait."""
    unguarded_grants: int = 0
    stops: int = 0
    kept_out: int = 0
    notices: dict[Notice, int] = field(default_factory=dict)
