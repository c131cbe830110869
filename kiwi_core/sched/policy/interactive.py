"""Interactive: sessions that have had little GPU time go first, so that short cells hardly wait.

*Levels.* A waiter is on the first level until its burst has had TQ/3 of the GPU, on the second one
until it has had 3/2 TQ, and then on the last one. Lower levels go first. Within a level the order
is that of arrival, in turns of the owners, but on the first two levels waiters whose memory is in
the GPU precede the others. The level is set when a session joins the queue. Quanta are TQ/2, 3/2 TQ
and 3 TQ: a long burst pays for few swaps.

*Making way.* A runner makes way for a waiter of a lower level once it has run as long as the swap
costs, and 2 s (swap guard). Otherwise it runs for its quantum. After
that it goes on for as long as it would precede the waiter if it were queued now. If the waiter's
memory is in the GPU, nothing has to move. The runner then makes way after TQ/10, also if both are
on the first level.

*Meanwhile.* The memory of a short cell is paged in beside the runner as soon as it is next. While
no session runs and a long page-in is under way, a waiter whose memory is in the GPU may run, if it
leaves room for that page-in.

*Ageing.* A waiter is old once it has waited for max(4 TQ, 3 × others × (TQ + swap)), where others
are those that wait or hold. It goes first, and then keeps the GPU for at least 2/3 TQ. The limit
grows with load: with a fixed one every waiter would be old under load, and the policy would be
first come, first served.

*Fair shares.* GPU time that a session has had on the first two levels while others waited counts
as favoured. If a session's favoured time alone exceeds the fair share of recent GPU time, the
session is on the last level: chopping work into short cells does not pay. (Time on the last level
does not count: it was taken from no other session out of turn.)

*Priority classes.* Weights divide attained time and multiply quanta. A class can promise a share:
its session gets at least that part of the time since its burst was requested. The session goes
first whenever it would be at or below the share even after a turn of 2/3 TQ. Several such sessions
together get at most half of the time. In ageing, others count by weight.

The bound: with n others that wait or hold, a waiter is granted within

    max(4 TQ, 3 × (n + 1) × (TQ + S), (n + 1) × T) + (n + 2) × (max(2/3 TQ, S) + S)

where S is the longest swap (out and in) and T a tenancy (``rules.tenancy``) of two such swaps. One
session more than n may keep its place. After the first term the waiter is old, and then only older
waiters precede it, and one that was promised its turn before. Turns go round the owners: if the
waiter's owner has k sessions that wait or hold, and there are o owners with such sessions, n counts
as at least k × o - 1. The conditions are those of round robin's bound, and that all sessions are of
the same class.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.policy import Policy, TurnSettings
from kiwi_core.sched.policy.owners import OwnerTurns
from kiwi_core.sched.policy.registry import register

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kiwi_core.sched.model.policy import PolicyContext
    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId

LEVELS_TQ: Final = (1 / 3, 1.5)
"""GPU time up to which a burst is on the first and on the second level, in quanta (TQ)."""

LAST: Final = len(LEVELS_TQ)

QUANTA_TQ: Final = (0.5, 1.5, 3.0)
"""Quanta by level. Long quanta for long bursts save swaps; short cells interrupt them anyway."""

IN_PLACE_TQ: Final = 0.1
"""The least that a runner gets if the waiter's memory is in the GPU. For a waiter on the
first level it also replaces the runner's quantum. Nothing moves then, so short turns cost next to
nothing."""

WORTH_TQ: Final = 0.125
"""If the next session's page-out and page-in together take at least this, another session computes
meanwhile. A shorter swap is not worth the time for which that session then keeps the GPU."""

PATIENCE_TQ: Final = 4.0
PATIENCE_FACTOR: Final = 3
"""High enough that quanta, not age, decide among long bursts (the turn of each is 3 TQ and a swap).
With 2 the total time under overload was 4 % longer, with 4 the longest wait was a third longer."""

PROTECTED_TQ: Final = 2 / 3
"""The least that an old waiter gets: longer than the guard, or age would be worth little."""

FAIR_SLACK_TQ: Final = 1.0
"""How far favoured time may exceed the fair share: by chance, without chopping."""

SHARES_MAX: Final = 0.5
"""The most that all sessions with a share get together: the others must make progress, too."""

NEVER_NS: Final = 1 << 62

_queued_ns = attrgetter("queued_ns")
_lines = attrgetter("lines")


@register
class Interactive(Policy):
    name = "interactive"
    summary = "short cells first; sessions with little recent GPU time go before the others"
    overtakes = True

    def __init__(self) -> None:
        self._lanes = [OwnerTurns() for _ in range(LAST + 1)]
        """The queue by level, each in turns of the owners."""
        self._sharing: dict[SessionId, Session] = {}
        """The sessions in the queue whose class has a share, except those that leave."""
        self._set_times(TurnSettings(0, 0, 0.0))

    def _set_times(self, turn_settings: TurnSettings) -> None:
        """Convert the constants above to nanoseconds, since each settle pass uses them."""
        tq_ns = turn_settings.tq_ns
        self._quanta_ns = [round(quantum * tq_ns) for quantum in QUANTA_TQ]
        self._levels_ns = [round(level * tq_ns) for level in LEVELS_TQ]
        self._in_place_ns = max(round(IN_PLACE_TQ * tq_ns), turn_settings.least_ns)
        self._patience_ns = round(PATIENCE_TQ * tq_ns)
        self._turn_patience_ns = float(PATIENCE_FACTOR * tq_ns)
        self._protected_ns = round(PROTECTED_TQ * tq_ns)

    def bound_ns(self, turn_settings: TurnSettings, others: int, swap_ns: int) -> int:
        tq_ns = turn_settings.tq_ns
        old_ns = max(PATIENCE_TQ * tq_ns, PATIENCE_FACTOR * (others + 1) * (tq_ns + swap_ns))
        old_ns = max(old_ns, (others + 1) * turn_settings.tenancy_ns(2 * swap_ns))
        turn_ns = max(PROTECTED_TQ * tq_ns, turn_settings.swap_floor_factor * swap_ns) + swap_ns
        return round(old_ns + (others + 2) * turn_ns)

    # --- the queue ------------------------------------------------------------------------------

    def adopt(self, context: PolicyContext) -> None:
        self._set_times(context.turn_settings)
        self._lanes = [OwnerTurns() for _ in range(LAST + 1)]
        self._sharing = {}
        super().adopt(context)

    def joined(self, context: PolicyContext, session: Session) -> None:
        session.queues_on(self._level(context, session))
        self._lanes[session.level].add(session)
        if session.mid_burst:
            self.served(session)
        if session.share and not session.leaving:
            self._sharing[session.id] = session

    def left(self, context: PolicyContext, session: Session) -> None:
        if self._is_old(context, session) or (session.share and self._is_owed(context, session)):
            session.protect(context.now_ns + self._protected_ns)
        self._lanes[session.level].remove(session)
        self._sharing.pop(session.id, None)

    def served(self, session: Session) -> None:
        owner = session.owner
        for lane in self._lanes:
            if owner in lane.lines:
                lane.served(session)

    def _level(self, context: PolicyContext, session: Session) -> int:
        if session.leaving:
            return LAST  # it only wants its memory back, not to compute
        attained_ns = session.attained_ns
        if session.op is not None:
            attained_ns += session.run_ns(context.now_ns)
        level = bisect_right(self._levels_ns, attained_ns / session.weight)
        if level < LAST and self._favoured_too_much(context, session):
            return LAST
        return level

    def _favoured_too_much(self, context: PolicyContext, session: Session) -> bool:
        if not session.favoured:
            return False
        # The owner's fair share, divided among its sessions.
        fair_ns = (
            context.usage.fair_ns(context.now_ns) * context.active / (context.rivals(session) + 1)
        )
        slack_ns = FAIR_SLACK_TQ * context.turn_settings.tq_ns
        return context.usage.favoured_ns(session, context.now_ns) > fair_ns + slack_ns

    def favoured_ns(self, context: PolicyContext, session: Session, had_ns: int) -> int:  # noqa: ARG002
        """Return the part of the turn before the session reaches the last level. While it is on the
        last level, for whatever reason, only a turn counts for which its place was kept."""
        if session.level == LAST:
            return had_ns if session.came_back else 0
        until_last_ns = round(self._levels_ns[-1] * session.weight)
        return max(0, min(had_ns, until_last_ns - session.attained_ns))

    # --- ageing and shares ----------------------------------------------------------------------

    def _old_at_ns(
        self, context: PolicyContext, waiter: Session, tenant: Session | None = None
    ) -> int:
        others, rivals = context.active - 1, context.rivals(waiter)
        patience_ns = self._others_ns(context, waiter)
        if tenant is not None and not tenant.counted_active_bytes:
            # As if it had come back: the patience depends on the load.
            swap_ns = (context.moving_ns(tenant) + context.moving_ns(waiter)) // 2
            turn_ns = round(context.turn_settings.tq_ns * tenant.weight) + swap_ns
            others, patience_ns = others + 1, patience_ns + PATIENCE_FACTOR * turn_ns
        if rivals > others > 0:  # its owner's other sessions wait for the owner's turns, too
            patience_ns = patience_ns * rivals // others
        return waiter.queued_ns + max(self._patience_ns, patience_ns)

    def _others_ns(self, context: PolicyContext, waiter: Session) -> int:
        """Return the patience of ``waiter`` for a turn of each other session."""
        turns_ns = context.turn_settings.tq_ns * (context.usage.weight - waiter.weight)
        swaps_ns = context.typical_swap_ns() * (context.active - 1)
        return round(PATIENCE_FACTOR * (turns_ns + swaps_ns))

    def _soonest_old_at_ns(self, context: PolicyContext, waiter: Session) -> int:
        """Return the earliest time at which ``waiter`` can be old. It is later if the owner has
        other sessions. Sessions that arrived later become old later."""
        patience_ns = self._others_ns(context, waiter)
        if patience_ns < self._patience_ns:
            patience_ns = self._patience_ns
        return waiter.queued_ns + patience_ns

    def _is_young(self, context: PolicyContext, waiter: Session, at_ns: int) -> bool:
        """Return whether ``waiter`` cannot be old at ``at_ns`` even if nothing has to move. That is
        cheap to find out, and mostly decides."""
        waits_ns = at_ns - waiter.queued_ns
        if waits_ns < self._patience_ns:
            return True
        return waits_ns < self._turn_patience_ns * (context.usage.weight - waiter.weight)

    def _is_old(self, context: PolicyContext, waiter: Session) -> bool:
        now_ns = context.now_ns
        return not self._is_young(context, waiter, now_ns) and now_ns >= self._old_at_ns(
            context, waiter
        )

    def _owed_at_ns(self, context: PolicyContext, waiter: Session) -> int:
        """Return the time from which ``waiter`` is at or below its share even after a protected
        turn."""
        sharing = len(self._sharing) + sum(bool(r.share) for r in context.runners.values())
        share = min(waiter.share, SHARES_MAX / max(1, sharing))
        return waiter.asked_ns + round((waiter.attained_ns + self._protected_ns) / share)

    def _is_owed(self, context: PolicyContext, waiter: Session) -> bool:
        return context.now_ns >= self._owed_at_ns(context, waiter)

    def _levels_decide(self, context: PolicyContext, at_ns: int) -> bool:
        """Return whether surely no waiter precedes the levels at ``at_ns``: none has a share, and
        even the oldest is young then."""
        oldest = next(iter(context.queue.values()))
        return not self._sharing and self._is_young(context, oldest, at_ns)

    def _first(self, context: PolicyContext) -> list[Session]:
        """Return the waiters that precede all levels: those below their share, then the oldest if
        it is old. If the oldest is blocked, the next old one follows it."""
        if self._levels_decide(context, context.now_ns):
            return []
        first = [waiter for waiter in self._sharing.values() if self._is_owed(context, waiter)]
        behind: set[str] = set()
        """The owners whose first waiter is not old. Their other waiters are not old either."""
        for waiter in context.queue.values():
            if waiter.owner in behind:
                continue
            if context.now_ns < self._soonest_old_at_ns(context, waiter):
                break
            if not self._is_old(context, waiter):
                behind.add(waiter.owner)
                continue
            first.append(waiter)
            if waiter.blocked is None:
                break
        return first

    # --- decisions ------------------------------------------------------------------------------

    def order(self, context: PolicyContext) -> Iterable[Session]:
        if len(context.queue) <= 1:
            return context.queue.values()
        first = self._first(context)
        if not first and not context.waiting_in:
            return chain.from_iterable(filter(_lines, self._lanes))
        everybody = self._by_level(context)
        if not first and not context.runners:
            next_one = next(everybody)
            meanwhile = self._meanwhile(context, next_one)
            if meanwhile is None:
                return chain((next_one,), everybody)
            first = [meanwhile, next_one]
        return _each_once(chain(first, everybody)) if first else everybody

    def _meanwhile(self, context: PolicyContext, next_one: Session) -> Session | None:
        """Return the waiter that computes while ``next_one`` is paged in beside it."""
        if next_one.id in context.waiting_in or next_one.mid_burst or next_one.level == LAST:
            return None
        if context.moving_ns(next_one) < WORTH_TQ * context.turn_settings.tq_ns:
            return None
        beside = [
            waiter
            for waiter in context.waiting_in.values()
            if waiter.op is None and not waiter.leaving and context.fit_together(waiter, next_one)
        ]
        return min(beside, key=_level_first, default=None)

    def tenancy_ns(self, tenant: Session, waiter: Session, usual_ns: int) -> int:
        """Return 0 if ``waiter`` would precede it. On the last level, which is also that of
        sessions that were favoured too much, it is a quantum at most: chopping must not pay."""
        if tenant.level > waiter.level:
            return 0
        return min(usual_ns, self._own_quantum_ns(tenant)) if tenant.level == LAST else usual_ns

    def old_at_ns(self, context: PolicyContext, waiter: Session, tenant: Session) -> int:
        return self._old_at_ns(context, waiter, tenant)

    def _by_level(self, context: PolicyContext) -> Iterator[Session]:
        here = sorted(context.waiting_in.values(), key=_queued_ns)
        for level, lane in enumerate(self._lanes[:LAST]):
            yield from (waiter for waiter in here if waiter.level == level)
            yield from (w for w in lane if w.id not in context.waiting_in)
        yield from self._lanes[LAST]

    def reorders_at_ns(self, context: PolicyContext) -> int | None:
        now_ns, wake_ns = context.now_ns, context.wake_ns
        if wake_ns and self._levels_decide(context, wake_ns):
            return None
        to_come_ns = []
        for waiter in self._sharing.values():
            owed_at_ns = self._owed_at_ns(context, waiter)
            if owed_at_ns > now_ns:
                to_come_ns.append(owed_at_ns)
        behind: set[str] = set()
        """The owners whose first waiter is not old. Their other waiters become old later."""
        for waiter in context.queue.values():
            if waiter.owner in behind:
                continue
            soonest_ns = self._soonest_old_at_ns(context, waiter)
            if soonest_ns > now_ns:
                to_come_ns.append(soonest_ns)
                break
            old_at_ns = self._old_at_ns(context, waiter)
            if old_at_ns > now_ns:
                to_come_ns.append(old_at_ns)
                behind.add(waiter.owner)
            elif waiter.blocked is None:
                break
        return min(to_come_ns) if to_come_ns else None

    def quantum_ns(self, context: PolicyContext, session: Session) -> int:
        own_ns, floor_ns = self._own_quantum_ns(session), self.floor_ns(context, session)
        return own_ns if own_ns > floor_ns else floor_ns

    def _own_quantum_ns(self, session: Session) -> int:
        """Return the quantum of ``session`` if its swap costs less."""
        quantum_ns = self._quanta_ns[session.level]
        return quantum_ns if session.weight == 1.0 else round(quantum_ns * session.weight)

    def turn_ends_at_ns(self, context: PolicyContext, runner: Session, waiter: Session) -> int:
        began_ns, in_place = runner.granted_ns, waiter.id in context.waiting_in
        floor_ns = self.floor_ns(context, runner)
        guard_ns = self._in_place_ns if in_place else floor_ns  # in place nothing has to move
        least_ns = began_ns + guard_ns
        if least_ns < runner.protected_until_ns:
            least_ns = runner.protected_until_ns
        if runner.level > waiter.level or self._is_old(context, waiter):
            return least_ns
        if waiter.share and self._is_owed(context, waiter):
            return least_ns
        own_ns = self._own_quantum_ns(runner)
        quantum_ns = own_ns if own_ns > floor_ns else floor_ns
        stop_ns = began_ns + (guard_ns if in_place and not waiter.level else quantum_ns)
        if runner.level < LAST:  # else both are on the last level, and only the quantum counts
            # Its quantum goes on until the runner's level is the waiter's, so that the runner would
            # be behind the waiter; but not until the level is higher.
            above_ns = self._reaches_at_ns(runner, waiter.level + 1)
            if runner.level < waiter.level:
                same_ns = self._reaches_at_ns(runner, waiter.level)
                stop_ns = same_ns if same_ns > stop_ns else stop_ns
            if stop_ns > above_ns:
                stop_ns = above_ns
        return stop_ns if stop_ns > least_ns else least_ns

    def ahead_ns(self, context: PolicyContext, waiter: Session) -> int:
        """Return no limit for a short cell: the turn of a short runner may end at any moment."""
        return NEVER_NS if waiter.level < LAST else super().ahead_ns(context, waiter)

    def _reaches_at_ns(self, runner: Session, level: int) -> int:
        """Return when ``runner``, now on a lower level, will have had enough GPU time to be on
        ``level``."""
        if level > LAST:
            return NEVER_NS
        had_ns = self._levels_ns[level - 1]
        if runner.weight != 1.0:
            had_ns = round(had_ns * runner.weight)
        left_ns = had_ns - runner.attained_ns
        return runner.granted_ns + left_ns if left_ns > 0 else runner.granted_ns

    def victims(self, idle: Iterable[Session], waiters: Sequence[Session]) -> Iterator[Session]:
        yield from idle
        yield from sorted(waiters, key=_last_first)

    def check(self, context: PolicyContext) -> None:
        for level, lane in enumerate(self._lanes):
            queued = {id_ for id_, waiter in context.queue.items() if waiter.level == level}
            kept = {waiter.id for waiter in lane}
            if kept != queued:
                raise AssertionError(f"lane {level}: kept {kept}, recomputed {queued}")
        sharing = {i for i, s in context.queue.items() if s.share and not s.leaving}
        if set(self._sharing) != sharing:
            raise AssertionError(f"sharing: kept {set(self._sharing)}, recomputed {sharing}")


def _last_first(session: Session) -> tuple[int, int]:
    return -session.level, -session.queued_ns


def _level_first(session: Session) -> tuple[int, int]:
    return session.level, session.queued_ns


def _each_once(sessions: Iterable[Session]) -> Iterator[Session]:
    seen: set[SessionId] = set()
    for session in sessions:
        if session.id not in seen:
            seen.add(session.id)
            yield session
