"""Simulate each waiter's wait in several futures, as many as one forecast may cost.

A copy of the scheduler runs until the first few waiters are granted. The additional wait of each
one further down is estimated by a sum over the turns between (``queue_tail``): there the errors of
many turns even out, and users need no exact seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.forecast.queue_tail import begins_ns
from kiwi_core.sched.forecast.simulated_future import SimulatedFuture

if TYPE_CHECKING:
    from collections.abc import Container

    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId

STEPS: Final = 30
"""Events in all runs of one forecast together (the first run is never cut short), about 20 µs
each. With three times as many, hardly more forecasts are right."""

RUNS_MAX: Final = 7
"""An odd number: the first run is made with the median, and takes the middle place."""

GRANTS: Final = 4
"""Number of grants after which a run ends. Four waiters and their swaps take about 15 events."""

CROWD: Final = 20
"""With more waiters, a run ends after half as many grants: the copy costs as much as ten events."""


UNLUCKY: Final = 0.9
"""The chance that stands for long bursts: a burst does not end by itself if fewer than ten earlier
ones were longer than it has been already."""


@dataclass(frozen=True)
class Futures:
    waits_ns: dict[SessionId, list[int]]
    """The waits until the lease (or, for a session that leaves, until its memory is back), one for
    each future. One of the first waiters that has no entry waits for something other than its turn.
    """
    unlucky_ns: dict[SessionId, int]
    """The waits if all bursts are rather long; empty if only one future was simulated."""
    has_tail: bool
    """Whether waiters further down may exist (``tail_ns``)."""


def futures(st: State, now_ns: int) -> Futures:
    """Simulate futures of ``st``, which is not changed. The first one has median burst lengths."""
    grants = GRANTS if len(st.queue) <= CROWD else GRANTS // 2
    first = SimulatedFuture(st, now_ns, 0.5, spread=False)
    found = {id_: [wait_ns] for id_, wait_ns in first.waits_ns(grants).items()}
    head = len(found)
    runs = min(RUNS_MAX, (STEPS // max(1, first.steps) - 1) | 1) if grants == GRANTS else 1
    for number in range(runs):
        if number != runs // 2:  # the first run takes its place
            run = SimulatedFuture(st, now_ns, (number + 0.5) / runs, spread=True)
            for id_, wait_ns in run.waits_ns(grants).items():
                found.setdefault(id_, []).append(wait_ns)
    unlucky = (
        SimulatedFuture(st, now_ns, UNLUCKY, spread=False).waits_ns(grants) if runs > 1 else {}
    )
    return Futures(found, unlucky, head == grants)


def tail_ns(st: State, found: Container[SessionId]) -> dict[SessionId, int]:
    """Return how much longer each waiter further down waits than the last one in ``found``."""
    begins = begins_ns(st)
    last_ns = max((at_ns for id_, at_ns in begins.items() if id_ in found), default=0)
    return {id_: max(0, at_ns - last_ns) for id_, at_ns in begins.items() if id_ not in found}
