"""Run blocking work in daemon threads, so that it does not delay the server's end. (An executor's
threads are waited for, and a daemon may take a minute to start.)
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], name: str) -> _T:
    """Return what ``work()`` returns or raises. If the caller is cancelled, the thread goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            call_in(loop, _fail, done, error)
        else:
            call_in(loop, _resolve, done, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Do the same as ``call_soon_threadsafe``, but nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def _resolve(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
