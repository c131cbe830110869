"""Coroutines for tests that are not coroutines: they run in a loop of their own, in the
background."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

_T = TypeVar("_T")

PATIENCE_S = 60.0


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, _T], within_s: float | None = PATIENCE_S) -> _T:
        return self.begin(coroutine).result(within_s)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` in the loop's thread and return its result."""

        async def called() -> _T:
            return function()

        return self.run(called())

    def close(self) -> None:
        self.run(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


async def cancel_all() -> None:
    """Cancel all other tasks of this loop, and wait for their end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Blocking:
    """A wrapper of an object that turns its coroutines into functions and changes nothing else."""

    def __init__(self, wrapped: Any, loop: Loop) -> None:
        self._wrapped = wrapped
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *args, **named: self._loop.run(found(*args, **named), None)
