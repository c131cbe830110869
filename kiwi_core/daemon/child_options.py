"""What the daemon of one GPU was asked for, and what it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kiwi_core.daemon.emulation import keep_state
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.wire.messages import Emulation

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.daemon.roster import Roster


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells the daemon of one GPU. ``tq_ns``, ``anti_thrash`` and ``policy``
    are what was asked for on the command line; without them the last daemon's (live) settings
    stay. After a crash (``restarted``) it is the other way round: what was set live meanwhile
    stays. ``priorities`` are classes by user name."""

    gpu_uuid: str
    sockets: str
    state: str
    tq_ns: int | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    priorities: dict[str, Priority] = {}
    training_share: float | None = None
    admin_group: str | None = None
    host_budget_bytes: int | None = None
    lock_timeout_ns: int | None = None
    stuck_after_ns: int | None = None
    idle_after_ns: int | None = None
    swap_floor_factor: float | None = None
    bring_back: bool = True
    emulation: Emulation | None = None
    emulated_state: str = ""
    """The emulated GPUs' state by a name that stays when its directory goes: the descriptor of the
    supervisor, in /proc."""
    log_json: bool = False
    restarted: bool = False

    def keep_emulated_state(self) -> None:
        """Put the emulated GPUs' state where programs look for it, should it be gone from there."""
        if self.emulation is not None and self.emulated_state:
            keep_state(self.emulation, self.emulated_state)

    def settings(self, roster: Roster, config: Config) -> tuple[int, AntiThrash, str]:
        """Quantum (ns), anti-thrash mode and policy to begin with."""
        tq = [self.tq_ns, roster.tq_ns]
        mode = [self.anti_thrash, roster.anti_thrash]
        # Its name may be that of another version.
        policy = [self.policy, roster.policy if roster.policy in names() else None]
        if self.restarted:
            tq.reverse()
            mode.reverse()
            policy.reverse()
        tq_ns = next((value for value in tq if value is not None), config.tq_ns)
        anti_thrash = next((value for value in mode if value is not None), AntiThrash.ON)
        return tq_ns, anti_thrash, next((one for one in policy if one is not None), DEFAULT)
