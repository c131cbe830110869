"""Round robin: owners take turns, the sessions of each in order of arrival, a time quantum each.

The bound: a waiter is granted within (turns ahead, the runner's included, and one more) × (quantum
+ swap time + tenancy). The tenancy (``rules.tenancy``) is that of two of the longest swaps.
With one session for each owner the turns ahead are the sessions ahead; an owner with k sessions
among o owners has at most k × o - 1 turns ahead of each. A quantum is max(TQ, floor), and the floor
is the measured cost of a swap. This holds while events keep coming and nothing fails (no refusals,
hangs, or exhausted system RAM). The policy uses only the weight of a priority class: a quantum is
max(TQ × weight, floor). Shares follow from the turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.model.policy import Policy
from kiwi_core.sched.policy.owners import OwnerTurns
from kiwi_core.sched.policy.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.model.policy import PolicyContext, TurnSettings
    from kiwi_core.sched.model.session import Session


@register
class RoundRobin(Policy):
    name = "round-robin"
    summary = "first come, first served, a time quantum each"

    def __init__(self) -> None:
        self._turns = OwnerTurns()

    def adopt(self, context: PolicyContext) -> None:
        self._turns = OwnerTurns()
        super().adopt(context)

    def joined(self, context: PolicyContext, session: Session) -> None:  # noqa: ARG002
        self._turns.add(session)
        if session.mid_burst:
            self._turns.served(session)

    def left(self, context: PolicyContext, session: Session) -> None:  # noqa: ARG002
        self._turns.remove(session)

    def served(self, session: Session) -> None:
        self._turns.served(session)

    def order(self, context: PolicyContext) -> Iterable[Session]:  # noqa: ARG002
        return self._turns

    def check(self, context: PolicyContext) -> None:
        kept = {waiter.id for waiter in self._turns}
        if kept != set(context.queue):
            raise AssertionError(f"turns: kept {kept}, queue {set(context.queue)}")

    def bound_ns(self, turn_settings: TurnSettings, others: int, swap_ns: int) -> int:
        quantum_ns = max(turn_settings.tq_ns, round(turn_settings.swap_floor_factor * swap_ns))
        tenancy_ns = turn_settings.tenancy_ns(2 * swap_ns)
        turns = others + (tenancy_ns > 0)  # one more, whose place is kept, may come back
        return turns * (quantum_ns + swap_ns + tenancy_ns)
