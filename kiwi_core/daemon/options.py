"""The options of ``kiwi daemon``, and what the daemon of one GPU gets in addition."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kiwi_core.config import AUTO, DEFAULTS, Config
from kiwi_core.daemon.emulation import keep_state
from kiwi_core.sched.policy import DEFAULT, names
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.wire.messages import Emulation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.daemon.roster.roster import Roster


class DaemonOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``None`` everywhere means the documented default. The daemons read this struct.

    ``gpus`` are UUIDs, unambiguous beginnings of UUIDs, or indices; empty means every GPU.
    ``priorities`` are user names and their classes. ``emulate`` is the text of ``--emulate``, for
    example ``2x512MiB``. ``metrics`` is the host and port of the listener for metrics servers;
    without it there is none. ``end_unused_after_s`` is for a daemon that was started
    automatically: it ends when nobody has needed it for so long; 0: never. ``pager`` is ``auto``,
    or ``checkpoint`` for a daemon that lets no library own unless its program asks. ``config`` has
    the limits that options have changed.
    """

    gpus: list[str] = []
    tq_ns: int | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    priorities: list[tuple[str, Priority]] = []
    emulate: str | None = None
    emulate_copy_bytes_per_s: int | None = None
    socket_dir: str | None = None
    state_dir: str | None = None
    admin_group: str | None = None
    host_budget_bytes: int | None = None
    metrics: tuple[str, int] | None = None
    log_json: bool = False
    end_unused_after_s: float = 0.0
    sessions_per_user: int | None = None
    pager: str = AUTO
    config: Config = DEFAULTS

    @classmethod
    def asked(cls, values: Mapping[str, Any]) -> DaemonOptions:
        """Return the options that were given. A value is named after a field of this struct, or
        else after the limit in ``Config`` that it replaces. Raise ``TypeError`` for any other name.
        """
        own = {name: value for name, value in values.items() if name in cls.__struct_fields__}
        limits = {name: value for name, value in values.items() if name not in own}
        return cls(**own, config=replace(DEFAULTS, **limits))


ENV_OPTIONS: Final = "KIWI_CHILD_OPTIONS"
"""Variable in which the daemon of one GPU gets its ``ChildOptions``, as JSON."""


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor passes to the daemon of one GPU. A quantum, anti-thrash mode or
    policy that was not ``asked`` for stays as the last daemon since the machine's start had it. So
    a new default comes into force only where there is no roster. After a crash (``restarted``) all
    three stay, also those asked for: a user may have set them live meanwhile.
    """

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

    def settings(self, roster: Roster) -> tuple[int, AntiThrash, str]:
        """Return the first quantum (ns), anti-thrash mode and policy."""
        asked = self.asked
        tq = [asked.tq_ns, roster.tq_ns]
        mode = [asked.anti_thrash, roster.anti_thrash]
        # The roster may name a policy of another version.
        policy = [asked.policy, roster.policy if roster.policy in names() else None]
        if self.restarted:
            tq.reverse()
            mode.reverse()
            policy.reverse()
        tq_ns = next((value for value in tq if value is not None), asked.config.tq_ns)
        anti_thrash = next((value for value in mode if value is not None), AntiThrash.ON)
        return tq_ns, anti_thrash, next((one for one in policy if one is not None), DEFAULT)
