"""Round robin: first come, first served, a time quantum each.

The bound: a waiter is granted within (number ahead, runner included) × (quantum + swap time),
where a quantum is max(TQ, floor) and the floor is the measured cost of a swap. This holds while
events keep coming and nothing fails (no refusals, hangs, or exhausted system RAM). The policy uses
only the weight of a priority class: a quantum is max(TQ × weight, floor). Shares follow from the
turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.model.policy import Policy
from kiwi_core.sched.policy.registry import register

if TYPE_CHECKING:
    from kiwi_core.sched.model.policy import TurnSettings


@register
class RoundRobin(Policy):
    name = "round-robin"
    summary = "first come, first served, a time quantum each"

    def bound_ns(self, turn_settings: TurnSettings, others: int, swap_ns: int) -> int:
        quantum_ns = max(turn_settings.tq_ns, round(turn_settings.swap_floor_factor * swap_ns))
        return others * (quantum_ns + swap_ns)
