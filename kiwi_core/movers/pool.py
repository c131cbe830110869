"""The pool of a daemon's movers: started ahead, given one call at a time, killed when they hang.

``driver_calls`` has the time limit of each call. Everything here runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import structlog

from kiwi_core.movers.errors import busy, died, hung
from kiwi_core.movers.messages import Call
from kiwi_core.movers.mover import Mover, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger(__name__)

LEAST: Final = 2
"""Fewest movers at any time: one makes a long call, another answers questions."""

MOST: Final = 8
"""Most movers at any time, including killed ones that have not ended yet: each takes some 100 MB
of RAM, and more than a few calls at a time only compete for one bus."""

LONG_S: Final = 0.05
"""A question takes a millisecond. Once a call takes this long, another mover serves the others."""

STARTS_WITHIN_S: Final = 60.0
"""``cuInit`` takes up to 2.7 s; the machine may be busy, and the driver waking up."""

AGAIN_AFTER_S: Final = (0.2, 1.0, 5.0, 20.0)
"""Pauses before the next start after a mover that ended or hung before it was ready."""

IDLE_S: Final = 60.0
"""A mover beyond ``LEAST`` that has been idle for this long is ended."""

REAP_S: Final = (0.01, 0.1, 1.0)
"""Pauses between checks whether a killed mover has ended. One in the kernel may never end."""


class MoverPool:
    """The pool: ``start`` it first, ``close`` it last. ``environment`` adds to the daemon's own."""

    def __init__(
        self, least: int = LEAST, most: int = MOST, environment: Mapping[str, str] | None = None
    ) -> None:
        self._least = least
        self._most = most
        self._environment = environment
        self._movers: set[Mover] = set()
        """All movers whose process may exist."""
        self._idle: deque[Mover] = deque()
        self._long: set[Mover] = set()
        """The movers whose call has not been answered for ``LONG_S``."""
        self._starting: dict[Mover, asyncio.Task[None]] = {}
        self._waiting: deque[asyncio.Future[Mover]] = deque()
        self._failures = 0
        self._again: asyncio.TimerHandle | None = None
        self._retiring: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [mover.pid for mover in self._movers]

    async def call(self, name: str, *args: Any, deadline_s: float) -> Any:
        """Return what ``calls.CALLS[name]`` returns, as decoded by msgpack. ``deadline_s`` counts
        from now and includes the wait for a mover. Raise the call's own ``GpuError``, ``Busy`` if
        it did not begin in time, or ``Hung`` if it began and its result is unknown."""
        what = f"{name} {' '.join(map(str, args))}"
        if self._closed:  # an operation that the end of the daemon cuts short undoes what it can
            raise busy(what, 0.0)
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + deadline_s
        try:
            mover = await self._take(deadline_s)
        except asyncio.TimeoutError:
            raise busy(what, deadline_s) from None
        answered = False
        long = loop.call_later(LONG_S, self._takes_long, mover)
        try:
            asked = mover.ask(Call(name, list(args)))
            answer = await asyncio.wait_for(asked, max(0.0, ends_at_s - loop.time()))
            value = value_of(answer)
            answered = True
        except asyncio.TimeoutError:
            log.warning("a driver call hangs", what=what, seconds=deadline_s, mover=mover.pid)
            raise hung(what, deadline_s) from None
        except OSError as error:
            log.warning("a mover ended in mid-call", what=what, mover=mover.pid, why=str(error))
            raise died(what) from error
        except Exception:
            answered = True  # the call's own failure
            raise
        finally:
            long.cancel()
            self._long.discard(mover)
            self._give_back(mover) if answered else self._kill(mover)
        return value

    async def close(self) -> None:
        """Kill all movers. One that does not end is left to the system."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        for task in list(self._starting.values()):
            task.cancel()
        for mover in list(self._movers):
            self._kill(mover)
        for pause_s in REAP_S:
            if all(mover.exited for mover in self._movers):
                break
            await asyncio.sleep(pause_s)

    # --- handing out ----------------------------------------------------------------------------

    async def _take(self, deadline_s: float) -> Mover:
        """Return a mover; raise ``TimeoutError`` if none is free in time."""
        if self._idle:  # the usual case: spare the call a task and a round of the loop
            return self._idle.pop()  # the one used last, so that the others can be retired
        return await asyncio.wait_for(self._next_free(), deadline_s)

    async def _next_free(self) -> Mover:
        place: asyncio.Future[Mover] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # a mover became free just as the wait was cancelled
                self._give_back(place.result())
            raise

    def _give_back(self, mover: Mover) -> None:
        if mover not in self._movers:
            return  # it has ended meanwhile
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(mover)
                return
        self._idle.append(mover)
        if self._retiring is None and self._too_many:
            self._retiring = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    @property
    def _too_many(self) -> bool:
        return len(self._movers) > self._least + len(self._long)

    def _retire(self) -> None:
        """End the longest idle mover if there are still too many, and look again later."""
        self._retiring = None
        if self._idle and self._too_many:
            self._kill(self._idle[0])
            self._retiring = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    def _takes_long(self, mover: Mover) -> None:
        """Start another mover for new calls, since this one moves memory, or hangs."""
        self._long.add(mover)
        self.start()

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start movers until there are ``least`` for quick calls beside those in a long one."""
        if self._closed or self._again is not None:
            return
        while len(self._movers) < self._most and self._useful < self._least + len(self._long):
            mover = Mover(self._ended)
            self._movers.add(mover)
            self._starting[mover] = asyncio.ensure_future(self._begin(mover))

    @property
    def _useful(self) -> int:
        """The number of movers that were not killed: a killed one may hang in the kernel."""
        return sum(not mover.reaping for mover in self._movers)

    async def _begin(self, mover: Mover) -> None:
        try:
            first = await asyncio.wait_for(mover.start(self._environment), STARTS_WITHIN_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._not_started(mover, str(error) or "it does not say that it is ready")
            return
        finally:
            self._starting.pop(mover, None)
        if first.failure is not None:
            log.error("the driver cannot be initialised", why=first.failure.message)
        self._failures = 0
        log.debug("mover ready", mover=mover.pid)
        self._give_back(mover)

    def _not_started(self, mover: Mover, why: str) -> None:
        again_s = AGAIN_AFTER_S[min(self._failures, len(AGAIN_AFTER_S) - 1)]
        self._failures += 1
        log.error("a mover did not start", why=why, again_s=again_s)
        if self._again is None and not self._closed:
            self._again = asyncio.get_running_loop().call_later(again_s, self._try_again)
        self._kill(mover)

    def _try_again(self) -> None:
        self._again = None
        self.start()

    def _kill(self, mover: Mover) -> None:
        mover.kill()
        self._ended(mover)

    def _ended(self, mover: Mover) -> None:
        """Remove ``mover``, which answers no more, and replace it."""
        if mover in self._idle:
            self._idle.remove(mover)
        if mover in self._movers and not mover.reaping:
            mover.reaping = True
            self._reap(mover, 0)
            self.start()

    def _reap(self, mover: Mover, looks: int) -> None:
        """Free the mover's place once its process is gone; one hanging in the kernel keeps it."""
        if mover.exited:
            self._movers.discard(mover)
            self.start()
        elif not self._closed:
            pause_s = REAP_S[min(looks, len(REAP_S) - 1)]
            asyncio.get_running_loop().call_later(pause_s, self._reap, mover, looks + 1)
