"""Release the processes that a session leaves behind when it ends.

Those that have the preloaded library become sessions of their own (``LinkHandler.orphaned``).
Others cannot ask for anything: a kernel that is killed while the driver has it locked may leave a
child that is locked, too. It also handles a session that leaves Kiwi with its gate shut by a failed
move.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from kiwi_core import clock
from kiwi_core.pager.api import Refused
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.daemon.engine.operations import OperationRunner
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.sessions.link_handler import LinkHandler
    from kiwi_core.pager.api import Pager, Target

log = structlog.get_logger(__name__)

AGAIN_AFTER_S = 5.0
"""Pause between attempts while the GPU has no room for a child."""

ONE_TRY_S = 60.0
"""Time for one attempt: the lock, the room, the copy."""


class Orphans:
    """The processes left behind; one task per death, which mostly finds nothing to do."""

    def __init__(
        self, pager: Pager, operations: OperationRunner, links: Links, link_handler: LinkHandler
    ) -> None:
        self._pager = pager
        self._operations = operations
        self._links = links
        self._link_handler = link_handler
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        """True when the daemon leaves: no process becomes a session any more."""

    @property
    def at_work(self) -> bool:
        """Return whether processes of ended sessions are still being released."""
        return bool(self._tasks)

    def bring_back(self, target: Target, *, was_leaving: bool) -> None:
        task = asyncio.ensure_future(self._bring_back(target, was_leaving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, target: Target, was_leaving: bool) -> None:
        while target.session in self._operations.sessions:
            await asyncio.sleep(0.1)
        if not (was_leaving or self.closed):
            self._link_handler.orphaned(target.session)
        while await self._worth_another_try(target):
            await asyncio.sleep(AGAIN_AFTER_S)
        if not self.closed:
            self._link_handler.left(target.session)

    async def _worth_another_try(self, target: Target) -> bool:
        """Try once; return whether to try again. No program stays shut for ever, whatever fails
        now."""
        deadline_ns = round((clock.now_s() + ONE_TRY_S) * NS_PER_S)
        try:
            outcome = await self._pager.page_in(target, deadline_ns)
        except Exception:
            log.exception("children left behind could not be let go", session=target.session)
            return False
        if not isinstance(outcome, Refused) or outcome.reason is Reason.GONE:
            return False
        return outcome.reason is Reason.NO_ROOM or self._links.shut(target.session)
