"""Calls that may hang, each in a thread of its own.

Not ``asyncio.to_thread``: its few threads are shared, so that a handful of hung driver calls would
stop every other call of the daemon.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


async def in_thread(call: Callable[[], _T], name: str) -> _T:
    """What ``call`` returns or raises. If the caller stops waiting, the thread is left to itself
    (it ends with the process, however it hangs)."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(value: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return  # nobody waits any more
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: _T | None = None
        error: BaseException | None = None
        try:
            value = call()
        except Exception as raised:  # noqa: BLE001  (for the caller to judge)
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            return  # the loop has closed: the daemon is ending

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
