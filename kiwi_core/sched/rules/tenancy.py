"""No move that nobody needs: who keeps a place in the GPU, and who has been promised one.

These rules hold under every policy, between a waiter whose memory is out and the sessions whose
memory would have to go out for it. Where memory fits, they do nothing. The costs are measured: a
*trip* is the time to page both sessions out and in, which is what it costs to let the waiter in and
the other one back.

*Commitment.* A session that is paged out for a waiter goes behind it in the queue, until a session
that has come in is granted the lease. Otherwise the next short cell of the session that goes out
would precede the waiter, and the page-out would have been for nothing.

*Anticipation.* When a burst ends, its user's next request may come before a trip would be over. So
the session's memory stays for some time after the burst (``_hold_ns``). The time is the one that
would have cost least over its last pauses. There the cost of a pause is the time for which the
GPU idles; and, if the session was paged out before the next request, also the GPU time that the
moves take and a part of the longer wait of its user.

*Tenancy.* A session that comes back within the time goes first, so that its place is worth
something: until its tenancy is over, which is TQ or a few trips, whichever is more. A tenancy
begins with the first grant after its memory came in, or when the queue ceased to be empty if that
was later. It ends early for a waiter that has become old, or has waited for a tenancy of each
waiter.

The bounds: the GPU idles in favour of a session for at most a trip and the waiter's least run after
its burst, and no longer than its tenancy. A waiter waits for at most one tenancy of each session
that precedes it, in addition to what the policy promises (``Policy.bound_ns``).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.state import PlaceKept
from kiwi_core.sched.model.turn import Want
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId

CROWD_COST: Final = 0.25
"""The least that leaving costs where many wait, in trips. With half a trip for each waiter with a
new burst the 95th percentile of short waits is 1.7 times as long beside trainings at 2.3 GB/s."""

WAIT_COST: Final = 0.3
"""What a second of the returning user's longer wait counts, in seconds of the GPU. With 0 the 95th
percentile of short waits is an eighth longer where all users are busy; with 0.5 too much is kept
where users think for long."""

GAIN: Final = 0.9
"""Keeping must cost less than this part of leaving: the best of many times is best partly by
chance."""

LONGER: Final = 1.5
"""The best time for the known pauses is that of one of them. It is stretched by this, since the
next pause may be longer."""

FEW_PAUSES: Final = 2
"""With fewer known pauses a session is kept for as long as leaving costs: that is never worse than
twice the best choice (ski rental)."""


# --- who is next --------------------------------------------------------------------------------


def first(st: State) -> Session:
    """Return the first waiter in ``order``; there is one."""
    return next(iter(order(st)))


def order(st: State) -> Iterable[Session]:
    """Return the waiters in the order in which they are served: the policy's, except that a tenant
    that comes back goes first, and a session goes behind the waiter for which it was paged out."""
    line = st.policy.order(st)
    if back := _back(st):
        line = [*back, *(waiter for waiter in line if waiter not in back)]
    return _committed(st, line) if st.out_for else line


def _committed(st: State, line: Iterable[Session]) -> Iterator[Session]:
    behind: dict[SessionId, list[Session]] = {}
    """The sessions that are held back, by the waiter that they follow."""
    passed: set[SessionId] = set()
    for session in line:
        ahead = st.queue.get(st.out_for.get(session.id, session.id))
        if ahead is None or ahead is session or ahead.blocked is not None or ahead.id in passed:
            next_ones = [session]
            while next_ones:
                one = next_ones.pop(0)
                passed.add(one.id)
                yield one
                next_ones += behind.pop(one.id, ())
        else:
            behind.setdefault(ahead.id, []).append(session)
    for held_back in behind.values():  # two that went out for each other
        yield from held_back


def comes_back(st: State, session: Session) -> bool:
    """Return whether ``session``, which is about to be granted the lease, comes first because its
    place was kept."""
    return session in _back(st)


def _back(st: State) -> list[Session]:
    """Return the tenants that have come back while their place was kept."""
    if not st.waiting_in or len(st.queue) == len(st.waiting_in):
        return []
    waiter = next(iter(st.policy.order(st)))
    if waiter.id in st.waiting_in:
        return []
    back = [
        one
        for one in st.waiting_in.values()
        if one.op is None and not one.mid_burst and tenancy_ends_ns(st, one, waiter) > st.now_ns
    ]
    return sorted(back, key=attrgetter("queued_ns"))


# --- who stays ----------------------------------------------------------------------------------


def kept_place(st: State, idle: Session, waiter: Session) -> PlaceKept | None:
    """Return whether and until when ``idle`` stays in the GPU although ``waiter`` needs the
    room."""
    if (
        idle.want is not Want.NONE
        or idle.residency is not Residency.RESIDENT
        or idle.rested_ns is None
    ):
        return None
    if idle.kept_out or idle.tenant_ns is None:
        return None
    trip_ns = st.moving_ns(idle) + st.moving_ns(waiter)
    away_ns = trip_ns + st.policy.floor_ns(st, waiter) if waiter.mid_burst else trip_ns
    stays_ns = st.stays_ns.get(idle.id, 0)
    if st.now_ns >= max(stays_ns, idle.rested_ns + away_ns):
        return None
    ends_ns = tenancy_ends_ns(st, idle, waiter)
    if ends_ns <= st.now_ns:
        return None
    cost_ns = round(_leaving_costs(waiter, len(st.queue)) * trip_ns)
    until_ns = max(stays_ns, idle.rested_ns + _hold_ns(idle, cost_ns, away_ns))
    until_ns = min(until_ns, ends_ns)
    return PlaceKept(idle, until_ns, ends_ns) if until_ns > st.now_ns else None


def _leaving_costs(waiter: Session, waiting: int) -> float:
    """Return the moves that are due to letting ``waiter`` in now, in trips. A burst that was
    suspended makes way again for the next request: both switches are due to it, a whole trip. A
    new burst causes one of its own later, so one is left. Where others wait, they cause switches
    as well, and one may ask first and need the room anyway."""
    if waiting > 1:
        return max(CROWD_COST, 0.8 / waiting)
    return 1.0 if waiter.mid_burst else 0.5


def tenancy_ends_ns(st: State, tenant: Session, waiter: Session) -> int:
    """Return when the tenancy of ``tenant`` ends in favour of ``waiter``; 0: it has none."""
    if tenant.tenant_ns is None or waiter.leaving or st.fit_together(tenant, waiter):
        return 0
    trip_ns = st.moving_ns(tenant) + st.moving_ns(waiter)
    if not trip_ns:
        return 0
    usual_ns = st.turn_settings.tenancy_ns(trip_ns)
    length_ns = st.policy.tenancy_ns(tenant, waiter, usual_ns)
    if not length_ns:
        return 0
    patience_ns = length_ns * len(st.queue)
    old_ns = max(st.policy.old_at_ns(st, waiter, tenant), waiter.queued_ns + patience_ns)
    return min(old_ns, max(tenant.tenant_ns, st.contended_ns) + length_ns)


def _hold_ns(idle: Session, cost_ns: int, away_ns: int) -> int:
    """Return how long after its burst ``idle`` stays, at most ``away_ns``. Leaving costs
    ``cost_ns``; whoever asks after that waits until ``away_ns`` later.
    """
    pauses_ns = sorted(idle.pauses_ns)
    if len(pauses_ns) < FEW_PAUSES:
        return min(cost_ns, away_ns)
    left = len(pauses_ns)
    best = GAIN * (left * cost_ns + _longer_waits(pauses_ns, 0, away_ns))
    best_ns = idles_ns = 0
    for number, pause_ns in enumerate(pauses_ns, start=1):
        if pause_ns > away_ns:
            break
        idles_ns += pause_ns
        left = len(pauses_ns) - number
        cost: float = idles_ns + left * (pause_ns + cost_ns)
        if cost < best:
            cost += _longer_waits(pauses_ns[number:], pause_ns, away_ns)
            if cost < best:
                best, best_ns = cost, pause_ns
    return min(away_ns, round(LONGER * best_ns))


def _longer_waits(pauses_ns: list[int], left_ns: int, away_ns: int) -> float:
    """Return what it costs that users who pause for ``pauses_ns`` find their memory gone."""
    return WAIT_COST * sum(max(0, left_ns + away_ns - pause_ns) for pause_ns in pauses_ns)
