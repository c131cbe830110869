"""Makes the scheduler for a set-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.sched.policy import names
from kiwi_core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from kiwi_core.simulate.model import Setup, SimulatedMachine

NAMES: Final = names()


def scheduler_for(machine: SimulatedMachine, setup: Setup, checks: bool) -> Scheduler:
    """Return a new scheduler. Raise ``CallerError("unknown-policy")``."""
    return Scheduler(
        machine.total_bytes,
        config=setup.config,
        tq_ns=setup.tq_ns,
        anti_thrash=setup.anti_thrash,
        host_budget_bytes=machine.host_budget_bytes,
        policy=setup.policy,
        checks=checks,
    )
