"""One operation on one session: all of its processes, or none. Read it from top to bottom.

Each operation looks, plans (``plan``), performs the plan (``Performer``), and looks again where the
next decision depends on what was done: after all are stopped, and after all are out. It finds any
state that an earlier caller has left behind, and goes on from there. Whatever goes wrong, each
process ends up as the operation found it, as far as that is possible (``Performer.undo``).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.pager import plan
from kiwi_core.pager.api import Moved, Refused
from kiwi_core.pager.driver_steps import SETTLE_POLL_S, Parts
from kiwi_core.pager.ending import Stop, as_stop
from kiwi_core.pager.look import IN_TRANSIT
from kiwi_core.pager.undo import Performer
from kiwi_core.states import Reason, Residency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome, Target
    from kiwi_core.pager.look import SessionLook, SessionProcess
    from kiwi_core.pager.plan import PlanStep

_STOP_ROUNDS: Final = 8
"""Most rounds of stopping processes that started while others were being stopped. A stopped parent
starts few."""

_ROUNDS: Final = 3
"""Rounds of a move by the driver. A mover that is killed may leave one unfinished call per process.
The driver may perform that call after the next mover has read the state: then another round reads
it again."""


class SessionOperation:
    """Performs ``suspend``, ``resume``, ``page_out``, ``page_in`` … once, by ``run``.

    ``room_wait_ns`` is the longest wait for room in the GPU.
    """

    def __init__(
        self, parts: Parts, target: Target, deadline_ns: int, room_wait_ns: int | None = None
    ) -> None:
        self._parts = parts
        self._target = target
        self._deadline_ns = deadline_ns
        self._began_ns = clock.now_ns()
        self._performer = Performer(parts, target, deadline_ns, room_wait_ns)
        self._checked: set[ProcessRef] = set()

    async def run(self, what: Callable[[SessionOperation], Awaitable[Moved]]) -> Outcome:
        """Perform ``what``. If it cannot be done, undo what was done of it."""
        try:
            return await what(self)
        except (Stop, GpuError) as error:
            ending = as_stop(error, self._target.root.pid)
            await self._performer.undo(ending)
            if not ending.counts_as_out:
                return ending.outcome
            await self._read_again()
            return self._out_now()
        except BaseException:
            await self._performer.undo(Stop(Refused(Reason.DRIVER)))
            raise

    # --- the operations -------------------------------------------------------------------------

    async def suspend(self) -> Moved:
        await self._stop_all(await self._look())
        return self._moved(0)

    async def resume(self) -> Moved:
        look = await self._look()
        if plan.driver_in(look) or plan.libraries_in(look.freed()):
            detail = "Its memory is in system RAM: it has to be paged in, not only resumed."
            raise Stop(Refused(Reason.DRIVER, detail))
        await self._performer.unlock(look)
        await self._performer.perform(plan.open_gates(self._freed(look)))
        return self._moved(0)

    async def page_out(self) -> Moved:
        """Page out. If the session is out already, also move what its libraries have left in the
        GPU: the scheduler asks a second time only if room is short."""
        self._parts.links.about_to_go_out(self._target.session)
        look = await self._look()
        if plan.libraries_out(look):
            self._check_movable(plan.driver_part(look))  # they make room first: the rest is later
        else:
            await self._check(plan.driver_part(look), look)
        look = await self._stop_all(look)
        owned = plan.libraries_out(look)
        moved = any(not plan.was_out(step.process) for step in owned)
        compared = plan.comparable(owned)
        if owned:
            await self._libraries_out(owned, look)
            # A program may have been replaced (exec), or a new one may have started.
            stopped = look
            look = await self._stop_all(await self._look())
            for library, gained_bytes in plan.gains(compared, stopped, look):
                library.compare_gain(gained_bytes, library.report.paged_out_bytes)
        moved_by_driver, look = await self._driver_out(look)
        self._performer.still_wanted()
        self._performer.commit()  # it is out: what follows is not part of it
        if moved:
            await self._rest_out(look, self._parts.config.unowned_left_bytes)
        if moved or moved_by_driver:
            return self._out_now()
        rest = await self._rest_out(look)
        if not isinstance(rest, Moved):
            raise Stop(rest)
        return self._out_now() if rest.bytes_moved else self._moved(0)

    async def page_in(self) -> Moved:
        """Bring back what libraries have out, then what the driver has. What both have comes back
        from the library last: its first driver call would not return before."""
        look = await self._look()
        moved_bytes = 0
        reservation = self._performer.reservation(look)
        with self._parts.room.reserved(reservation):
            moved_bytes += await self._performer.bring_in(plan.libraries_in(look), reservation)
            for round_ in range(_ROUNDS):
                moved_bytes += await self._performer.restore(plan.driver_in(look), reservation)
                try:
                    await self._performer.unlock(look)
                    break
                except Stop:
                    # A call that a killed caller left behind may have taken effect only now.
                    look = await self._look()
                    if round_ + 1 == _ROUNDS or not plan.driver_in(look):
                        self._performer.leave_in()
                        raise
                    reservation.need_bytes = self._performer.reservation(look).need_bytes
            look = self._freed(look)
            moved_bytes += await self._performer.bring_in(plan.libraries_in(look), reservation)
            await self._performer.perform(plan.open_gates(self._freed(look)))
        # Not earlier: after a crash or a failure before this line, the sizes are still needed.
        self._parts.footprints.drop([one.ref for one in look])
        return self._moved(moved_bytes)

    async def residue_in(self) -> Moved:
        """Have the driver bring back what it has taken of the rest that libraries had left in the
        GPU. What libraries have out stays out, and gates stay shut."""
        look = await self._look()
        residues = plan.residues(look)
        reservation = self._performer.reservation(residues)
        with self._parts.room.reserved(reservation):
            moved_bytes = await self._performer.restore(plan.driver_in(residues), reservation)
        await self._performer.unlock(residues)
        self._performer.commit()
        self._parts.footprints.drop([one.ref for one in residues])
        await self._performer.end_yields(plan.end_yields(await self._look()))
        return self._moved(moved_bytes)

    async def residues_out(self) -> Moved:
        """Let the driver take what libraries have left in the GPU, for another session's sake: not
        if it is being paged in."""
        look = await self._look()
        return await self._take_rest(look) if plan.may_be_cleared(look) else self._moved(0)

    async def _rest_out(self, look: SessionLook, least_bytes: int = -1) -> Outcome:
        """Do that as an operation of its own: if it fails, the rest stays in the GPU, and the
        session counts as out all the same."""
        if not plan.rest_out(look, least_bytes):
            return self._moved(0)
        rest = SessionOperation(self._parts, self._target, self._deadline_ns)
        outcome = await rest.run(lambda operation: operation._take_rest(look, least_bytes))
        await self._read_again()
        return outcome

    async def _take_rest(self, look: SessionLook, least_bytes: int = -1) -> Moved:
        """Let the driver take what libraries have left in the GPU, more than ``least_bytes``, of
        those that yield to it."""
        self._performer.found(look)
        yielded = await self._performer.yielded(plan.rest_out(look, least_bytes))
        look = await self._check(yielded, look)
        return self._moved(await self._performer.take(plan.take(yielded), look))

    async def refusal_for_ram(self) -> Moved:
        """Refuse if RAM surely has no room for the session, which is not disturbed."""
        look = await self._parts.survey.look(self._target)
        owned = any(one.library and one.library.owns and not one.library.yields for one in look)
        refused = None if owned else self._lacks_ram(plan.driver_part(look), look)
        if refused is not None:
            raise Stop(refused)
        return self._moved(0)

    # --- looking --------------------------------------------------------------------------------

    async def _look(self) -> SessionLook:
        """Look at the session. Wait until the deadline for a call under way on one of its
        processes, perhaps of an earlier caller that died. Raise ``Stop`` if it has ended or is
        lost, or if one of its processes does not run."""
        while True:
            look = await self._parts.survey.look(self._target)
            self._performer.found(look)
            plan.check(look)
            moving = [one.ref.pid for one in look if one.error is None and one.state in IN_TRANSIT]
            if not moving:
                break
            if clock.now_ns() >= self._deadline_ns:
                detail = f"Another operation on process {moving[0]} is still under way."
                raise Stop(Refused(Reason.DRIVER, detail))
            await asyncio.sleep(SETTLE_POLL_S)
        plan.check_lost(look)
        self._performer.still_wanted()
        return look

    def _freed(self, look: SessionLook) -> SessionLook:
        """Return ``look`` as it is after all were unlocked."""
        return look.freed().with_libraries(self._parts.survey.linked(self._target))

    # --- out ------------------------------------------------------------------------------------

    async def _stop_all(self, look: SessionLook) -> SessionLook:
        """Stop processes until a look finds none running, because processes come and go."""
        until_ns = clock.now_ns() + self._parts.config.lock_timeout_ns
        until_ns = min(self._deadline_ns, until_ns)
        for _ in range(_STOP_ROUNDS):
            steps = plan.stop(look)
            if not steps:
                return look
            await self._performer.perform(steps, until_ns)
            look = await self._look()
        detail = "It keeps starting new processes that use the GPU."
        raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))

    async def _libraries_out(self, steps: Sequence[PlanStep], look: SessionLook) -> None:
        try:
            await self._performer.perform(steps)
        except Stop as stop:
            refused = stop.outcome
            if isinstance(refused, Refused) and refused.reason is Reason.NO_HOST_MEMORY:
                pids = [one.ref.pid for one in look if one.library is not None]
                with suppress(GpuError):
                    lacking = host.own_shortage(pids, plan.more_ram_bytes(look))
                    stop.outcome = plan.with_shortage(refused, lacking)
            raise

    async def _driver_out(self, look: SessionLook) -> tuple[bool, SessionLook]:
        """Let the driver move out its part. Return whether there was one, and the last look."""
        took = False
        for _ in range(_ROUNDS):
            steps = plan.driver_out(look)
            if not steps:
                break
            look = await self._check([step.process for step in steps], look)
            await self._performer.take(steps, look)
            took, look = True, await self._stop_all(await self._look())
        return took, look

    async def _check(self, taken: Sequence[SessionProcess], look: SessionLook) -> SessionLook:
        """Refuse, if it can be known beforehand, what the driver would refuse, or worse. What runs
        changes until it is stopped, so this is done again then; only NVML is not asked again about
        other GPUs. Return ``look`` with the free bytes, for which the driver is asked if need be.
        """
        if not taken:
            return look
        self._check_movable(taken)
        gpu = self._parts.gpu
        if look.gpu.free_bytes is None:
            free_bytes = await gpu.free_bytes()
            look = replace(look, gpu=replace(look.gpu, free_bytes=free_bytes))
        refs = {one.ref for one in taken}
        elsewhere = {} if refs <= self._checked else await gpu.users_elsewhere()
        self._checked |= refs
        for refused in (
            plan.refusal_of_full(look.gpu, gpu.total_bytes(), self._parts.config),
            plan.refusal_elsewhere(taken, elsewhere),
            self._lacks_ram(taken, look),
        ):
            if refused is not None:
                raise Stop(refused)
        return look

    def _check_movable(self, taken: Sequence[SessionProcess]) -> None:
        for one in taken:
            if (why := self._parts.unmovable.why(one.ref)) is not None:
                raise Stop(Refused(why.reason, str(why)))

    def _lacks_ram(self, taken: Sequence[SessionProcess], look: SessionLook) -> Refused | None:
        parts, pids = self._parts, [one.ref.pid for one in taken]
        learnt = parts.footprints.learnt
        need_bytes = plan.ram_bytes(taken, look.gpu, parts.gpu.total_bytes(), learnt)
        available_bytes = parts.host_available_bytes(pids)
        if available_bytes >= need_bytes:
            return None
        own, lacking = host.own_shortage(pids, need_bytes), host.shortage(pids, need_bytes)
        return plan.refusal_for_ram(need_bytes, available_bytes, own, lacking)

    # --- the end --------------------------------------------------------------------------------

    async def _read_again(self) -> None:
        """Read what stays in the GPU. If that fails, the move is done anyway."""
        with suppress(GpuError):
            await self._parts.survey.look(self._target)

    def _out_now(self) -> Moved:
        """Return all that is out now, and what stays in the GPU by the last reading."""
        survey, target = self._parts.survey, self._target
        reports = [one.report for one in survey.linked(target).values()]
        out = [report for report in reports if report.residency is Residency.PAGED_OUT]
        refs, rows = survey.refs(target), self._parts.meter.last.bytes_by_pid
        out_bytes = sum(report.paged_out_bytes for report in out)
        out_bytes += sum(self._parts.footprints.get(ref) or 0 for ref in refs)
        stays_bytes = sum(rows.get(ref.pid, 0) for ref in refs)
        return self._moved(out_bytes, stays_bytes)

    def _moved(self, moved_bytes: int, stays_bytes: int = 0) -> Moved:
        return Moved(moved_bytes, clock.now_ns() - self._began_ns, stays_bytes)
