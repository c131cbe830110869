"""The checkpoint pager for programs without asyncio; it runs in a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from kiwi_core.errors import CallerError
from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu, gpus
from kiwi_core.movers.pool import MoverPool
from kiwi_core.pager.session_pager import SessionPager

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kiwi_core.pager.api import Outcome, Target

_T = TypeVar("_T")


class BlockingPager:
    """Moves processes' memory out of one GPU and back. Any thread may call it; ``close`` it."""

    def __init__(self, gpu_uuid: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pager", daemon=True)
        self._thread.start()
        self._movers = MoverPool()
        try:
            self._pager = self._run(self._started(gpu_uuid))
        except BaseException:
            self.close()
            raise

    def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        return self._run(self._pager.page_out(target, deadline_ns))

    def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        return self._run(self._pager.page_in(target, deadline_ns))

    def close(self) -> None:
        self._run(self._movers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _started(self, gpu_uuid: str) -> SessionPager:
        self._movers.start()
        for gpu in await gpus(self._movers):
            if gpu.uuid == gpu_uuid:
                remote = RemoteGpu(self._movers, gpu_uuid, gpu.total_bytes)
                return SessionPager(RemoteDriver(self._movers), remote)
        raise CallerError("no-such-gpu", f"There is no GPU {gpu_uuid} on this machine.")

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
