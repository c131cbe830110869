"""Count how much of each limited thing users hold (``kiwi_core.peer_limits``); in the loop only."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kiwi_core.peer_limits import PEER_LIMITS, RESERVE, SESSIONS, fitted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kiwi_core.peer_limits import PeerLimit


FEW_SESSIONS: Final = 128
"""Below this, one course or one team soon uses up all sessions: the admin should know."""


class Share:
    """How much of one thing each user (``uid``) holds. ``may`` checks, ``take`` and ``give_back``
    count; things that must be held in any case (an earlier daemon's session) are counted, too.
    """

    def __init__(self, limit: PeerLimit, privileged: Collection[int] = ()) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0
        """How often ``may`` returned false."""
        self._privileged = privileged
        self._of: Counter[int] = Counter()

    def may(self, uid: int, more: int = 1) -> bool:
        """Return whether ``uid`` may hold ``more`` of it. Counts refusals."""
        if self.free(uid, more):
            return True
        self.refused += 1
        return False

    def free(self, uid: int, more: int = 1) -> bool:
        """Do the same as ``may``, but do not count refusals."""
        most = self.limit.most
        privileged = uid in self._privileged
        room = None if most is None else most - self.used
        if privileged:
            return room is None or more <= room + RESERVE
        own = self._of[uid] + more
        within_share = own <= self.limit.per_user
        return within_share and (room is None or (more <= room and own <= max(room, 1)))

    def take(self, uid: int, amount: int = 1) -> None:
        if amount:
            self._of[uid] += amount
            self.used += amount

    def give_back(self, uid: int, amount: int = 1) -> None:
        self.used -= amount
        self._of[uid] -= amount
        if not self._of[uid]:
            del self._of[uid]  # users without any are not remembered


class Shares:
    """One ``Share`` for each row of the table."""

    def __init__(
        self, limits: Iterable[PeerLimit] = PEER_LIMITS, privileged: Collection[int] = ()
    ) -> None:
        self._by_name = {limit.name: Share(limit, privileged) for limit in limits}

    @staticmethod
    def of_this_process(daemon_uid: int, sessions_per_user: int | None = None) -> Shares:
        """Return the shares that the limit of descriptors allows; root and the daemon's owner are
        privileged. ``sessions_per_user`` is a lower limit that the admin set, if any."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = fitted(descriptors)
        if sessions_per_user is not None:
            limits = tuple(
                replace(limit, per_user=min(limit.per_user, sessions_per_user))
                if limit.name == SESSIONS
                else limit
                for limit in limits
            )
        return Shares(limits, {0, daemon_uid})

    def warning(self) -> str:
        """Return a warning for the admin if descriptors limit the sessions, else ""."""
        most = self[SESSIONS].limit.most or 0
        if most >= FEW_SESSIONS:
            return ""
        return (
            f"The limit of open files leaves room for {most} sessions. Raise it for the daemon"
            " (LimitNOFILE= of systemd, `ulimit -Hn`)."
        )

    def __getitem__(self, name: str) -> Share:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Share]:
        return iter(self._by_name.values())
