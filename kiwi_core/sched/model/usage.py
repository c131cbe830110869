"""How much of the GPU each session has had lately while others waited for it.

Only time in which anybody waited counts: what nobody else wanted was taken from nobody. So there is
a clock that runs while there is a queue, and a turn counts by what that clock says.

What was had fades with a half-life. Instead of fading every number at every look, what is added
counts more the later it is (forward decay): ``2 ** (time since the epoch / half-life)``; to read a
number, divide by the present weight. So sums stay right without being touched, and reading one
costs the same for ten sessions and a thousand. Before the weights grow too large the epoch moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.model.session import Session

HALF_LIFE_NS: Final = 1800 * NS_PER_S
"""Some dozen cells of everybody under load, or chance decides; what somebody did before lunch is
forgiven after it."""

EPOCH_NS: Final = 64 * HALF_LIFE_NS
"""Weights stay below 2**64: far from where floating point ends."""


class Usage:
    """Sums are over the sessions that wait or run (``State.active``)."""

    def __init__(self) -> None:
        self.epoch_ns = 0
        self.had = 0.0
        """Of all that want, weighted; sum of their ``Session.had``."""
        self.weight = 0.0
        """Sum of their priority weights."""
        self.running = 0
        """How many run just now."""
        self.began_ns = 0
        """Sum of what the clock showed when their turns began (``Session.began_ns``)."""
        self._clock_ns = 0
        self._waiting_since_ns: int | None = None

    # --- told -----------------------------------------------------------------------------------

    def somebody_waits(self, now_ns: int) -> None:
        self._waiting_since_ns = now_ns

    def nobody_waits(self, now_ns: int) -> None:
        if self._waiting_since_ns != now_ns:
            self._clock_ns = self.clock_ns(now_ns)
        self._waiting_since_ns = None

    def wants(self, session: Session) -> None:
        self.had += session.had
        self.weight += session.weight

    def rests(self, session: Session) -> None:
        self.weight -= session.weight  # exact: the weights are powers of two
        self.had = self.had - session.had if self.weight else 0.0

    def runs(self, session: Session) -> None:
        self.running += 1
        self.began_ns += session.began_ns

    def stops(self, session: Session) -> None:
        self.running -= 1
        self.began_ns -= session.began_ns

    def add(
        self,
        session: Session,
        had_ns: int,
        favoured_ns: int,
        now_ns: int,
        everybody: Iterable[Session],
    ) -> None:
        """Its turn is over and counts ``had_ns``. ``favoured_ns``: what it had of that because the
        policy put it before others."""
        if now_ns - self.epoch_ns > EPOCH_NS:
            self._move_epoch(now_ns, everybody)
        counts = 2.0 ** ((now_ns - self.epoch_ns) / HALF_LIFE_NS)
        session.had += counts * had_ns
        session.favoured += counts * favoured_ns
        self.had += counts * had_ns  # (it is one of those that want until it rests)

    def _move_epoch(self, now_ns: int, everybody: Iterable[Session]) -> None:
        fading = self.fading(now_ns)
        self.epoch_ns = now_ns
        self.had *= fading
        for session in everybody:
            session.had *= fading
            session.favoured *= fading

    # --- asked ----------------------------------------------------------------------------------

    def clock_ns(self, now_ns: int) -> int:
        """For how long anybody has waited so far, all together."""
        since_ns = self._waiting_since_ns
        return self._clock_ns if since_ns is None else self._clock_ns + now_ns - since_ns

    def fading(self, now_ns: int) -> float:
        """Times this, weighted numbers are nanoseconds."""
        return float(2.0 ** ((self.epoch_ns - now_ns) / HALF_LIFE_NS))

    def fair_ns(self, now_ns: int) -> float:
        """What each of those that want would have, had they shared evenly what they had together,
        present turns included; per unit of priority weight."""
        if not self.weight:
            return 0.0
        present_ns = self.running * self.clock_ns(now_ns) - self.began_ns
        return (self.had * self.fading(now_ns) + present_ns) / self.weight

    def favoured_ns(self, session: Session, now_ns: int) -> float:
        """What ``session`` has had before others, per unit of its priority weight; its present
        turn apart."""
        return session.favoured * self.fading(now_ns) / session.weight
