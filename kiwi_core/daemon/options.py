"""The options of ``kiwi daemon``, and those that it passes to the daemon of one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from kiwi_core.config import DEFAULTS, Config
from kiwi_core.daemon.emulation import keep_state
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.units import seconds_to_ns
from kiwi_core.wire.messages import Emulation

if TYPE_CHECKING:
    from kiwi_core.daemon.roster.roster import Roster


class DaemonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``None`` everywhere means the documented default.

    ``gpus`` are UUIDs, unambiguous beginnings of UUIDs, or indices; empty means every GPU.
    ``fair_share`` is "owner" or "session": whom turns go round.
    ``priorities`` are user names and their classes. ``emulate`` is the text of ``--emulate``, for
    example ``2x512MiB``. ``metrics`` is the host and port of the listener for metrics servers;
    without it there is none. ``end_unused_after_s`` is for a daemon that was started automatically:
    it ends when nobody has needed it for so long; 0 and ``None``: never.
    """

    gpus: tuple[str, ...] = ()
    tq_s: float | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    priorities: tuple[tuple[str, Priority], ...] = ()
    training_share: float | None = None
    fair_share: str | None = None
    emulate: str | None = None
    emulate_copy_bytes_per_s: int | None = None
    socket_dir: str | None = None
    state_dir: str | None = None
    admin_group: str | None = None
    host_budget_bytes: int | None = None
    lock_timeout_s: float | None = None
    stuck_after_s: float | None = None
    idle_after_s: float | None = None
    swap_floor: float | None = None
    bring_back: bool = True
    metrics: tuple[str, int] | None = None
    log_json: bool = False
    end_unused_after_s: float | None = None
    sessions_per_user: int | None = None

    def config(self) -> Config:
        """Return the defaults with the changes of this machine's admin."""
        wanted = {
            "lock_timeout_ns": _ns(self.lock_timeout_s),
            "operation_deadline_min_ns": _ns(self.stuck_after_s),
            "lingering_idle_ns": _ns(self.idle_after_s),
            "swap_floor_factor": self.swap_floor,
            "training_share": self.training_share,
            "turns_by_owner": None if self.fair_share is None else self.fair_share == "owner",
            "bring_back": self.bring_back,
        }
        return replace(DEFAULTS, **{k: v for k, v in wanted.items() if v is not None})  # type: ignore[arg-type]


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor passes to the daemon of one GPU. Quantum, anti-thrash mode and policy
    that were not ``asked`` for stay as the last daemon had them. After a crash (``restarted``)
    they stay in any case: a user may have set them live meanwhile."""

    asked: DaemonOptions
    gpu_uuid: str
    sockets: str
    state: str
    emulation: Emulation | None = None
    emulated_state: str = ""
    """Path of the emulated GPUs' state that is valid even if its directory is deleted: the
    supervisor's descriptor in /proc. "": no emulation."""
    restarted: bool = False

    def keep_emulated_state(self) -> None:
        """Put the emulated GPUs' state back where programs look for it, if it is gone."""
        if self.emulation is not None and self.emulated_state:
            keep_state(self.emulation, self.emulated_state)

    def settings(self, roster: Roster, config: Config) -> tuple[int, AntiThrash, str]:
        """Return the first quantum (ns), anti-thrash mode and policy."""
        asked = self.asked
        tq = [_ns(asked.tq_s), roster.tq_ns]
        mode = [asked.anti_thrash, roster.anti_thrash]
        # The roster may name a policy of another version.
        policy = [asked.policy, roster.policy if roster.policy in names() else None]
        if self.restarted:
            tq.reverse()
            mode.reverse()
            policy.reverse()
        tq_ns = next((value for value in tq if value is not None), config.tq_ns)
        anti_thrash = next((value for value in mode if value is not None), AntiThrash.ON)
        return tq_ns, anti_thrash, next((one for one in policy if one is not None), DEFAULT)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else seconds_to_ns(seconds)
