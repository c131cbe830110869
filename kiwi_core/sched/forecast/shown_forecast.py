"""The forecast that waiters see: cached briefly, steady along a wait, compared with the outcome.

*Steady.* Along one wait all figures fall or stay the same. They rise, and a reason is shown, only
if the whole new range is longer than the one shown, by more than "about" allows, and has been for
a second. They fall at once only where users see why: the place, the holder or the settings have
changed since the last look. Otherwise they run down faster than the clock.

*Bounds.* Where the policy lets newcomers overtake a suspended burst, the forecast for that burst is
an upper bound ("up to 2 min"): the longest future times the factor that would have covered almost
all earlier waits of this kind.

*Calibrated.* When a wait ends, the forecast records the factor by which it fell outside its
simulated futures. New futures are multiplied by the factors of the last hundred waits of their
kind. Some earlier waits were shorter than forecast, because the holder was idle or soon
finished. Once a wait has lasted longer than such a wait, that has not happened in it, so the factor
of the earlier wait is left out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.sched.forecast.calibration import COUNTED, Calibration
from kiwi_core.sched.forecast.futures import CROWD, Futures, futures, tail_ns
from kiwi_core.sched.forecast.promise import ForecastBasis, Kind, Promise
from kiwi_core.sched.forecast.ranges import Estimate
from kiwi_core.sched.rules import tenancy
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State
from kiwi_core.units import SessionId

KEPT_NS: Final = 250 * NS_PER_MS
"""How long a forecast is reused unless the history changes. So there are at most four a second:
users do not read more. A new place, holder or setting makes a new forecast at once: the figures may
fall because of it, and users must see both together."""

TAIL_KEPT_NS: Final = NS_PER_S
"""How long figures further down the queue are reused."""

NOTICED_NS: Final = NS_PER_S
"""Users do not notice shorter waits."""

SWITCH_SLACK: Final = 1.5
"""The time of a switch varies by a fifth each way, and a bound must hold."""


class ShownForecast(NamedTuple):
    likely: Estimate
    why: str
    """Why the forecast is longer than the one before; mostly ""."""


class Forecast:
    def __init__(self) -> None:
        looks = NS_PER_S // KEPT_NS
        self._looked_ns: deque[int] = deque([-NS_PER_S] * looks, maxlen=looks)
        """Times of the last forecasts, as many as a second may have."""
        self._serial = -1
        """The history's serial at the last forecast."""
        self._seen: tuple[object, ...] = ()
        """What users saw beside the figures at the last look, all waiters together."""
        self._promises: dict[SessionId, Promise] = {}
        self._records: dict[Kind, Calibration] = {}
        self.kept: deque[tuple[Estimate, int]] = deque(maxlen=COUNTED)
        """The first forecast and the duration of each of the last waits."""

    @property
    def right(self) -> int:
        """The number of forecasts in ``kept`` that were right within two seconds or a quarter."""
        return sum(first.is_right(took_ns) for first, took_ns in self.kept)

    def look(self, st: State, now_ns: int) -> dict[SessionId, ShownForecast]:
        """Return the forecast of each waiter that has one."""
        self._close_promises(st)
        changed = self._serial != st.history.serial
        passed_ns = now_ns - self._looked_ns[-1]
        due = changed or passed_ns >= KEPT_NS
        due = due and now_ns - self._looked_ns[0] >= NS_PER_S
        places = tuple(waiter.id for waiter in tenancy.order(st) if not waiter.turn_ending)
        seen = frozenset(st.at_work), places, _settings(st)
        news, self._seen = seen != self._seen, seen
        if st.queue and (due or news):
            self._anew(st, now_ns, news=news)
        return {
            id_: ShownForecast(promise.told(now_ns), promise.why)
            for id_, promise in self._promises.items()
            if st.queue[id_].blocked is None
        }

    # --- what will come -------------------------------------------------------------------------

    def _anew(self, st: State, now_ns: int, *, news: bool) -> None:
        """Make new forecasts. ``news``: what users see beside the figures has changed."""
        self._looked_ns.append(now_ns)
        self._serial = st.history.serial
        ahead = futures(st, now_ns)
        settings = _settings(st)
        troubles = sum(s.backoff_ns > 0 or s.stuck for s in st.sessions.values())
        holders = frozenset(st.at_work)
        place = 0
        tail = self._due_tail(st, ahead, now_ns, news=news)
        last: Estimate | None = None
        for waiter in tuple(tenancy.order(st)):
            standing = ForecastBasis(now_ns, place, settings, troubles, holders)
            place += not waiter.turn_ending  # a session whose turn is ending is shown as a holder
            found = ahead.waits_ns.get(waiter.id)
            if waiter.blocked is not None:  # nobody knows for how long
                self._promises.pop(waiter.id, None)
            elif found is not None:
                fresh = self._foresee(st, waiter, found, now_ns)
                unlucky_ns = ahead.unlucky_ns.get(waiter.id, 0)
                most_ns = None if standing.ahead else _most_ns(st, waiter, now_ns)
                if most_ns is not None:
                    fresh = fresh.no_longer_than(Estimate(most_ns, most_ns, most_ns))
                    unlucky_ns = min(unlucky_ns, most_ns)
                if last is None or fresh.expected_ns > last.expected_ns:
                    last = fresh
                ends_ns = min(found), max(found)
                self._tell(st, waiter, fresh, ends_ns, unlucky_ns, standing)
            elif last is not None and waiter.id in tail:
                further_ns = last.expected_ns + tail[waiter.id]
                if _bounded(st, waiter):
                    fresh = self._foresee(st, waiter, [further_ns], now_ns)
                else:
                    fresh = last.times(further_ns / max(1, last.expected_ns))
                self._tell(st, waiter, fresh, (further_ns, further_ns), 0, standing)
            elif tail or not ahead.has_tail or waiter.id not in self._promises:
                self._promises.pop(waiter.id, None)
            else:  # seen beside the present figure: no reason later on
                self._promises[waiter.id].seen = standing

    def _foresee(self, st: State, waiter: Session, futures_ns: list[int], now_ns: int) -> Estimate:
        record = self._record(_kind(st, waiter))
        if _bounded(st, waiter):
            return record.bound(futures_ns)
        promise = self._promises.get(waiter.id)
        waited_ns = now_ns - promise.began_ns if promise is not None else 0
        return record.likely(futures_ns, waited_ns)

    def _due_tail(
        self, st: State, ahead: Futures, now_ns: int, *, news: bool
    ) -> dict[SessionId, int]:
        """Return ``tail_ns``; empty while the figures further down are young enough. In a crowd
        they cost more than all else, and news are frequent."""
        if not ahead.has_tail:
            return {}
        if news and len(st.queue) <= CROWD:
            return tail_ns(st, ahead.waits_ns)
        for id_ in st.queue:
            promise = self._promises.get(id_)
            if id_ not in ahead.waits_ns and (
                promise is None or now_ns - promise.looked_ns >= TAIL_KEPT_NS
            ):
                return tail_ns(st, ahead.waits_ns)
        return {}

    def _tell(
        self,
        st: State,
        waiter: Session,
        fresh: Estimate,
        ends_ns: tuple[int, int],
        unlucky_ns: int,
        standing: ForecastBasis,
    ) -> None:
        kind, promise = _kind(st, waiter), self._promises.get(waiter.id)
        if promise is not None:
            promise.renew(fresh, unlucky_ns, standing)
            return
        now_ns = standing.now_ns
        self._promises[waiter.id] = Promise(
            kind, waiter.queued_ns, now_ns, fresh, *ends_ns, standing, fresh, now_ns, fresh, fresh,
            now_ns, bound=_bounded(st, waiter),
        )  # fmt: skip

    # --- what came ------------------------------------------------------------------------------

    def _close_promises(self, st: State) -> None:
        """Drop the promises whose waits have ended, and learn from those that were granted."""
        for id_, promise in tuple(self._promises.items()):
            waiter = st.queue.get(id_)
            if waiter is not None and waiter.queued_ns == promise.queued_ns:
                continue
            del self._promises[id_]
            session = st.sessions.get(id_)
            if session is not None and session.granted_ns >= promise.began_ns:
                took_ns = session.granted_ns - promise.began_ns
                self._record(promise.kind).learn(promise, took_ns)
                if max(took_ns, promise.first.expected_ns) >= NOTICED_NS:
                    self.kept.append((promise.first, took_ns))

    def _record(self, kind: Kind) -> Calibration:
        return self._records.setdefault(kind, Calibration())


