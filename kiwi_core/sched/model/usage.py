"""The recent GPU time of each session while others waited.

Only time in which some session waited counts: GPU time that no other session wanted was taken from
nobody. So a clock runs while the queue is not empty, and a turn counts by that clock.

Usage fades with a half-life. Instead of fading every number at every reading, later time is added
with a larger weight (forward decay): ``2 ** (time since the epoch / half-life)``; to read a number,
divide by the present weight. So sums stay right without being touched, and reading one costs the
same for ten sessions and a thousand. The epoch moves before the weights grow too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.sched.model.session import Session

HALF_LIFE_NS: Final = 1800 * NS_PER_S
"""Long enough for some dozen cells of each session under load, so that chance does not decide.
Short enough that what a session did before lunch no longer counts after it.
"""

EPOCH_NS: Final = 64 * HALF_LIFE_NS
"""Keeps weights below 2**64, far from the limits of floating point."""


class RecentUsage:
    """The clock and the sums over the sessions that wait or run (``State.active``)."""

    def __init__(self) -> None:
        self.epoch_ns = 0
        self.had = 0.0
        """The sum of ``Session.had``, weighted for time, of the sessions that wait or run."""
        self.weight = 0.0
        """The sum of their priority weights."""
        self.owners: dict[str, int] = {}
        """The number of them of each owner that has any."""
        self.running = 0
        """How many sessions run."""
        self.began_ns = 0
        """The sum of ``Session.began_ns`` of those that run."""
        self._clock_ns = 0
        self._waiting_since_ns: int | None = None

    # --- updates --------------------------------------------------------------------------------

    def somebody_waits(self, now_ns: int) -> None:
        self._waiting_since_ns = now_ns

    def nobody_waits(self, now_ns: int) -> None:
        if self._waiting_since_ns != now_ns:
            self._clock_ns = self.clock_ns(now_ns)
        self._waiting_since_ns = None

    def wants(self, session: Session) -> None:
        self.had += session.had
        self.weight += session.weight
        self.owners[session.owner] = self.owners.get(session.owner, 0) + 1

    def rests(self, session: Session) -> None:
        if self.owners[session.owner] == 1:
            del self.owners[session.owner]
        else:
            self.owners[session.owner] -= 1
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
        """Count ``had_ns`` for a turn of ``session`` that is over. ``favoured_ns`` is the part that
        it had because the policy put it before others."""
        if now_ns - self.epoch_ns > EPOCH_NS:
            self._move_epoch(now_ns, everybody)
        counts = 2.0 ** ((now_ns - self.epoch_ns) / HALF_LIFE_NS)
        session.had_turn(counts * had_ns, counts * favoured_ns)
        self.had += counts * had_ns  # (the session counts among those that want until it rests)

    def _move_epoch(self, now_ns: int, everybody: Iterable[Session]) -> None:
        fading = self.fading(now_ns)
        self.epoch_ns = now_ns
        self.had *= fading
        for session in everybody:
            session.fades(fading)

    # --- queries --------------------------------------------------------------------------------

    def clock_ns(self, now_ns: int) -> int:
        """Return the total time so far in which at least one session waited."""
        since_ns = self._waiting_since_ns
        return self._clock_ns if since_ns is None else self._clock_ns + now_ns - since_ns

    def fading(self, now_ns: int) -> float:
        """Return the factor that turns weighted numbers into nanoseconds."""
        return float(2.0 ** ((self.epoch_ns - now_ns) / HALF_LIFE_NS))

    def fair_ns(self, now_ns: int) -> float:
        """Return what each session that waits or runs would have had if they had shared their
        total evenly, present turns included; per unit of priority weight."""
        if not self.weight:
            return 0.0
        present_ns = self.running * self.clock_ns(now_ns) - self.began_ns
        return (self.had * self.fading(now_ns) + present_ns) / self.weight

    def favoured_ns(self, session: Session, now_ns: int) -> float:
        """Return what ``session`` has had before others, per unit of its priority weight, without
        its present turn."""
        return session.favoured * self.fading(now_ns) / session.weight
