"""The simulated driver: how long the scheduler's operations take and how they end.

Moves in one direction run one after another: they wait for the bus and the pinning of host pages.
Moves in opposite directions do not slow each other down.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut, Suspend
from kiwi_core.simulate.model import HANG_NS
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from random import Random

    from kiwi_core.sched.actions import Operation
    from kiwi_core.simulate.model import FaultRates, SimulatedMachine


class CallVerdict(Enum):
    DONE = "done"
    REFUSED = "refused"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation in progress."""

    action: Operation
    moved_bytes: int
    began_ns: int
    ends_ns: int
    verdict: CallVerdict
    hangs: bool
    was_held: bool
    """Whether the process was held before this operation began."""

    @property
    def is_overdue(self) -> bool:
        """Return whether the operation ends only after its deadline."""
        return self.ends_ns > self.action.deadline_ns


class SimulatedDriver:
    def __init__(self, machine: SimulatedMachine, faults: FaultRates, lock_timeout_ns: int) -> None:
        self._machine = machine
        self._faults = faults
        self._lock_timeout_ns = lock_timeout_ns
        self._out_free_at_ns = 0
        self._in_free_at_ns = 0

    def start(
        self, action: Operation, moved_bytes: int, room_bytes: int, held: bool, rng: Random,
        now_ns: int,
    ) -> Flight:  # fmt: skip
        """Begin ``action``. ``room_bytes`` are free in the GPU; ``rng`` decides about faults."""
        draw = rng.random() if self._faults.any else 1.0
        refused = draw < self._faults.refuse
        hangs = not refused and draw < self._faults.refuse + self._faults.hang
        verdict = CallVerdict.REFUSED if refused else CallVerdict.DONE
        if isinstance(action, PageIn) and action.need_bytes > room_bytes:
            verdict = CallVerdict.NO_ROOM
        if verdict is not CallVerdict.DONE:
            waits_for_lock = isinstance(action, (Suspend, PageOut)) and not held
            ends_ns = now_ns + (self._lock_timeout_ns if waits_for_lock else self._machine.hold_ns)
        elif hangs:
            ends_ns = action.deadline_ns + int(rng.expovariate(1.0) * HANG_NS)
        else:
            ends_ns = self._ends_ns(action, moved_bytes, rng, now_ns)
        return Flight(action, moved_bytes, now_ns, ends_ns, verdict, hangs, held)

    def _ends_ns(self, action: Operation, moved_bytes: int, rng: Random, now_ns: int) -> int:
        machine = self._machine
        if not isinstance(action, (PageOut, PageIn)):
            return now_ns + machine.hold_ns
        outwards = isinstance(action, PageOut)
        speed = machine.out_bytes_per_s if outwards else machine.in_bytes_per_s
        speed *= rng.uniform(1.0 - machine.noise, 1.0 + machine.noise)
        took_ns = int(moved_bytes * NS_PER_S / speed) if moved_bytes else 0
        if outwards:
            begins_ns = max(now_ns, self._out_free_at_ns)
            self._out_free_at_ns = begins_ns + took_ns
        else:
            begins_ns = max(now_ns, self._in_free_at_ns)
            self._in_free_at_ns = begins_ns + took_ns
        return begins_ns + took_ns + machine.swap_fixed_ns


def outcome_of(flight: Flight, resident_bytes: int, host_bytes: int) -> ev.Event:
    """Return the event that the daemon feeds the scheduler at the end of ``flight``, after which
    the session has ``resident_bytes`` in the GPU and ``host_bytes`` in system RAM."""
    op, action = flight.action.op, flight.action
    elapsed_ns = flight.ends_ns - flight.began_ns
    done = flight.verdict is CallVerdict.DONE
    if isinstance(action, PageOut):
        if done:
            return ev.PagedOut(op=op, moved_bytes=host_bytes, elapsed_ns=elapsed_ns)
        return ev.PageOutRefused(op=op, reason=Reason.LOCK_TIMEOUT)
    if isinstance(action, PageIn):
        if done:
            return ev.PagedIn(op=op, moved_bytes=flight.moved_bytes, elapsed_ns=elapsed_ns)
        no_room = flight.verdict is CallVerdict.NO_ROOM
        return ev.PageInRefused(op=op, reason=Reason.NO_ROOM if no_room else Reason.DRIVER)
    if isinstance(action, Suspend):
        if done:
            return ev.Suspended(op=op, resident_bytes=resident_bytes)
        return ev.SuspendRefused(op=op, reason=Reason.LOCK_TIMEOUT)
    return ev.Resumed(op=op) if done else ev.ResumeFailed(op=op, reason=Reason.DRIVER)
