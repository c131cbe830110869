"""What waiters are told: kept for a moment, kept steady along a wait, and compared with what came.

*Steady.* Along one wait all figures get smaller or stand still. They are told anew, with the reason
why, only where the whole new range is longer than what is shown, by more than "about" allows, and
has been for a second. They fall at once only where people see why: the place, the holder or the
settings have changed. Else they run down faster than the clock.

*Bounds.* Where the policy lets newcomers overtake a stopped burst, that burst is told an upper
bound ("up to 2 min"): the longest future, multiplied by what would have covered almost all
earlier waits of this kind.

*Calibrated.* Of each wait that ended it is kept by how much it fell outside the futures that had
been foreseen. New futures are multiplied by such factors of the last hundred waits of their kind.
A wait that goes on is compared only with those that were not over by then: what made earlier waits
short (a holder who was idle, or soon finished) has not happened to this one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.sched.forecast.estimate import Estimate, likely
from kiwi_core.sched.forecast.futures import Futures, futures, tail_ns
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
    from kiwi_core.units import SessionId

KEPT_NS: Final = 250 * NS_PER_MS
"""Unless somebody comes, goes or is granted. In no second are there more looks than with this pause
between them: people do not read more than a few figures a second."""

HURRY_NS: Final = 50 * NS_PER_MS
"""Between two looks of which the second shows another holder, or another length of the queue: what
falls because of that falls at the same moment, not up to a second later, when nobody sees why."""

TAIL_KEPT_NS: Final = NS_PER_S
"""Further down the queue figures are made anew so often at most."""

LASTING_NS: Final = NS_PER_S
"""So long everything must say that it takes longer, before people are told so."""

COUNTED: Final = 100
"""Waits of which it is known how well they were foretold: an afternoon's."""

NOTICED_NS: Final = NS_PER_S
"""Waits shorter than this are none to people."""

FACTORS: Final = 9
"""Of so many waits something is known at least, and so many factors are taken at most."""

FACTOR_MAX: Final = 20.0

POINTS: Final = 27
"""Futures times factors: what one range is made of."""

HOLDS: Final = 0.98
"""The share of earlier waits that an upper bound would have covered; 95 % are promised."""

BOUND_FACTOR: Final = 4.0
"""An upper bound, in longest foreseen waits, while too few waits are known."""

GOOD: Final = 0.92
"""If a smaller share was right lately, ranges are chosen carefully; more than the 85 % that are
promised."""

_Kind = tuple[str, bool]
"""The policy, and whether it waits to go on: those are overtaken by who comes meanwhile."""


class Past(NamedTuple):
    """A wait that has ended."""

    factor: float
    """By how much it fell outside all futures; 1: it did not."""
    took_ns: int

    def may_follow(self, waited_ns: int) -> bool:
        """Whether a wait that has lasted for ``waited_ns`` may still come as this one did."""
        return self.factor >= 1 or self.took_ns > waited_ns


class Told(NamedTuple):
    likely: Estimate
    why: str
    """Why it takes longer than was told before; mostly ""."""


class Standing(NamedTuple):
    """What figures may follow from, beside lengths, at one look."""

    now_ns: int
    ahead: int
    settings: tuple[object, ...]
    troubles: int
    holders: frozenset[SessionId] = frozenset()

    def looks_like(self, before: Standing) -> bool:
        """Nothing that people see beside the figure has changed."""
        now = self.ahead, self.settings, self.holders
        return now == (before.ahead, before.settings, before.holders)


@dataclass(slots=True)
class Promise:
    """What one waiter was told first, and is told now."""

    kind: _Kind
    queued_ns: int
    began_ns: int
    first: Estimate
    shortest_ns: int
    longest_ns: int
    """Of the futures of the first look."""
    standing: Standing
    """When it was told anew last."""
    fresh: Estimate
    """What was found at the last look, or on the way down to it, and when that was."""
    looked_ns: int
    most: Estimate
    """What was shown then: it is not told more than that."""
    why: str = ""
    longer_since_ns: int | None = None
    bound: bool = False
    """Only ``high_ns`` is told, as an upper bound."""
    seen: Standing = field(init=False)
    """At the last look."""

    def __post_init__(self) -> None:
        self.seen = self.standing

    def told(self, now_ns: int) -> Estimate:
        told = self.fresh.later(now_ns - self.looked_ns).no_longer_than(self.most)
        return told._replace(low_ns=0) if self.bound else told

    def renew(self, fresh: Estimate, unlucky_ns: int, standing: Standing) -> None:
        """What may well still be is not ruled out, however short the last figure was."""
        fresh = fresh._replace(high_ns=max(fresh.high_ns, unlucky_ns))
        now_ns = standing.now_ns
        passed_ns = now_ns - self.looked_ns
        self.most = self.fresh.later(passed_ns).no_longer_than(self.most)
        least = self.most.fallen(passed_ns)
        if not fresh.contradicts(self.most):
            self.longer_since_ns = None
        elif self.longer_since_ns is None:
            self.longer_since_ns = now_ns
        elif now_ns - self.longer_since_ns >= LASTING_NS:
            self.why = _why(self.standing, standing)
            self.standing, self.longer_since_ns = standing, None
            self.most = fresh
        if standing.looks_like(self.seen):
            fresh = fresh.no_shorter_than(least)
        self.fresh, self.seen, self.looked_ns = fresh, standing, now_ns


