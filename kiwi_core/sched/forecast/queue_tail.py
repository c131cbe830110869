"""Estimate when the turns of waiters begin that are too far down the queue to be simulated.

A turn takes the swap and the smaller of the quantum and the usual burst. One such estimate may be
wrong; over many turns the errors even out.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.rules import tenancy
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId


def begins_ns(st: State) -> dict[SessionId, int]:
    """Return when the turn of each waiter begins, in the policy's order, counted from the end of
    the present turn. Waiters that wait for something other than their turn have no entry.
    """
    swaps = st.active_need_bytes + st.margin_bytes > st.capacity_bytes
    at_ns = 0
    begins: dict[SessionId, int] = {}
    for waiter in tenancy.order(st):
        if waiter.blocked is not None or waiter.stuck:
            continue
        going_out = waiter.op is not None and waiter.op.doing is Doing.PAGING_OUT
        if waiter.residency is Residency.PAGED_OUT or going_out:
            at_ns += st.speed.in_ns(waiter.footprint_bytes)
        begins[waiter.id] = at_ns
        if st.serialised:
            at_ns += _usual_run_ns(st, waiter)
            at_ns += st.speed.out_ns(waiter.footprint_bytes) if swaps else 0
    return begins


def _usual_run_ns(st: State, waiter: Session) -> int:
    """Return how long ``waiter`` will hold the lease: the rest of its usual burst or a quantum."""
    quantum_ns = st.quantum_ns(waiter)
    usual_ns = median_low(waiter.durations_ns) if waiter.durations_ns else 0
    if usual_ns <= waiter.attained_ns:
        return quantum_ns
    return min(quantum_ns, usual_ns - waiter.attained_ns)
