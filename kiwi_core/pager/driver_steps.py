"""The driver's part of an operation: lock, checkpoint, restore or unlock one process.

The outcome is what the *driver* reports: after each error it is asked for the process's state,
since it may have done the work and failed to report it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.results import OPERATING_SYSTEM, OUT_OF_MEMORY
from kiwi_core.movers.errors import MOVER_DIED, Busy, Hung
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.pager.ending import Stop, lost, may_control, refusal
from kiwi_core.pager.look import FREE, IN_TRANSIT
from kiwi_core.pager.stopped import why_stopped
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from kiwi_core.config import Config
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.footprints import Footprints
    from kiwi_core.pager.linked import LinkedProcesses
    from kiwi_core.pager.room import GpuRoom
    from kiwi_core.pager.survey import Survey
    from kiwi_core.pager.unmovable import RestoreFailures, Unmovable
    from kiwi_core.pager.usage import UsageMeter

_T = TypeVar("_T")

SETTLE_POLL_S: Final = 0.01
_STOPPED_POLL_S: Final = 0.1

_ASK_AGAIN_S: Final = (0.1, 1.0, 5.0, 20.0, 60.0)
"""Times between questions about a process on which a call hangs. Each question may occupy a mover
for its whole time limit, and there may be several such processes."""

AT_ONCE: Final = 4
"""Most calls of one operation at a time: half of the movers that there may be. Somebody else must
be able to ask meanwhile, and more would only compete for one bus, and for RAM."""

_SCRUBBED_POLL_S: Final = 0.02
_SCRUBBED_AFTER_S: Final = 2.0
"""Freed memory shows up as free within this time."""

_IS_BACK: Final = FREE | {CheckpointState.LOCKED}


@dataclass(frozen=True)
class Parts:
    """The dependencies of all operations of one pager. ``make_ram_room`` frees RAM for that many
    bytes that are about to go out of a session. ``store_footprints`` stores the footprints where
    they survive this process; it is called before anything is moved out.
    """

    driver: RemoteDriver
    gpu: RemoteGpu
    survey: Survey
    meter: UsageMeter
    links: LinkedProcesses
    footprints: Footprints
    room: GpuRoom
    config: Config
    host_available_bytes: Callable[[Collection[int]], int]
    make_ram_room: Callable[[Target, int], Awaitable[None]]
    store_footprints: Callable[[], None]
    unmovable: Unmovable
    failures: RestoreFailures


async def few_at_once(calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T | BaseException]:
    """Make ``calls``, a few at a time; return their results and errors, in order."""
    places = asyncio.Semaphore(AT_ONCE)

    async def placed(call: Callable[[], Awaitable[_T]]) -> _T:
        async with places:
            return await call()

    return await asyncio.gather(*map(placed, calls), return_exceptions=True)


class DriverSteps:
    """The calls of one operation on one session. Methods may raise ``Stop``."""

    def __init__(self, parts: Parts, target: Target, deadline_ns: int) -> None:
        self._parts = parts
        self._root = target.root
        self.deadline_ns = deadline_ns

    def still_wanted(self) -> None:
        if not processes.alive(self._root):
            raise Stop(Refused(Reason.GONE, f"Process {self._root.pid} has ended."))

    # --- lock, unlock ---------------------------------------------------------------------------

    async def lock(self, ref: ProcessRef, until_ns: int) -> None:
        left_ms = (until_ns - clock.now_ns()) // NS_PER_MS
        if left_ms <= 0:
            detail = f"No time was left to wait for process {ref.pid} to come to rest."
            raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))
        self._parts.survey.will_hold(ref)
        try:
            await self._parts.driver.lock(ref.pid, left_ms)
        except GpuError as error:
            fine = (CheckpointState.LOCKED, CheckpointState.NOT_A_CUDA_PROCESS)
            if await self._state_after(ref, error) not in fine:
                raise Stop(refusal(error, ref.pid)) from error

    async def unlock(self, refs: Iterable[ProcessRef]) -> dict[ProcessRef, GpuError]:
        """Unlock ``refs``, some of which may be free. Return the errors of those that stay held."""
        failed = [ref for ref in refs if await self._unlock(ref) is not None]
        # Try once more: a second unlock does no harm.
        return {ref: error for ref in failed if (error := await self._unlock(ref)) is not None}

    async def _unlock(self, ref: ProcessRef) -> GpuError | None:
        try:
            await self._parts.driver.unlock(ref.pid)
        except GpuError as error:
            free = not processes.alive(ref) or await self._asked(ref) in FREE
            return None if free else error
        return None

    # --- out ------------------------------------------------------------------------------------

    async def checkpoint(self, ref: ProcessRef) -> tuple[int, int] | None:
        """Move out ``ref``, which is locked. Return the bytes that were free before and after;
        ``None``: not known."""
        try:
            return await self._checkpoint(ref)
        except GpuError as error:
            state = await self._state_after(ref, error)
            if state in (CheckpointState.CHECKPOINTED, CheckpointState.NOT_A_CUDA_PROCESS):
                return None  # done after all, or the process is gone and needs no move
            if state is CheckpointState.FAILED:
                raise Stop(lost(ref.pid, error)) from error
            if (why := self._parts.unmovable.refused(ref, error)) is not None:
                raise Stop(Refused(Reason.UNSUPPORTED, str(why))) from error
            raise Stop(refusal(error, ref.pid)) from error

    async def _checkpoint(self, ref: ProcessRef) -> tuple[int, int] | None:
        """Checkpoint, and again if the mover died. Drivers before 13.4 report "locked" while they
        still work on the first call. A second call is answered after the first one."""
        try:
            before, after = await self._parts.gpu.measured_checkpoint(ref.pid, self._left_s())
            return None if before is None or after is None else (before, after)
        except Hung as error:
            state = await self._state_after(ref, error)
            if error.code != MOVER_DIED or state is not CheckpointState.LOCKED:
                raise
        await self._parts.gpu.measured_checkpoint(ref.pid, self._left_s())
        return None  # the first call may have freed memory already

    async def measure_nameless(self, ref: ProcessRef, before_bytes: int) -> None:
        """Take what has become free since ``before_bytes`` were for the footprint of ``ref``, which
        NVML does not know (no context yet, or another PID namespace)."""
        after_bytes = await self._free_scrubbed_bytes()
        self._parts.footprints.gave_back({ref: None}, before_bytes, after_bytes)

    async def _free_scrubbed_bytes(self) -> int:
        """Return the free bytes once they have stopped growing."""
        until_s = clock.now_s() + _SCRUBBED_AFTER_S
        free_bytes = await self._parts.gpu.free_bytes()
        while clock.now_s() < until_s:
            await asyncio.sleep(_SCRUBBED_POLL_S)
            last_bytes, free_bytes = free_bytes, await self._parts.gpu.free_bytes()
            if free_bytes <= last_bytes:
                break
        return free_bytes

    # --- in -------------------------------------------------------------------------------------

    async def restore(
        self, ref: ProcessRef, seen: GpuLook, claims_bytes: Sequence[int] = ()
    ) -> None:
        """Bring back ``ref`` into room that was promised; it stays locked. ``seen`` is the GPU
        now; room of one of ``claims_bytes`` is claimed first (``GpuRoom.claims_bytes``)."""
        error = await self._try_restore(ref, seen, claims_bytes)
        if error is not None and error.code == MOVER_DIED:
            # As for a checkpoint: the driver may still work on it, and says "checkpointed".
            error = await self._try_restore(ref, seen)
        if error is not None and error.driver_code == OUT_OF_MEMORY:
            # Another program took the room. Drivers known today keep what they have taken, and
            # never restore after this (#44); they say so when asked once more.
            error = await self._try_restore(ref, seen)
        if error is None:
            self._parts.failures.forget(ref)
            return
        refused = refusal(error, ref.pid)
        may_be_final = error.driver_code != OUT_OF_MEMORY
        may_be_final = may_be_final and refused.reason is not Reason.NOT_PERMITTED
        if may_be_final and self._parts.failures.is_final(ref, error):
            raise Stop(await self._lost(ref, error, seen)) from error
        raise Stop(refused) from error

    async def _try_restore(
        self, ref: ProcessRef, seen: GpuLook, claims_bytes: Sequence[int] = ()
    ) -> GpuError | None:
        """Restore ``ref``; return the error, or ``None`` if it is back or has ended. Raises
        ``Stop`` if it can never come back. ``seen`` is the GPU before the first try. Only the
        first try claims room: after it, the driver may have taken that room for ``ref``."""
        try:
            if claims_bytes:
                await self._parts.gpu.claimed_restore(ref.pid, claims_bytes, self._left_s())
            else:
                await self._parts.driver.restore(ref.pid, self._left_s())
        except GpuError as error:
            state = await self._state_after(ref, error)
            if state in _IS_BACK:
                return None
            stuck = error.driver_code == OPERATING_SYSTEM and may_control(ref.pid)
            if state is CheckpointState.FAILED or stuck:
                raise Stop(await self._lost(ref, error, seen)) from error
            return error
        return None

    async def _lost(self, ref: ProcessRef, error: GpuError, seen: GpuLook) -> Lost:
        """Record the loss, with the bytes that the failed restore has taken, for which NVML names
        no owner. Others may have come back meanwhile.
        """
        held_bytes, gpu = 0, self._parts.gpu
        with suppress(GpuError):  # it is lost, whatever NVML says
            now = await gpu.look()
            if now.free_bytes is None:
                now = replace(now, free_bytes=await gpu.free_bytes())
            held_bytes = max(0, _explained_bytes(seen) - _explained_bytes(now))
        size_bytes = self._parts.footprints.get(ref)
        if size_bytes is not None:
            held_bytes = min(held_bytes, size_bytes)
        return self._parts.failures.lost(ref, lost(ref.pid, error, held_bytes))

    # --- after an error -------------------------------------------------------------------------

    async def _state_after(self, ref: ProcessRef, error: GpuError) -> CheckpointState | None:
        """Return the state that the driver reports once it has settled; ``None`` if it reports
        none. A process that has ended is ``NOT_A_CUDA_PROCESS``; the root raises ``Stop(GONE)``. A
        call that was given up may still be under way: nobody can go on before the driver reports
        the state."""
        if not isinstance(error, Hung):
            state = await self._asked(ref)
            while state in IN_TRANSIT and clock.now_ns() < self.deadline_ns:
                await asyncio.sleep(SETTLE_POLL_S)
                state = await self._asked(ref)
            return self._of_the_living(ref, state)
        for pause_s in chain(_ASK_AGAIN_S, repeat(_ASK_AGAIN_S[-1])):
            if not processes.alive(ref):
                break
            while why_stopped(ref):
                await asyncio.sleep(_STOPPED_POLL_S)
            with suppress(Hung, Busy):
                state = await self._said(ref)
                if state not in IN_TRANSIT:
                    return self._of_the_living(ref, state)
            await asyncio.sleep(pause_s)
        return self._of_the_living(ref, None)

    async def _said(self, ref: ProcessRef) -> CheckpointState | None:
        """Ask the driver for the state. Raises ``Hung``, ``Busy``; ``None``: another error."""
        try:
            return await self._parts.driver.checkpoint_state(ref.pid)
        except (Hung, Busy):
            raise
        except GpuError:
            return None

    async def _asked(self, ref: ProcessRef) -> CheckpointState | None:
        with suppress(GpuError):
            return await self._parts.driver.checkpoint_state(ref.pid)
        return None

    def _of_the_living(
        self, ref: ProcessRef, state: CheckpointState | None
    ) -> CheckpointState | None:
        if processes.alive(ref):
            return state
        self.still_wanted()
        return CheckpointState.NOT_A_CUDA_PROCESS

    def _left_s(self) -> float:
        return max(0.0, (self.deadline_ns - clock.now_ns()) / NS_PER_S)


def _explained_bytes(look: GpuLook) -> int:
    return (look.free_bytes or 0) + sum(look.bytes_by_pid.values())
