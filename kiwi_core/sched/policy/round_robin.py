"""Round robin: first come, first served, a time quantum each.

Its bound: a waiter is granted within (number ahead, runner included) × (quantum + swap time),
where a quantum is max(TQ, floor) and the floor is the measured cost of a swap; as long as events
keep coming and nothing is broken (no refusals, hangs, or exhausted system RAM).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kiwi_core.sched.policy.api import Terms
    from kiwi_core.sched.session import Session


class RoundRobin:
    def order(self, queue: Collection[Session]) -> Iterable[Session]:
        return queue

    def victims(self, idle: Iterable[Session], waiters: Sequence[Session]) -> Iterator[Session]:
        """Idle ones first, then waiters from the tail: they need their memory last."""
        return chain(idle, reversed(waiters))

    def may_join(self, waiter: Session, holders: int, serialised: bool) -> bool:  # noqa: ARG002
        return not serialised or holders == 0

    def quantum_ns(self, session: Session, terms: Terms, swap_ns: int) -> int:  # noqa: ARG002
        return max(terms.tq_ns, round(terms.swap_floor_factor * swap_ns))

    def floor_ns(self, session: Session, terms: Terms, swap_ns: int) -> int:  # noqa: ARG002
        return max(min(terms.tq_ns, terms.min_run_ns), round(terms.swap_floor_factor * swap_ns))

    def stop_at_ns(self, runner: Session, waiter: Session, quantum_ns: int) -> int:  # noqa: ARG002
        return runner.granted_ns + quantum_ns
