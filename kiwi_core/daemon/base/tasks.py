"""Tasks that a daemon cannot do without."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine


def endless(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Start ``work``. If it ends in any way but by cancellation, the daemon counts as crashed,
    whatever the cause: a daemon without its observer is blind. Elsewhere an ``OSError`` for want of
    a descriptor is no crash."""

    def crash(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            ended = RuntimeError(f"a task of the daemon ended: {name}")
            ended.__cause__ = task.exception()
            task.get_loop().call_exception_handler({"message": str(ended), "exception": ended})

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(crash)
    return task
