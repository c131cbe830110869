"""How long each waiter waits in some futures: as many as a look may cost, the first ones exactly.

The copy runs until the first few are granted. What each one further down adds is taken from a sum
over who is ahead (``waits``): there the errors of many turns even out, and nobody needs seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.forecast.lookahead import Run
from kiwi_core.sched.forecast.waits import expected_waits_ns

if TYPE_CHECKING:
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId

STEPS: Final = 30
"""Events of all runs of one look together (the first one goes on until it is through), about 20 µs
each. With three times as many hardly more waits are right."""

RUNS_MAX: Final = 7
"""An odd number always: the first one is the middle one."""

GRANTS: Final = 4
"""How many the copy sees granted. Four waiters and their swaps take about 15 events."""

CROWD: Final = 20
"""With more waiters than that, half as many: to copy them all costs as much as ten events."""


UNLUCKY: Final = 0.9
"""Chance of lengths that are rather long: where less than ten earlier bursts were longer than what
this one has had already, it does not end by itself."""


@dataclass(frozen=True)
class Futures:
    waits_ns: dict[SessionId, list[int]]
    """Until the lease (or, of one that leaves, until its memory is back). Those that are missing
    wait for something else than their turn."""
    unlucky_ns: dict[SessionId, int]
    """The same if all bursts are rather long; in a short queue only."""
    has_tail: bool
    """There are waiters further down (``tail_ns``)."""


def futures(st: State, now_ns: int) -> Futures:
    """``st`` is not changed. In the first run everything takes as long as it usually does."""
    grants = GRANTS if len(st.queue) <= CROWD else GRANTS // 2
    first = Run(st, now_ns, 0.5, spread=False)
    found = {id_: [wait_ns] for id_, wait_ns in first.waits_ns(grants).items()}
    head = len(found)
    runs = min(RUNS_MAX, (STEPS // max(1, first.steps) - 1) | 1) if grants == GRANTS else 1
    for number in range(runs):
        if number != runs // 2:  # the first one is that
            run = Run(st, now_ns, (number + 0.5) / runs, spread=True)
            for id_, wait_ns in run.waits_ns(grants).items():
                found.setdefault(id_, []).append(wait_ns)
    unlucky = Run(st, now_ns, UNLUCKY, spread=False).waits_ns(grants) if runs > 1 else {}
    return Futures(found, unlucky, head == grants)


def tail_ns(st: State, now_ns: int, found: dict[SessionId, list[int]]) -> dict[SessionId, int]:
    """Of those further down the queue, how much more than the last one of ``found``."""
    roughly = expected_waits_ns(st, now_ns)
    last_ns = max((roughly.get(id_) or 0 for id_ in found), default=0)
    return {
        id_: max(0, wait_ns - last_ns)
        for id_, wait_ns in roughly.items()
        if wait_ns is not None and id_ not in found
    }
