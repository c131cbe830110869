"""A rough estimate of each wait in the queue.

It is a sum over the sessions ahead: the rest of the runner's turn, then for each waiter the swap
and the smaller of its quantum and its usual burst. This is exact enough for users; the worst case
(number ahead × TQ) hardly ever happens.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

from kiwi_core.sched.model.session import Doing, Home
from kiwi_core.states import AntiThrash

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId


def expected_waits_ns(st: State, now_ns: int) -> dict[SessionId, int | None]:
    """Return each waiter's wait from now on, in the policy's order; ``None`` if unknown."""
    swaps = st.active_need_bytes + st.margin_bytes > st.capacity_bytes
    serial_ns = _until_free_ns(st, now_ns)
    waits: dict[SessionId, int | None] = {}
    for waiter in st.policy.order(st):
        if waiter.blocked is not None or waiter.stuck:
            waits[waiter.id] = None
            continue
        if serial_ns is None:
            waits[waiter.id] = None
            continue
        serial_ns += _bring_in_ns(st, waiter, now_ns)
        waits[waiter.id] = serial_ns
        if st.serialised:
            serial_ns += _usual_run_ns(st, waiter)
            serial_ns += st.speed.out_ns(waiter.footprint_bytes) if swaps else 0
    return waits


def _until_free_ns(st: State, now_ns: int) -> int | None:
    """Return the time until runners and page-outs let the first waiter in; ``None`` if unknown."""
    leaving_ns = [_op_left_ns(st, s, now_ns) for s in st.ops.values() if s.id not in st.chosen]
    out_ns = max(leaving_ns, default=0)
    if st.chosen or not st.runners or (not st.serialised and leaving_ns):
        return out_ns
    lefts = [_left_ns(st, runner, now_ns) for runner in st.runners.values()]
    known = [left for left in lefts if left is not None]
    if st.serialised:
        return max(known, default=0) + out_ns if len(known) == len(lefts) else None
    return min(known) + out_ns if known else None


def _left_ns(st: State, runner: Session, now_ns: int) -> int | None:
    """Return the rest of the turn, plus the page-out if the quantum ends it; ``None``: unknown."""
    run_ns = now_ns - runner.granted_ns
    usual_ns = _usual_burst_ns(runner)
    usual_left_ns = usual_ns - runner.attained_ns - run_ns if usual_ns is not None else None
    if st.anti_thrash is AntiThrash.OFF or not runner.guarded:  # no quantum ends its turn
        return usual_left_ns if usual_left_ns is not None and usual_left_ns > 0 else None
    quantum_left_ns = max(0, st.quantum_ns(runner) - run_ns)
    if usual_left_ns is not None and 0 < usual_left_ns < quantum_left_ns:
        return usual_left_ns
    return quantum_left_ns + st.swap_ns(runner) // 2


def _usual_burst_ns(session: Session) -> int | None:
    return median_low(session.durations_ns) if session.durations_ns else None


def _usual_run_ns(st: State, waiter: Session) -> int:
    """Return how long ``waiter`` will hold the lease: the rest of its usual burst or a quantum."""
    quantum_ns = st.quantum_ns(waiter)
    usual_ns = _usual_burst_ns(waiter)
    if usual_ns is None or usual_ns <= waiter.attained_ns:
        return quantum_ns
    return min(quantum_ns, usual_ns - waiter.attained_ns)


def _bring_in_ns(st: State, waiter: Session, now_ns: int) -> int:
    if waiter.op is not None and waiter.op.doing is Doing.PAGING_IN:
        return _op_left_ns(st, waiter, now_ns)
    on_its_way_out = waiter.op is not None and waiter.op.doing is Doing.PAGING_OUT
    if waiter.home is Home.OUT or on_its_way_out:
        return st.speed.in_ns(waiter.footprint_bytes)
    return 0


def _op_left_ns(st: State, session: Session, now_ns: int) -> int:
    """Return the rest of an operation at the measured speed; 0 for a hung one."""
    op = session.op
    if op is None or op.overdue:
        return 0
    cost_ns = 0
    if op.doing is Doing.PAGING_OUT:
        cost_ns = st.speed.out_ns(session.footprint_bytes)
    elif op.doing is Doing.PAGING_IN:
        cost_ns = st.speed.in_ns(session.footprint_bytes)
    return max(0, cost_ns - (now_ns - op.started_ns))