def _most_ns(st: State, first: Session, now_ns: int) -> int | None:
    """Return the longest wait of the first in line that users can understand: the rest of the
    holder's turn, or of the time for which it may keep its place, and the switch. ``None``: there
    is no such limit."""
    if not st.serialised or st.ops or st.cramped or first.blocked is not None:
        return None
    ends_ns = now_ns if st.keeps is None else st.keeps.ends_ns
    for runner in st.runners.values():
        if not runner.guarded:
            return None
        turn_ends_ns = st.policy.turn_ends_at_ns(st, runner, first)
        ends_ns = max(ends_ns, turn_ends_ns, tenancy.tenancy_ends_ns(st, runner, first))
    switch_ns = st.speed.out_ns(st.resident_bytes - first.resident_bytes)
    switch_ns += st.speed.in_ns(first.footprint_bytes - first.resident_bytes)
    return ends_ns - now_ns + round(SWITCH_SLACK * switch_ns) + NS_PER_S


def _settings(st: State) -> tuple[object, ...]:
    return st.policy.name, st.turn_settings.tq_ns, st.anti_thrash


def _kind(st: State, waiter: Session) -> Kind:
    return Kind(st.policy.name, waiter.mid_burst)


def _bounded(st: State, waiter: Session) -> bool:
    return st.policy.overtakes and waiter.mid_burst
