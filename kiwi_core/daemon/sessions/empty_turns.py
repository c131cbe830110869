"""Turns that a program got for a call at its gate, although it has not started the driver.

No call of such a program can be inside the driver: the gate holds calls that come after ``cuInit``.
Its turn uses nothing, and would still last until the GPU has been idle for it for seconds. So such
a turn ends as soon as somebody waits, and the program's next request is delayed. A program that has
started the driver is never delayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kiwi_core.units import SessionId

BACKOFF_S: Final = 0.25
"""Delay of the request after the first empty turn; doubles with each one. An honest program that is
taken for an idle one loses no more than people notice."""

BACKOFF_MAX_S: Final = 16.0
"""Longest delay: even a hundred such programs together cost others only a look each, six times a
second, and none waits for ever."""


class EmptyTurns:
    """The delay that each session owes for its empty turns. ``now_s`` is any steady clock in
    seconds; ``first_s`` and ``most_s`` are the first delay and the longest one."""

    def __init__(self, first_s: float = BACKOFF_S, most_s: float = BACKOFF_MAX_S) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._owed: dict[SessionId, tuple[float, float]] = {}
        """For each session, the delay after its next empty turn, and the time until which it waits
        now."""

    def was_empty(self, session: SessionId, now_s: float) -> None:
        """Record an empty turn that has just ended."""
        backoff_s, _ = self._owed.get(session, (self._first_s, now_s))
        self._owed[session] = (min(self._most_s, 2 * backoff_s), now_s + backoff_s)

    def forget(self, session: SessionId) -> None:
        """Forget the empty turns of a session that has used the GPU, or has left."""
        self._owed.pop(session, None)

    def left_s(self, session: SessionId, now_s: float) -> float:
        """Return how long the session's next request still has to wait; 0: not at all."""
        _, until_s = self._owed.get(session, (self._first_s, now_s))
        return max(0.0, until_s - now_s)
