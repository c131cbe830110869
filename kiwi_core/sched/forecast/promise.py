"""The forecast that was promised to one waiter, and how it changes along the wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.sched.forecast.ranges import Estimate
    from kiwi_core.units import SessionId

LASTING_NS: Final = NS_PER_S
"""How long all forecasts must be longer before users see a longer one."""


class Kind(NamedTuple):
    """The waits that are alike."""

    policy: str
    mid_burst: bool
    """The waiter was suspended in mid-burst, and so may be overtaken."""


class ForecastBasis(NamedTuple):
    """The facts at one forecast that figures depend on, apart from burst lengths."""

    now_ns: int
    ahead: int
    settings: tuple[object, ...]
    troubles: int
    holders: frozenset[SessionId] = frozenset()

    def looks_like(self, before: ForecastBasis) -> bool:
        """Return whether place, settings and holders are the same, so that no user could tell why a
        figure becomes shorter."""
        now = self.ahead, self.settings, self.holders
        return now == (before.ahead, before.settings, before.holders)


@dataclass(slots=True)
class Promise:
    """The first and the present forecast for one waiter."""

    kind: Kind
    queued_ns: int
    began_ns: int
    first: Estimate
    shortest_ns: int
    longest_ns: int
    """``shortest_ns`` and ``longest_ns`` are the extremes of the futures of the first forecast."""
    standing: ForecastBasis
    """The facts when the figures last rose, or of the first forecast."""
    fresh: Estimate
    """The result of the last forecast, made at ``looked_ns``."""
    looked_ns: int
    most: Estimate
    """The upper limit of what is shown."""
    shown: Estimate
    """What was shown at the last look, which was at ``shown_ns``."""
    shown_ns: int
    why: str = ""
    longer_since_ns: int | None = None
    bound: bool = False
    """Whether only ``high_ns`` is shown, as an upper bound."""
    runs_down: bool = False
    """Whether a shorter ``fresh`` is not shown at once: figures run down to it."""
    seen: ForecastBasis = field(init=False)
    """The facts at the last look: those at the last forecast, or later ones."""

    def __post_init__(self) -> None:
        self.seen = self.standing

    def told(self, now_ns: int) -> Estimate:
        """Return what is shown at a look ``now_ns``."""
        self.shown = self.most = self._now(now_ns)
        self.shown_ns = now_ns
        return self.shown._replace(low_ns=0) if self.bound else self.shown

    def _now(self, now_ns: int) -> Estimate:
        now = self.fresh.later(now_ns - self.looked_ns).no_longer_than(self.most)
        if self.runs_down:
            now = now.no_shorter_than(self.shown.fallen(now_ns - self.shown_ns))
        return now

    def renew(self, fresh: Estimate, unlucky_ns: int, standing: ForecastBasis) -> None:
        """Take over the estimate ``fresh``. Its high end is at least ``unlucky_ns``: a wait that is
        still likely is never ruled out."""
        fresh = fresh._replace(high_ns=max(fresh.high_ns, unlucky_ns))
        now_ns = standing.now_ns
        self.most = self._now(now_ns)
        if not fresh.contradicts(self.most):
            self.longer_since_ns = None
        elif self.longer_since_ns is None:
            self.longer_since_ns = now_ns
        elif now_ns - self.longer_since_ns >= LASTING_NS:
            before = self.standing
            if before.settings != standing.settings:
                self.why = "the settings were changed"
            elif before.troubles < standing.troubles:
                self.why = "a move of memory went wrong"
            elif before.ahead < standing.ahead:
                self.why = "others go first"
            else:
                self.why = "longer than usual"
            self.standing, self.longer_since_ns = standing, None
            self.most = fresh
        self.runs_down = standing.looks_like(self.seen)
        self.fresh, self.seen, self.looked_ns = fresh, standing, now_ns
