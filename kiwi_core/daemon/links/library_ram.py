"""The limits on the system RAM that the preloaded libraries hold in reserve.

The libraries report what they hold, and ``host_share`` divides the budget. A page-out that finds
too little RAM waits, briefly, until others have given back what they hold only for speed.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from kiwi_core import clock
from kiwi_core.daemon.links.host_budget import ram_user
from kiwi_core.daemon.links.host_share import divide, who_gives_back
from kiwi_core.daemon.links.link import Link
from kiwi_core.units import NS_PER_S
from kiwi_core.wire.pager import PagerLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.links.host_budget import HostBudget
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.pager.linked import LinkedProcess
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

REVIEW_S = 0.25
"""Interval of reviews; libraries report what they hold no more often."""

GIVE_BACK_WITHIN_S = 5.0
"""Time to give memory back: some ten milliseconds per pinned GiB. A slower library is frozen."""

DOUBT_AFTER_S = 1.0
"""A library that was asked and gives back nothing in this time is frozen, or its reports are wrong.
Others are asked then, and its word does not count for a while."""

LOOK_AGAIN_S = 0.02
"""Interval of looks while a page-out waits for memory to be given back."""


@dataclass(eq=False)
class RamClaim:
    """A page-out that waits for RAM, or takes it now. ``left_then_bytes`` is what was left when it
    began to take; ``None``: it waits."""

    session: SessionId
    more_bytes: int
    left_then_bytes: int | None = None

    def due_bytes(self, left_bytes: int) -> int:
        """Return the bytes that it has still to take, estimated from what is left now."""
        if self.left_then_bytes is None:
            return self.more_bytes
        return max(0, self.more_bytes - max(0, self.left_then_bytes - left_bytes))


class LibraryRam:
    """``crowded`` returns whether page-outs are likely: then libraries copy memory ahead."""

    def __init__(
        self, links: Links, budget: HostBudget, crowded: Callable[[], bool] = lambda: False
    ) -> None:
        self._links = links
        self._budget = budget
        self._crowded = crowded
        self._loop = asyncio.get_running_loop()
        self._told: dict[Link, tuple[Connection, PagerLimits]] = {}
        self._due: asyncio.TimerHandle | None = None
        self._claims: set[RamClaim] = set()

    # --- when something changed -----------------------------------------------------------------

    def after(self, _step: Step) -> None:
        self.changed()

    def changed(self) -> None:
        """Review the limits soon: a library reported, or an event was handled. Costs nothing while
        no library is linked."""
        if self._links and self._due is None:
            self._due = self._loop.call_later(REVIEW_S, self._review)

    def _review(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        links = self._links.everybody()
        self._told = {link: said for link in links if (said := self._told.get(link)) is not None}
        inside = [link for link in links if link.session is not None]
        users = [ram_user(link) for link in inside]
        budget_bytes, others_bytes = self._budget.budget_bytes(), self._budget.others_bytes()
        shares = dict(zip(inside, divide(budget_bytes, others_bytes, users), strict=True))
        for link in self._squeezed(inside):
            shares[link] = ram_user(link).out_bytes
        ahead = self._crowded()
        for link in links:
            connection = link.connection
            if connection is None or not link.greeted:
                continue  # it has not reported its state
            limits = PagerLimits(arena_bytes=shares.get(link, 0), ahead=ahead)
            if self._told.get(link) != (connection, limits):
                self._told[link] = (connection, limits)
                connection.send(limits)

    # --- RAM for a page-out ---------------------------------------------------------------------

    async def before_page_out(
        self, links: Sequence[LinkedProcess], deadline_ns: int
    ) -> RamClaim | None:
        """Make room for a page-out of all that ``links`` (of one session) own, beyond the RAM that
        they already hold for it."""
        more_bytes = sum(
            max(0, one.report.resident_bytes - ram_user(one).reclaimable_bytes) for one in links
        )
        session = next((link.session for link in links if isinstance(link, Link)), None)
        if session is None:
            return None
        return await self.make_ram_room(session, more_bytes, deadline_ns)

    @asynccontextmanager
    async def room_for(
        self, those: Sequence[LinkedProcess], deadline_ns: int
    ) -> AsyncIterator[None]:
        """Wait, briefly, for the RAM that a page-out of ``those`` takes, and keep it until the
        end."""
        claim = await self.before_page_out(those, deadline_ns)
        try:
            yield
        finally:
            self.done(claim)

    async def make_ram_room(
        self, session: SessionId, more_bytes: int, deadline_ns: int
    ) -> RamClaim | None:
        """Wait, briefly, until ``more_bytes`` of RAM are there for a page-out of ``session``. The
        claim counts until ``done``. On failure the page-out is tried all the same: its own check is
        more exact."""
        if more_bytes <= 0:
            return None
        left_s = (deadline_ns - clock.now_ns()) / NS_PER_S
        within_s = max(0.0, min(GIVE_BACK_WITHIN_S, left_s / 2))
        claim = RamClaim(session, more_bytes)
        self._claims.add(claim)
        ends_at_s = clock.now_s() + within_s
        asked: dict[Link, tuple[int, float]] = {}
        try:
            while self._lacking_bytes() > 0 and clock.now_s() < ends_at_s:
                self._review()
                if not self._ask_back(asked):
                    break  # nobody holds anything that could be given back
                await asyncio.sleep(LOOK_AGAIN_S)
        except asyncio.CancelledError:
            self.done(claim)
            raise
        claim.left_then_bytes = self._budget.left_bytes()
        self.changed()
        return claim

    def done(self, claim: RamClaim | None) -> None:
        """Drop ``claim``: its memory is out, or will not be."""
        if claim is not None:
            self._claims.discard(claim)

    def _ask_back(self, asked: dict[Link, tuple[int, float]]) -> bool:
        """Return whether any link can give back. ``asked``: what each held, and since when."""
        squeezed = self._squeezed(self._links.everybody())
        now_s = clock.now_s()
        for link in squeezed:
            holds_bytes = ram_user(link).reclaimable_bytes
            held_bytes, since_s = asked.get(link, (holds_bytes + 1, now_s))
            if holds_bytes < held_bytes:
                asked[link] = holds_bytes, now_s
            elif now_s - since_s > DOUBT_AFTER_S:
                log.warning("memory not given back", pid=link.ref.pid, bytes=holds_bytes)
                link.doubt()
        return bool(squeezed)

    def _lacking_bytes(self) -> int:
        if all(claim.left_then_bytes is not None for claim in self._claims):
            return 0  # nobody waits
        left_bytes = self._budget.left_bytes()
        return sum(claim.due_bytes(left_bytes) for claim in self._claims) - left_bytes

    def _squeezed(self, links: Iterable[Link]) -> list[Link]:
        """Return the links that shall give back now; none of a session that is being paged out."""
        lacking_bytes = self._lacking_bytes()
        if lacking_bytes <= 0:
            return []
        claimants = {claim.session for claim in self._claims}
        others = [link for link in links if link.connected and link.session not in claimants]
        return [others[i] for i in who_gives_back(lacking_bytes, [ram_user(x) for x in others])]
