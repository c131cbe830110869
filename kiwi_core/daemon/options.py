"""What ``kiwi daemon`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.states import AntiThrash, Priority


@dataclass(frozen=True)
class DaemonOptions:
    """``None`` everywhere means the documented default.

    ``gpus`` are UUIDs, unambiguous beginnings of UUIDs, or indices; empty means every GPU.
    ``priorities`` are user names and their classes. ``emulate`` is the text of ``--emulate``, for
    example ``2x512MiB``. ``metrics`` is the host and port of the listener for metrics servers;
    without it there is none.
    """

    gpus: tuple[str, ...] = ()
    tq_s: float | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    priorities: tuple[tuple[str, Priority], ...] = ()
    training_share: float | None = None
    emulate: str | None = None
    emulate_copy_bytes_per_s: int | None = None
    socket_dir: Path | None = None
    state_dir: Path | None = None
    admin_group: str | None = None
    host_budget_bytes: int | None = None
    lock_timeout_s: float | None = None
    stuck_after_s: float | None = None
    idle_after_s: float | None = None
    swap_floor: float | None = None
    bring_back: bool = True
    metrics: tuple[str, int] | None = None
    log_json: bool = False
