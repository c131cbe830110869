"""Which of several GPUs a new kernel is placed on: the one with the shortest expected wait. Pure.

The wait is that of a newcomer whose needs nobody knows, who asks at once: the scheduler gives it
the whole GPU, after everybody who is ahead, once what lies idle in the GPU has been moved out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.states import AntiThrash, SessionState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.wire.messages import GpuStatus, SessionStatus

SOON_S: Final = 10.0
"""A kernel placed this recently is taken for one that is about to ask: many that are started at
once (a batch, a restarted server) would otherwise all go to the same GPU. Those placed earlier
only count as neighbours: their user reads or types."""

SPEED_BYTES_PER_S: Final = 4 << 30
"""Speed of page-outs where none was measured yet: what checkpoints reach on PCIe GPUs."""

UNNOTICED_S: Final = 1.0
"""Waits that differ by less are the same to people; other things decide then."""


@dataclass(frozen=True)
class Placed:
    """A kernel of this server that was placed and lives: on which GPU, and how long ago."""

    kernel_id: str
    gpu_uuid: str
    ago_s: float


def choose(
    gpus: Iterable[GpuStatus], placed: Iterable[Placed] = (), kernel_id: str = ""
) -> GpuStatus | None:
    """The GPU for kernel ``kernel_id``; ``None`` where there is none. ``placed`` are the others of
    this server: those that have not joined their GPU yet are in no status.

    Equal waits (to about a second): fewest sessions, then most memory that is free or could be,
    then the lowest index.
    """
    others = [one for one in placed if one.kernel_id != kernel_id]
    return min(gpus, key=lambda gpu: _rank(gpu, others, kernel_id), default=None)


_Rank = tuple[float, int, int, int]


def _rank(gpu: GpuStatus, placed: list[Placed], kernel_id: str) -> _Rank:
    # A kernel that is restarted leaves; its last session may still be on the list.
    staying = [one for one in gpu.sessions if not kernel_id or one.kernel_id != kernel_id]
    joined = {one.kernel_id for one in staying}
    coming = [one for one in placed if one.gpu_uuid == gpu.uuid and one.kernel_id not in joined]
    soon = sum(one.ago_s < SOON_S for one in coming)
    wait_s = expected_wait_s(gpu, soon)
    felt = wait_s if math.isinf(wait_s) else float(int(wait_s / UNNOTICED_S))
    room_bytes = gpu.memory.free_bytes + sum(one.resident_bytes for one in staying if _idle(one))
    return felt, len(staying) + len(coming), -room_bytes, gpu.index


def expected_wait_s(gpu: GpuStatus, soon: int = 0) -> float:
    """Return the seconds until a newcomer would hold ``gpu`` if it asked now; ``soon`` more are
    about to ask before it. Infinite if programs outside Kiwi hold more than half of the memory:
    nobody can move them, and a newcomer is not let in beside them."""
    if gpu.memory.outside_bytes * 2 > gpu.memory.total_bytes:
        return math.inf
    if gpu.scheduler.anti_thrash is AntiThrash.OFF:
        return 0.0
    swap_s = gpu.scheduler.swap_round_trip_s or 0.0
    turn_s = gpu.scheduler.tq_s + swap_s
    ahead_s = soon * turn_s
    if gpu.queue:
        last = gpu.queue[-1]
        until_last_s = last.expected_wait_s
        # The last one's turn, then the newcomer's.
        ahead_s += turn_s + (last.position * turn_s if until_last_s is None else until_last_s)
    elif gpu.holders:
        ahead_s += _until_holders_stop_s(gpu) + swap_s
    return ahead_s + _moving_idle_out_s(gpu)


def _until_holders_stop_s(gpu: GpuStatus) -> float:
    """All of them: beside one whose needs are unknown nobody else stays."""
    left = {one.id: one.time_left_s for one in gpu.sessions}
    tq_s = gpu.scheduler.tq_s
    times_s = (left.get(holder) for holder in gpu.holders)
    return max(tq_s if time_s is None else time_s for time_s in times_s)


def _moving_idle_out_s(gpu: GpuStatus) -> float:
    idle_bytes = sum(one.resident_bytes for one in gpu.sessions if _idle(one))
    out = [swap for swap in gpu.swaps if swap.direction == "out" and swap.seconds > 0]
    spent_s = sum(swap.seconds for swap in out)
    speed = sum(swap.bytes_moved for swap in out) / spent_s if spent_s else 0.0
    return idle_bytes / (speed or SPEED_BYTES_PER_S)


def _idle(session: SessionStatus) -> bool:
    """Its memory is in the GPU, and nothing of it runs."""
    return session.state is SessionState.IDLE
