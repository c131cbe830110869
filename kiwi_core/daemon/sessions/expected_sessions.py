"""Sessions that servers have announced and that have not joined yet, and a newcomer's wait."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError
from kiwi_core.units import NS_PER_MS, NS_PER_S, ns_to_seconds, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.sched.scheduler import Scheduler

FOR_MAX_S: Final = 24 * 3600.0
"""Longest time that a session can be expected: a notebook that is opened and not used for a day."""

KEY_MAX: Final = 128
"""Longest key, characters: the id of a kernel has 36."""

SOON_NS: Final = 10 * NS_PER_S
"""A session expected since less than this counts as one that asks at once: many kernels that are
started together (a batch, a restarted server) spread over the GPUs. Later it only counts where
waits are equal: its user reads or types."""

KEPT_NS: Final = 250 * NS_PER_MS
"""How long a newcomer's wait is reused while nobody begins or ends anything: many readers of the
status ask at the same time."""


@dataclass(eq=False, repr=False)
class ExpectedSessions:
    """``blind`` returns whether the GPU cannot be read."""

    _scheduler: Scheduler
    _share: Share
    _blind: Callable[[], bool]
    _sessions: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """When each session was announced and until when it is expected, by user and key."""
    _computed: tuple[int, tuple[int, int], float | None] | None = None
    """The newcomer's wait: when it was computed, from which state, seconds."""

    def expect(self, uid: int, key: str, for_s: float) -> None:
        """Raise ``CallerError``: "bad-setting" for a wrong time or key, "busy" where the user
        expects too many."""
        if not 0 <= for_s <= FOR_MAX_S or not 0 < len(key) <= KEY_MAX:
            raise CallerError(
                "bad-setting",
                f"A session cannot be expected for {for_s} s with a key of {len(key)} characters.",
                f"Give 0 to {FOR_MAX_S:.0f} s and 1 to {KEY_MAX} characters.",
            )
        self.joined(uid, key)
        self._lapse()
        if not for_s:
            return
        if not self._share.may(uid):
            raise CallerError(
                "busy", "You have announced too many sessions.", "They lapse, or join, in time."
            )
        self._share.take(uid)
        now_ns = time.monotonic_ns()
        self._sessions[uid, key] = now_ns, now_ns + seconds_to_ns(for_s)

    def joined(self, uid: int, key: str) -> None:
        """Stop expecting a session, which has joined or will not come."""
        if self._sessions.pop((uid, key), None) is not None:
            self._share.give_back(uid)

    def count(self) -> int:
        self._lapse()
        return len(self._sessions)

    def newcomer_wait_s(self) -> float | None:
        """Return the wait of a newcomer that comes after the sessions expected to ask at once;
        ``None``: not known, or the GPU cannot be read."""
        self._lapse()
        if self._blind():
            return None
        now_ns = time.monotonic_ns()
        soon = sum(since_ns > now_ns - SOON_NS for since_ns, _ in self._sessions.values())
        of = soon, self._scheduler.history_serial
        if (
            self._computed is None
            or self._computed[1] != of
            or now_ns - self._computed[0] > KEPT_NS
        ):
            wait_ns = self._scheduler.newcomer_wait_ns(now_ns, soon)
            self._computed = now_ns, of, None if wait_ns is None else ns_to_seconds(wait_ns)
        return self._computed[2]

    def _lapse(self) -> None:
        now_ns = time.monotonic_ns()
        over = [who for who, (_, until_ns) in self._sessions.items() if until_ns <= now_ns]
        for uid, key in over:
            self.joined(uid, key)
