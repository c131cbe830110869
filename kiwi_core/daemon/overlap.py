"""Whether one session's way in may overlap another's way out: measured, or somebody's setting.

A bus that moves both ways at once is used twice over; one that does not is only shared. The
preloaded libraries measure that, once each, while their program idles.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.sched import events as ev
from kiwi_core.states import Overlap

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.wire.pager import PagerSpeeds

log = structlog.get_logger(__name__)

PAYS_FROM: Final = 1.25
"""Both ways together against the faster one alone. Below this, what moving by steps costs (a
message and a look at free memory for each) eats what it gains."""


USERS_MAX: Final = 64
"""Whose words are kept; the machine is the same for all."""


class OverlapKeeper:
    """Tells the scheduler when it is known, and when it has changed."""

    def __init__(self, setting: Overlap, feed: Callable[[ev.Event], None]) -> None:
        self.setting = setting
        self.ratio: float | None = None
        """As last measured, rounded; ``None``: not measured yet."""
        self._ratio_of: dict[int, float] = {}
        """Each user's last word, the oldest first."""
        self._feed = feed
        self._told = False

    @property
    def pays(self) -> bool:
        if self.setting is Overlap.AUTO:
            return self.ratio is not None and self.ratio >= PAYS_FROM
        return self.setting is Overlap.ON

    def begin(self) -> None:
        """The scheduler is new."""
        self._tell()

    def measured(self, uid: int, speeds: PagerSpeeds) -> None:
        """The last word of a user's libraries counts: a bus that was busy with others' copies just
        then looks worse, or better, than it is, until the next program measures it. Of several
        users the middle one is believed, so that one who lies decides nothing."""
        better = max(speeds.out_bytes_per_s, speeds.in_bytes_per_s)
        if not better:
            return
        both = min(speeds.both_bytes_per_s, speeds.out_bytes_per_s + speeds.in_bytes_per_s)
        self._ratio_of.pop(uid, None)
        self._ratio_of[uid] = round(both / better, 2)
        if len(self._ratio_of) > USERS_MAX:
            del self._ratio_of[next(iter(self._ratio_of))]
        ratio = median_low(self._ratio_of.values())
        if ratio != self.ratio:
            self.ratio = ratio
            log.info("copies both ways at once", ratio=ratio, setting=self.setting.value)
        self._tell()

    def _tell(self) -> None:
        if self.pays != self._told:
            self._told = self.pays
            self._feed(ev.OverlapKnown(pays=self.pays))
