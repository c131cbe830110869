"""Whether one session's way in may overlap another's way out: measured, or somebody's setting.

A bus that moves both ways at once is used twice over; one that does not is only shared. The
preloaded libraries measure that, once each, while their program idles.
"""

from __future__ import annotations

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


class OverlapKeeper:
    """Tells the scheduler when it is known, and when it has changed."""

    def __init__(self, setting: Overlap, feed: Callable[[ev.Event], None]) -> None:
        self.setting = setting
        self.ratio: float | None = None
        """As last measured, rounded; ``None``: not measured yet."""
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

    def measured(self, speeds: PagerSpeeds) -> None:
        """The last word counts: a bus that was busy with others' copies just then looks worse, or
        better, than it is, until the next program measures it."""
        better = max(speeds.out_bytes_per_s, speeds.in_bytes_per_s)
        if not better:
            return
        self.ratio = round(speeds.both_bytes_per_s / better, 2)
        log.info("copies both ways at once", ratio=self.ratio, setting=self.setting.value)
        self._tell()

    def _tell(self) -> None:
        if self.pays != self._told:
            self._told = self.pays
            self._feed(ev.OverlapKnown(pays=self.pays))
