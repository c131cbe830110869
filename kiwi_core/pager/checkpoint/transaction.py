"""One operation on one session: all of its GPU processes, or none.

Whatever goes wrong, each process ends up in the state in which the operation found it, as far as
the driver can still do that. The outcome is what the *driver* reports: after each error the
operation asks the driver for the process's state, since it may have done the work and failed to
report it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.movers.errors import Hung
from kiwi_core.pager.api import Lost, Moved, Refused
from kiwi_core.pager.checkpoint.full import check_not_full
from kiwi_core.pager.checkpoint.locking import Locking, in_state, lost
from kiwi_core.pager.checkpoint.moving import Moving
from kiwi_core.pager.checkpoint.ports import Stop, as_stop
from kiwi_core.pager.checkpoint.room import PageOutReading
from kiwi_core.states import Reason
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.checkpoint.locking import Parts
    from kiwi_core.pager.checkpoint.survey import SessionProcess

_ROUNDS_MAX: Final = 3
"""Rounds of an operation. A mover that is killed may leave one unfinished call per process. The
driver may perform that call after the next mover has read the state: then another round reads it
again."""


class Transaction:
    """``suspend``, ``resume``, ``page_out`` or ``page_in``, once; each may raise ``Stop``."""

    def __init__(self, parts: Parts, target: Target, deadline_ns: int) -> None:
        self._parts = parts
        self._target = target
        self._began_ns = clock.now_ns()
        self._locking = Locking(parts, target, deadline_ns)
        self._move = Moving(parts, self._locking, deadline_ns)

    async def suspend(self) -> Moved:
        async with self._locking.all_locked(self._present):
            return self._moved(0)

    async def resume(self) -> Moved:
        members = await self._present()
        if in_state(members, CheckpointState.CHECKPOINTED):
            detail = "Its memory is in system RAM: it has to be paged in, not only resumed."
            raise Stop(Refused(Reason.DRIVER, detail))
        await self._locking.unlock_all(in_state(members, CheckpointState.LOCKED))
        return self._moved(0)

    async def page_out(self) -> Moved:
        await self._check_beforehand()
        async with self._locking.all_locked(self._present) as members:
            locked = in_state(members, CheckpointState.LOCKED)
            if not locked:
                return self._moved(0)
            for _ in range(_ROUNDS_MAX):
                await self._out(locked, members)
                members = await self._locking.settled()
                locked = in_state(members, CheckpointState.LOCKED)
                if not locked:
                    break
            out = in_state(members, CheckpointState.CHECKPOINTED)
            return self._moved(sum(self._parts.footprints.get(ref) or 0 for ref in out))

    async def page_in(self) -> Moved:
        moved_bytes = 0
        for round_ in range(_ROUNDS_MAX):
            members = await self._present()
            out = in_state(members, CheckpointState.CHECKPOINTED)
            moved_bytes += await self._bring_back(out, members)
            try:
                await self._locking.unlock_all([*out, *in_state(members, CheckpointState.LOCKED)])
            except Stop:
                if round_ + 1 == _ROUNDS_MAX or not await self._moved_meanwhile():
                    raise
            else:
                # Not earlier: after a crash or a failure before this line, the sizes are still
                # needed.
                self._parts.footprints.drop([member.ref for member in members])
                break
        return self._moved(moved_bytes)

    async def _bring_back(self, out: list[ProcessRef], members: list[SessionProcess]) -> int:
        try:
            return await self._move.bring_back(out, members)
        except Stop as stop:
            if stop.over:
                await self._leave_running(members, stop)
            raise

    async def _moved_meanwhile(self) -> bool:
        """Return whether a call left behind by a killed caller took effect only now."""
        return bool(in_state(await self._locking.settled(), CheckpointState.CHECKPOINTED))

    async def _present(self) -> list[SessionProcess]:
        """Return the session's processes, once all have settled. If a process is lost or the root
        has ended, release the others first: nothing else ever does."""
        members = await self._locking.settled()
        failed = in_state(members, CheckpointState.FAILED)
        gone = not self._locking.root_alive()
        if failed or gone:
            stop = Stop(lost(failed[0].pid) if failed else self._locking.gone())
            await self._leave_running(members, stop)
            raise stop
        return members

    async def _check_beforehand(self) -> None:
        """Check what can be known before the session is disturbed. The driver keeps paged-out
        memory in the target's own process, so the limits of that process count, too."""
        members = await self._locking.settled()
        gpu = (await self._locking.look()).gpu
        still_in = [m.ref for m in members if m.state is not CheckpointState.CHECKPOINTED]
        for ref in still_in:
            if (why := self._parts.unmovable.why(ref)) is not None:
                raise Stop(Refused(why.reason, str(why)))
        if still_in:
            check_not_full(gpu.free_bytes, self._parts.gpu.total_bytes(), self._parts.config)
        pids = [ref.pid for ref in still_in]
        for pid, other in (await self._parts.gpu.users_elsewhere()).items():
            if pid in pids and pid in gpu.bytes_by_pid:
                detail = f"Process {pid} uses {other} too; Kiwi moves processes of one GPU only."
                raise Stop(Refused(Reason.UNSUPPORTED, detail))
        need_bytes = self._need_bytes(still_in, gpu)
        if (refused := refusal_for_ram(self._parts, pids, need_bytes)) is not None:
            raise Stop(refused)

    def _need_bytes(self, refs: list[ProcessRef], gpu: GpuLook) -> int:
        """Return the bytes of ``refs`` in the GPU. Where NVML cannot name its users (a PID
        namespace), use what each had at its last page-out, or else the most that they can have
        together."""
        usage = gpu.bytes_by_pid
        named_bytes = sum(usage.get(ref.pid, 0) for ref in refs)
        nameless = [ref for ref in refs if ref.pid not in usage]
        if not nameless or gpu.names_users:
            return named_bytes
        learnt = [self._parts.footprints.learnt(ref) for ref in nameless]
        most_bytes = self._parts.gpu.total_bytes() - gpu.free_bytes - sum(usage.values())
        if None in learnt:
            return named_bytes + max(0, most_bytes)
        return named_bytes + sum(filter(None, learnt))

    async def _out(self, locked: list[ProcessRef], members: list[SessionProcess]) -> None:
        done: list[ProcessRef] = []
        try:
            sizes = await self._measure(locked)
            for ref in locked:
                await self._move.out(ref, sizes.get(ref))
                done.append(ref)
            self._locking.still_wanted()
        except (Stop, GpuError) as error:
            stop = as_stop(error, locked[0].pid)
            if stop.over:
                await self._leave_running(members, stop)
            else:
                await self._undo_out(done, locked, members, stop)
            raise stop from error

    async def _measure(self, locked: list[ProcessRef]) -> dict[ProcessRef, int]:
        """Measure the locked processes: this is what they will need again. Store the sizes before
        anything moves, so that a daemon that takes over knows them."""
        gpu = (await self._locking.look()).gpu
        usage = gpu.bytes_by_pid
        sizes = {ref: usage[ref.pid] for ref in locked if ref.pid in usage}
        await self._parts.make_ram_room(self._target, sum(sizes.values()))
        self._parts.footprints.put(sizes)
        reading = PageOutReading(gpu.free_bytes)
        self._parts.footprints.put_readings(dict.fromkeys(locked, reading))
        self._parts.store_footprints()
        return sizes

    async def _undo_out(
        self,
        done: list[ProcessRef],
        locked: list[ProcessRef],
        members: list[SessionProcess],
        stop: Stop,
    ) -> None:
        """Bring back the processes that are out already. They stay locked; ``all_locked`` unlocks
        those that this operation has locked."""
        try:
            await self._move.bring_back(done, members)
            # After a call was given up, a process may still go out: its footprint is needed.
            if not isinstance(stop.__cause__, Hung):
                self._parts.footprints.drop(locked)
        except (Stop, GpuError) as error:
            stop.keep_locked = True
            stop.add(f"A part of it stays in system RAM until it can be paged in: {error}")

    async def _leave_running(self, members: list[SessionProcess], stop: Stop) -> None:
        """Bring back what can be brought back and let everything run on: the session is over (its
        root ended, or a part is lost). Ignore errors, since the outcome is known. One exception: if
        there is no room for a process that an ended root left behind, the outcome says so."""
        for member in members:
            try:
                if await self._locking.state(member.ref) is CheckpointState.CHECKPOINTED:
                    await self._move.bring_back_alone(member.ref, members)
                    self._parts.footprints.drop([member.ref])
            except Stop as failed:
                if not isinstance(stop.outcome, Lost):
                    stop.lacks_room(failed.outcome)
            except GpuError:
                continue
        await self._locking.unlock_quietly([m.ref for m in members])

    def _moved(self, moved_bytes: int) -> Moved:
        return Moved(moved_bytes, clock.now_ns() - self._began_ns)


def refusal_for_ram(parts: Parts, pids: list[int], need_bytes: int) -> Refused | None:
    """Return the refusal to page out ``need_bytes`` of the processes ``pids`` if system RAM, or a
    control group, cannot take that."""
    available_bytes = parts.host_available_bytes(pids)
    if not need_bytes or available_bytes >= need_bytes:
        return None
    detail = (
        f"{format_bytes(need_bytes)} would have to go to system RAM, which has "
        f"{format_bytes(available_bytes)} left for it."
    )
    reason = Reason.NO_HOST_MEMORY
    if lacking := host.own_shortage(pids, need_bytes):
        reason = Reason.NO_JOB_MEMORY
    if lacking := lacking or host.shortage(pids, need_bytes):
        detail += f" In its control group, {lacking}."
    return Refused(reason, detail)
