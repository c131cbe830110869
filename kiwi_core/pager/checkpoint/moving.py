"""Move locked processes' memory out of the GPU and back, one at a time, and judge each error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.results import OPERATING_SYSTEM, OUT_OF_MEMORY
from kiwi_core.movers.errors import MOVER_DIED, Hung
from kiwi_core.pager.api import Refused
from kiwi_core.pager.checkpoint.locking import lost
from kiwi_core.pager.checkpoint.ports import Stop, as_stop, may_control, refusal
from kiwi_core.pager.checkpoint.room import Reservation
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Lost
    from kiwi_core.pager.checkpoint.locking import Locking, Parts
    from kiwi_core.pager.checkpoint.survey import SessionProcess

_SCRUBBED_POLL_S: Final = 0.02
_SCRUBBED_AFTER_S: Final = 2.0
"""Freed memory shows up as free within this time."""

_IS_BACK: Final = frozenset(
    {CheckpointState.LOCKED, CheckpointState.RUNNING, CheckpointState.NOT_A_CUDA_PROCESS}
)


class Moving:
    """The moves of one operation. Methods may raise ``Stop``, and ``GpuError`` if NVML fails."""

    def __init__(self, parts: Parts, locking: Locking, deadline_ns: int) -> None:
        self._parts = parts
        self._locking = locking
        self._driver = parts.driver
        self._deadline_ns = deadline_ns

    async def out(self, ref: ProcessRef, size_bytes: int | None) -> None:
        """Move out ``ref``, which is locked. ``size_bytes`` is ``None`` if NVML does not know the
        process (no context yet, or another PID namespace): then its footprint is the memory that
        becomes free.
        """
        nameless = size_bytes is None
        before_bytes = await self._parts.gpu.free_bytes() if nameless else None
        after_bytes = None
        self._locking.wall()
        try:
            measured = await self._checkpoint(ref)
            if not nameless:
                before_bytes, after_bytes = measured
        except GpuError as error:
            await self._check_out(ref, error)
        if nameless:
            after_bytes = await self._free_scrubbed_bytes()
        if before_bytes is not None and after_bytes is not None:
            gained_bytes = after_bytes - before_bytes
            self._parts.footprints.gave_back(ref, gained_bytes, named=not nameless)

    async def _checkpoint(self, ref: ProcessRef) -> tuple[int | None, int | None]:
        """Checkpoint, and again if the mover died. Drivers before 13.4 report "locked" while they
        still work on the first call. A second call is answered after the first one."""
        try:
            return await self._parts.gpu.measured_checkpoint(ref.pid, self._left_s())
        except Hung as error:
            state = await self._locking.state_after(ref, error)
            if error.code != MOVER_DIED or state is not CheckpointState.LOCKED:
                raise
        await self._parts.gpu.measured_checkpoint(ref.pid, self._left_s())
        return None, None  # the first call may have freed memory already

    async def _check_out(self, ref: ProcessRef, error: GpuError) -> None:
        state = await self._locking.state_after(ref, error)
        if state in (CheckpointState.CHECKPOINTED, CheckpointState.NOT_A_CUDA_PROCESS):
            return  # done after all, or the process is gone and needs no move
        if state is CheckpointState.FAILED:
            raise Stop(lost(ref.pid, error)) from error
        if (why := self._parts.unmovable.refused(ref, error)) is not None:
            raise Stop(Refused(Reason.UNSUPPORTED, str(why))) from error
        raise Stop(refusal(error, ref.pid)) from error

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

    async def bring_back(self, out: list[ProcessRef], members: list[SessionProcess]) -> int:
        """Bring back all of ``out``, or none (unless one is lost or the root is gone), and leave
        them locked. Return the bytes. ``members`` are the session's."""
        if not out:
            return 0
        sizes = [self._parts.footprints.get(ref) for ref in out]
        known = [size for size in sizes if size is not None]
        need_bytes = sum(known) if len(known) == len(sizes) else None
        reservation = Reservation(need_bytes, self._locking.own_pids(members))
        back: list[ProcessRef] = []
        with self._parts.room.reserved(reservation):
            try:
                for number, (ref, size_bytes) in enumerate(zip(out, sizes, strict=True)):
                    reservation.spare_bytes = self._parts.footprints.spare_bytes(out[number:])
                    await self._restore(ref, reservation)
                    reservation.spend(size_bytes)
                    back.append(ref)
            except (Stop, GpuError) as error:
                stop = as_stop(error, out[0].pid)
                await self._out_again(back, stop)
                raise stop from error
        if need_bytes is None:
            usage = (await self._parts.gpu.look()).bytes_by_pid
            return sum(usage.get(ref.pid, 0) for ref in out)
        return need_bytes

    async def bring_back_alone(self, ref: ProcessRef, members: list[SessionProcess]) -> None:
        """Bring back one process of a session that is over, even if the root has ended."""
        size_bytes = self._parts.footprints.get(ref)
        spare_bytes = self._parts.footprints.spare_bytes([ref])
        own_pids = self._locking.own_pids(members)
        reservation = Reservation(size_bytes, own_pids, spare_bytes=spare_bytes)
        with self._parts.room.reserved(reservation):
            seen = await self._wait_for_room(reservation, lambda: None)
            await self._call_restore(ref, self._claims_bytes(ref, reservation, seen))

    async def _wait_for_room(
        self, reservation: Reservation, still_wanted: Callable[[], None]
    ) -> GpuLook:
        until_ns = clock.now_ns() + self._parts.config.room_wait_ns
        until_ns = min(self._deadline_ns, until_ns)
        return await self._parts.room.wait(reservation, until_ns, still_wanted)

    async def _restore(self, ref: ProcessRef, reservation: Reservation) -> None:
        if (earlier := self._parts.failures.lost_before(ref)) is not None:
            raise Stop(earlier)
        seen = await self._wait_for_room(reservation, self._locking.still_wanted)
        free_bytes = seen.free_bytes
        claims_bytes = self._claims_bytes(ref, reservation, seen)
        error = await self._try_restore(ref, free_bytes, claims_bytes)
        if error is not None and error.code == MOVER_DIED:
            # As for a checkpoint: the driver may still work on it, and says "checkpointed".
            error = await self._try_restore(ref, free_bytes)
        if error is not None and error.driver_code == OUT_OF_MEMORY:
            # Another program took the room. Drivers known today keep what they have taken, and
            # never restore after this (#44); they say so when asked once more.
            error = await self._try_restore(ref, free_bytes)
        if error is None:
            self._parts.failures.forget(ref)
            return
        refused = refusal(error, ref.pid)
        may_be_final = error.driver_code != OUT_OF_MEMORY
        may_be_final = may_be_final and refused.reason is not Reason.NOT_PERMITTED
        if may_be_final and self._parts.failures.is_final(ref, error):
            raise Stop(await self._lost(ref, error, free_bytes)) from error
        raise Stop(refused) from error

    def _claims_bytes(self, ref: ProcessRef, reservation: Reservation, seen: GpuLook) -> list[int]:
        """Return how much room to claim for ``ref`` (see ``GpuRoom.claims_bytes``). A process of
        unknown size comes back only into a GPU that nobody else uses."""
        size_bytes = self._parts.footprints.get(ref)
        if size_bytes is None:
            return []
        return self._parts.room.claims_bytes(
            size_bytes, seen, self._locking.outside, reservation.spare_bytes
        )

    async def _call_restore(self, ref: ProcessRef, claims_bytes: Sequence[int] = ()) -> None:
        self._locking.wall()
        if claims_bytes:
            await self._parts.gpu.claimed_restore(ref.pid, claims_bytes, self._left_s())
        else:
            await self._driver.restore(ref.pid, self._left_s())

    async def _try_restore(
        self, ref: ProcessRef, free_bytes: int, claims_bytes: Sequence[int] = ()
    ) -> GpuError | None:
        """Restore ``ref``; return the error, or ``None`` if it is back or has ended. Raises
        ``Stop`` if it can never come back. ``free_bytes`` were free before the first try. Only the
        first try claims room: after it, the driver may have taken that room for ``ref``."""
        try:
            await self._call_restore(ref, claims_bytes)
        except GpuError as error:
            state = await self._locking.state_after(ref, error)
            if state in _IS_BACK:
                return None
            stuck = error.driver_code == OPERATING_SYSTEM and may_control(ref.pid)
            if state is CheckpointState.FAILED or stuck:
                raise Stop(await self._lost(ref, error, free_bytes)) from error
            return error
        return None

    async def _lost(self, ref: ProcessRef, error: GpuError, free_bytes: int) -> Lost:
        """Record the loss, with the bytes that the failed restore has taken, for which NVML names
        no owner.
        """
        held_bytes = max(0, free_bytes - await self._parts.gpu.free_bytes())
        size_bytes = self._parts.footprints.get(ref)
        if size_bytes is not None:
            held_bytes = min(held_bytes, size_bytes)
        return self._parts.failures.lost(ref, lost(ref.pid, error, held_bytes))

    async def _out_again(self, back: list[ProcessRef], stop: Stop) -> None:
        """Move ``back`` out again, as found, unless the session is over."""
        if stop.over:
            return
        self._locking.wall()
        for ref in back:
            try:
                await self._parts.gpu.measured_checkpoint(ref.pid, self._undo_s())
            except GpuError as error:
                stop.add(f"Process {ref.pid} is back in the GPU but suspended: {error}")

    def _left_s(self) -> float:
        return max(0.0, (self._deadline_ns - clock.now_ns()) / NS_PER_S)

    def _undo_s(self) -> float:
        """Return the time for undoing, which is separate: the operation's time may be over."""
        return self._parts.config.operation_deadline_min_ns / NS_PER_S
