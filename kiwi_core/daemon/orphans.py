"""After a session's death: the children that it left behind are let go.

Those that have the preloaded library can be sessions of their own: they come back when they are
used, in their turn (``LinkDesk.orphaned``). The others cannot say so: a kernel that is killed while
the driver holds it may leave a child (a worker, a script) that is held, too, and that nobody would
ever bring back.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from kiwi_core.pager.api import Refused
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.operations import Operations
    from kiwi_core.pager.api import Pager, Target

log = structlog.get_logger(__name__)

AGAIN_AFTER_S = 5.0
"""Between attempts while there is no room for a child in the GPU."""

ONE_TRY_S = 60.0
"""For one attempt: the lock, the room, the copy."""


class Orphans:
    """One task per death; most find nothing to do within milliseconds. ``adopt`` is told when
    nothing moves any more, unless the session was leaving Kiwi; ``done`` when there is nothing more
    to do for it."""

    def __init__(
        self,
        pager: Pager,
        operations: Operations,
        *,
        adopt: Callable[[Target], None],
        done: Callable[[Target], None],
    ) -> None:
        self._pager = pager
        self._adopt = adopt
        self._done = done
        self._operations = operations
        self._tasks: set[asyncio.Task[None]] = set()

    def let_go(self, target: Target, *, was_leaving: bool) -> None:
        task = asyncio.ensure_future(self._let_go(target, was_leaving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_go(self, target: Target, was_leaving: bool) -> None:
        while target.session in self._operations.sessions:
            await asyncio.sleep(0.1)
        if not was_leaving:
            self._adopt(target)
        while await self._lacks_room(target):
            await asyncio.sleep(AGAIN_AFTER_S)
        self._done(target)

    async def _lacks_room(self, target: Target) -> bool:
        """Tries once; whether it is worth another try."""
        deadline_ns = round((time.monotonic() + ONE_TRY_S) * NS_PER_S)
        try:
            outcome = await self._pager.page_in(target, deadline_ns)
        except Exception:
            log.exception("children left behind could not be let go", session=target.session)
            return False
        return isinstance(outcome, Refused) and outcome.reason is Reason.NO_ROOM
