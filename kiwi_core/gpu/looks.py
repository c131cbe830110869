"""One look at a GPU and at some processes: all that a decision about moving memory needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.errors import GpuError
    from kiwi_core.gpu.driver import CheckpointState


@dataclass(frozen=True)
class GpuLook:
    """What one question shows. ``bytes_by_pid`` are the bytes, contexts included, of the processes
    that NVML can name; ``names_users``: these are all that use the GPU. ``states`` are what the
    driver says of each process that was asked about, or its error. ``free_bytes`` is ``None`` if
    NVML was not asked."""

    free_bytes: int | None
    bytes_by_pid: dict[int, int] = field(default_factory=dict)
    names_users: bool = False
    states: dict[int, CheckpointState | GpuError] = field(default_factory=dict)
