"""After a session's end: the processes that it left behind are let go.

A session that leaves Kiwi is one of them if a move that failed has left its gate shut.
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
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

AGAIN_AFTER_S = 5.0
"""Between attempts while there is no room for a child in the GPU."""

ONE_TRY_S = 60.0
"""For one attempt: the lock, the room, the copy."""


class Orphans:
    """One task per death; most find nothing to do within milliseconds. ``adopt`` is told when
    nothing moves any more, unless the session was leaving Kiwi; ``done`` when there is nothing more
    to do for it. ``shut`` says whether a library of it still holds its program."""

    def __init__(
        self,
        pager: Pager,
        operations: Operations,
        *,
        adopt: Callable[[Target], None],
        done: Callable[[Target], None],
        shut: Callable[[SessionId], bool],
    ) -> None:
        self._pager = pager
        self._adopt = adopt
        self._done = done
        self._shut = shut
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
        while await self._worth_another_try(target):
            await asyncio.sleep(AGAIN_AFTER_S)
        self._done(target)

    async def _worth_another_try(self, target: Target) -> bool:
        """Tries once. No program is left shut for ever, whatever is in the way now."""
        deadline_ns = round((time.monotonic() + ONE_TRY_S) * NS_PER_S)
        try:
            outcome = await self._pager.page_in(target, deadline_ns)
        except Exception:
            log.exception("children left behind could not be let go", session=target.session)
            return False
        if not isinstance(outcome, Refused) or outcome.reason is Reason.GONE:
            return False
        return outcome.reason is Reason.NO_ROOM or self._shut(target.session)