def _why(before: Standing, now: Standing) -> str:
    if before.settings != now.settings:
        return "the settings were changed"
    if before.troubles < now.troubles:
        return "a move of memory went wrong"
    return "others go first" if before.ahead < now.ahead else "longer than usual"


class Record:
    """How waits of one kind came, compared with what was foreseen and told."""

    def __init__(self) -> None:
        self._waits: deque[Past] = deque(maxlen=COUNTED)
        self._ordered: list[Past] = []
        self._right: deque[bool] = deque(maxlen=COUNTED)

    def learn(self, promise: Promise, took_ns: int) -> None:
        nearest_ns = min(max(took_ns, promise.shortest_ns), promise.longest_ns)
        factor = (took_ns + NS_PER_S) / (nearest_ns + NS_PER_S)  # tiny waits say little
        factor = min(FACTOR_MAX, max(1 / FACTOR_MAX, factor))
        self._waits.append(Past(factor, took_ns))
        self._ordered = sorted(self._waits)
        self._right.append(promise.first.is_right(took_ns))

    def likely(self, futures_ns: list[int], waited_ns: int) -> Estimate:
        """Return what to tell of a wait of this kind that has lasted for ``waited_ns`` by now."""
        if len(self._ordered) < FACTORS:
            return likely(futures_ns)
        factors = self._factors_after(waited_ns)
        known = len(factors)
        count = min(FACTORS, POINTS // len(futures_ns))
        some = [factors[(2 * n + 1) * known // (2 * count)] for n in range(count)]
        careful = sum(self._right) < GOOD * len(self._right)
        return likely([round(ns * by) for ns in futures_ns for by in some], careful=careful)

    def _factors_after(self, waited_ns: int) -> list[float]:
        """Return the factors that a wait may still turn out to have, in order: a shorter one than
        1 counts only if its own wait lasted longer than ``waited_ns``."""
        left = [past.factor for past in self._ordered if past.may_follow(waited_ns)]
        return left or [1.0]

    def bound(self, futures_ns: list[int]) -> Estimate:
        """Return a range whose high end is an upper bound for almost all waits of this kind."""
        known = len(self._ordered)
        factor = self._ordered[int(HOLDS * known)].factor if known >= FACTORS else BOUND_FACTOR
        low_ns, high_ns = min(futures_ns), max(futures_ns)
        high_ns = round((high_ns + NS_PER_S) * max(1.0, factor))
        return Estimate(low_ns, sorted(futures_ns)[len(futures_ns) // 2], high_ns)


class Forecast:
    def __init__(self) -> None:
        looks = NS_PER_S // KEPT_NS
        self._looked_ns: deque[int] = deque([-NS_PER_S] * looks, maxlen=looks)
        """When the last looks were, as many as may be in a second."""
        self._serial = -1
        """The history's at the last one."""
        self._seen: tuple[object, ...] = ()
        """What people saw beside the figures then, all waiters together."""
        self._promises: dict[SessionId, Promise] = {}
        self._records: dict[_Kind, Record] = {}
        self.kept: deque[tuple[Estimate, int]] = deque(maxlen=COUNTED)
        """What was told first and how long it took then, of the last waits."""

    @property
    def right(self) -> int:
        """How many of ``kept`` were foretold within two seconds or a quarter."""
        return sum(first.is_right(took_ns) for first, took_ns in self.kept)

    def look(self, st: State, now_ns: int) -> dict[SessionId, Told]:
        """For each waiter of whom anything can be told."""
        self._settle(st)
        changed = self._serial != st.history.serial
        passed_ns = now_ns - self._looked_ns[-1]
        due = changed or passed_ns >= KEPT_NS
        due = due and now_ns - self._looked_ns[0] >= NS_PER_S
        seen = frozenset(st.at_work), len(st.queue), _settings(st)
        if st.queue and (due or (seen != self._seen and passed_ns >= HURRY_NS)):
            self._seen = seen
            self._anew(st, now_ns)
        return {
            id_: Told(promise.told(now_ns), promise.why)
            for id_, promise in self._promises.items()
            if st.queue[id_].blocked is None
        }

    # --- what will come -------------------------------------------------------------------------

    def _anew(self, st: State, now_ns: int) -> None:
        self._looked_ns.append(now_ns)
        self._serial = st.history.serial
        ahead = futures(st, now_ns)
        settings = _settings(st)
        troubles = sum(s.backoff_ns > 0 or s.stuck for s in st.sessions.values())
        holders = frozenset(st.at_work)
        place = 0
        tail = self._due_tail(st, ahead, now_ns)
        last: Estimate | None = None
        for waiter in tuple(st.policy.order(st)):
            standing = Standing(now_ns, place, settings, troubles, holders)
            place += not waiter.stopping  # who is being stopped is shown as a holder
            found = ahead.waits_ns.get(waiter.id)
            if waiter.blocked is not None:
                self._promises.pop(waiter.id, None)
            elif found is not None:
                fresh = self._foresee(st, waiter, found, now_ns)
                if last is None or fresh.expected_ns > last.expected_ns:
                    last = fresh
                unlucky_ns = ahead.unlucky_ns.get(waiter.id, 0)
                ends_ns = min(found), max(found)
                self._tell(st, waiter, fresh, ends_ns, unlucky_ns, standing)
            elif last is not None and waiter.id in tail:
                further_ns = last.expected_ns + tail[waiter.id]
                if _bounded(st, waiter):
                    fresh = self._foresee(st, waiter, [further_ns], now_ns)
                else:
                    fresh = last.times(further_ns / max(1, last.expected_ns))
                self._tell(st, waiter, fresh, (further_ns, further_ns), 0, standing)
            elif tail or not ahead.has_tail:
                self._promises.pop(waiter.id, None)

    def _foresee(self, st: State, waiter: Session, futures_ns: list[int], now_ns: int) -> Estimate:
        record = self._record(_kind(st, waiter))
        if _bounded(st, waiter):
            return record.bound(futures_ns)
        promise = self._promises.get(waiter.id)
        waited_ns = now_ns - promise.began_ns if promise is not None else 0
        return record.likely(futures_ns, waited_ns)

    def _due_tail(self, st: State, ahead: Futures, now_ns: int) -> dict[SessionId, int]:
        """Empty while what those further down were told is young enough."""
        if not ahead.has_tail:
            return {}
        for id_ in st.queue:
            promise = self._promises.get(id_)
            if id_ not in ahead.waits_ns and (
                promise is None or now_ns - promise.looked_ns >= TAIL_KEPT_NS
            ):
                return tail_ns(st, now_ns, ahead.waits_ns)
        return {}

    def _tell(
        self,
        st: State,
        waiter: Session,
        fresh: Estimate,
        ends_ns: tuple[int, int],
        unlucky_ns: int,
        standing: Standing,
    ) -> None:
        promise = self._promises.get(waiter.id)
        if promise is not None:
            promise.renew(fresh, unlucky_ns, standing)
            return
        kind, now_ns = _kind(st, waiter), standing.now_ns
        self._promises[waiter.id] = Promise(
            kind, waiter.queued_ns, now_ns, fresh, *ends_ns, standing, fresh, now_ns, fresh,
            bound=_bounded(st, waiter),
        )  # fmt: skip

    # --- what came ------------------------------------------------------------------------------

    def _settle(self, st: State) -> None:
        """Those that do not wait any more for what they were told about."""
        for id_, promise in tuple(self._promises.items()):
            waiter = st.queue.get(id_)
            if waiter is not None and waiter.queued_ns == promise.queued_ns:
                continue
            del self._promises[id_]
            session = st.sessions.get(id_)
            if session is not None and session.granted_ns >= promise.began_ns:
                self._learn(promise, session.granted_ns - promise.began_ns)

    def _learn(self, promise: Promise, took_ns: int) -> None:
        self._record(promise.kind).learn(promise, took_ns)
        if max(took_ns, promise.first.expected_ns) >= NOTICED_NS:
            self.kept.append((promise.first, took_ns))

    def _record(self, kind: _Kind) -> Record:
        return self._records.setdefault(kind, Record())


def _settings(st: State) -> tuple[object, ...]:
    return st.policy.name, st.terms.tq_ns, st.anti_thrash


def _kind(st: State, waiter: Session) -> _Kind:
    return st.policy.name, waiter.mid_burst


def _bounded(st: State, waiter: Session) -> bool:
    return st.policy.overtakes and waiter.mid_burst
