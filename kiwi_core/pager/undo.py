"""Undoes the steps of an operation that has failed.

``undo`` performs the inverse steps, last first: from the states that the driver and the libraries
report then, because an error may have come after the work.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager import plan
from kiwi_core.pager.api import Moved
from kiwi_core.pager.ending import Stop
from kiwi_core.pager.perform import Performing
from kiwi_core.pager.plan import INVERSE, PlanStep, Verb
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.look import SessionLook, SessionProcess


class Performer(Performing):
    """Performs the steps of one operation, and undoes them if one fails."""

    async def undo(self, ending: Stop) -> None:
        """Undo what was done, last first, as far as possible; ``ending`` says what could not be
        undone. If the session has ended, let it go instead."""
        done, self._done = self._done, []
        for verb, group in groupby(reversed(done), key=lambda step: INVERSE.get(step.verb)):
            if ending.over or ending.counts_as_out:
                break
            self._give_time()
            refs = {step.process.ref for step in group}
            if verb is not None:
                await self._undo_steps(verb, refs, ending)
        if ending.over:
            await self._let_go(ending)
        elif not (ending.keep_locked or self._given_up):
            self._parts.footprints.drop(self._taken)

    def _give_time(self) -> None:
        """Undoing has its own time: the operation's may be over."""
        until_ns = clock.now_ns() + self._parts.config.operation_deadline_min_ns
        self._deadline_ns = self._driver.deadline_ns = until_ns
        self._room_wait_ns = self._parts.config.room_wait_ns

    async def _undo_steps(self, verb: Verb, refs: set[ProcessRef], ending: Stop) -> None:
        """Perform ``verb`` on ``refs``, as far as they are now in the state for it."""
        try:
            look = await self._parts.survey.states(self._target, self._known)
        except GpuError as error:
            ending.add(f"The driver cannot be asked: {error}")
            ending.keep_locked |= verb == "restore"
            return
        those = [one for one in look if one.ref in refs]
        if verb == "restore":
            await self._undo_checkpoint(look, those, ending)
        elif verb == "page-in":
            await self._undo_page_out(look, those, ending)
        elif verb == "unlock":
            if not ending.keep_locked:
                errors = await self._driver.unlock([one.ref for one in those])
                for ref, why in errors.items():
                    ending.add(f"Process {ref.pid} stays suspended: {why}")
        elif verb == "open":  # one that the driver could not release keeps its gate shut
            steps = [step for step in plan.open_gates(look) if step.process in those]
            await self._try(steps, "stays suspended", ending)
        elif verb == "lock":
            await self._lock_again(those, ending)
        elif verb == "checkpoint":
            for one in those:
                if one.state is CheckpointState.LOCKED:
                    try:
                        await self._driver.checkpoint(one.ref)
                    except Stop as stop:
                        words = "is back in the GPU but suspended"
                        ending.add(f"Process {one.ref.pid} {words}: {stop}")
        else:
            words = "runs" if verb == "shut" else "is back in the GPU"
            await self._try([PlanStep(verb, one) for one in those if one.library], words, ending)

    async def _try(self, steps: Sequence[PlanStep], else_: str, ending: Stop) -> None:
        for step, outcome in zip(steps, await self._ordered(steps), strict=False):
            if not isinstance(outcome, Moved):
                ending.add(f"Process {step.process.ref.pid} {else_}: {outcome.detail}")

    async def _undo_checkpoint(
        self, look: SessionLook, those: list[SessionProcess], ending: Stop
    ) -> None:
        """Bring back what the driver has moved out. It stays locked; that is undone next. What the
        driver gives no state of is out, as far as anybody knows."""
        out = CheckpointState.CHECKPOINTED
        those = [replace(one, state=out, error=None) if one.error else one for one in those]
        look = replace(look, processes=tuple(those))
        steps, reservation = plan.driver_in(look), self.reservation(look)
        try:
            with self._parts.room.reserved(reservation):
                await self.restore(steps, reservation)
        except (Stop, GpuError) as error:
            ending.keep_locked = True
            ending.add(f"A part of it stays in system RAM until it can be paged in: {error}")

    async def _undo_page_out(
        self, look: SessionLook, those: list[SessionProcess], ending: Stop
    ) -> None:
        """Have libraries bring back what they have moved out into the room that it has just left.
        That room shows up as free late, and others may want it."""
        found = self._found or {}
        those = [one for one in those if found.get(one.ref) is not Residency.PAGED_OUT]
        steps = [step for step in plan.libraries_in(look) if step.process in those]
        reservation = self.reservation(replace(look, processes=tuple(those)))
        with self._parts.room.reserved(reservation):
            with suppress(Stop, GpuError):  # they notice it themselves, and give a better text
                await self._room(reservation)
            await self._try(steps, "stays in system RAM until it can be paged in", ending)
        look = look.with_libraries(self._parts.survey.linked(self._target))
        refs = {step.process.ref for step in steps}
        stays_out = any(step.process.ref in refs for step in plan.libraries_in(look))
        ending.counts_as_out = stays_out and plan.is_owned(look)
        if not ending.counts_as_out:
            back = [step for step in plan.stop(look) if step.process.ref in refs]
            shut = [step for step in back if found.get(step.process.ref) is Residency.SUSPENDED]
            await self._try(shut, "runs", ending)

    async def _lock_again(self, those: list[SessionProcess], ending: Stop) -> None:
        """Lock what was released, but nothing whose gate is open: the driver must not take it."""
        until_ns = clock.now_ns() + self._parts.config.lock_timeout_ns
        shut = [one for one in those if one.reported not in (None, Residency.RESIDENT)]
        free = [one for one in those if one.library is None]
        steps = [PlanStep("yield", one) for one in shut]
        for step, outcome in zip(steps, await self._ordered(steps), strict=False):
            if isinstance(outcome, Moved):
                free.append(step.process)
            else:
                words = "is back in the GPU but suspended"
                ending.add(f"Process {step.process.ref.pid} {words}: {outcome.detail}")
        for one in free:
            try:
                await self._driver.lock(one.ref, until_ns)
            except Stop as error:
                ending.add(f"Process {one.ref.pid} runs: {error}")

    async def _let_go(self, ending: Stop) -> None:
        """Bring back what can be brought back and let everything run on, because nobody else does
        that: the session is over (its root ended, or a part is lost). Ignore errors, since the
        outcome is known. One exception: if there is no room for a process that an ended root left
        behind, the outcome says so."""
        self._give_time()
        self._let_go_of_it = True
        with suppress(GpuError):
            look = await self._parts.survey.states(self._target, self._known)
            for step in plan.driver_in(look):
                reservation = self.reservation(replace(look, processes=(step.process,)))
                with suppress(GpuError), self._parts.room.reserved(reservation):
                    try:
                        await self.restore([step], reservation)
                        self._parts.footprints.drop([step.process.ref])
                    except Stop as failed:
                        ending.lacks_room(failed.outcome)
            await self._driver.unlock([one.ref for one in look if one.held_by_driver])
            look = await self._parts.survey.states(self._target, self._known)
            for outcome in await self._ordered(plan.libraries_in(look)):
                ending.lacks_room(outcome)
            look = look.with_libraries(self._parts.survey.linked(self._target))
            await self._ordered(plan.open_gates(look))
