"""Made-up statuses of GPUs, without a daemon."""

from __future__ import annotations

from typing import Any

from kiwi_core.states import AntiThrash, SessionState
from kiwi_core.units import GIB
from kiwi_core.wire.messages import GpuStatus, MemoryStatus, SchedulerStatus, SessionStatus


def session(name: str = "s", **changes: Any) -> SessionStatus:
    fields: dict[str, Any] = {
        "id": name, "pid": 1, "owner": "me", "name": name, "state": SessionState.IDLE,
        "resident_bytes": 0, "paged_out_bytes": 0, "suspensions": 0, "held_s": 0.0,
        "waited_s": 0.0,
    }  # fmt: skip
    return SessionStatus(**fields | changes)


def gpu(
    index: int,
    *sessions: SessionStatus,
    wait_s: float | None,
    outside_bytes: int = 0,
    emulated: bool = False,
    expected: int = 0,
) -> GpuStatus:
    used_bytes = outside_bytes + sum(one.resident_bytes for one in sessions)
    return GpuStatus(
        uuid=f"GPU-{index}",
        name="Test GPU",
        index=index,
        emulated=emulated,
        memory=MemoryStatus(
            total_bytes=80 * GIB,
            free_bytes=80 * GIB - used_bytes,
            paged_out_bytes=0,
            host_budget_bytes=100 * GIB,
            outside_bytes=outside_bytes,
        ),
        scheduler=SchedulerStatus(tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=False),
        holders=[],
        queue=[],
        sessions=[*sessions],
        newcomer_wait_s=wait_s,
        expected=expected,
    )
