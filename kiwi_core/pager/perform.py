"""Performs the steps of a plan on one session. Each step that is done is noted, for ``undo``."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.movers.errors import Hung
from kiwi_core.pager import plan
from kiwi_core.pager.api import Lost, Moved, Refused
from kiwi_core.pager.driver_steps import AT_ONCE, DriverSteps, Parts, few_at_once
from kiwi_core.pager.ending import Stop, refusal
from kiwi_core.pager.footprints import PageOutReading
from kiwi_core.pager.room import Reservation
from kiwi_core.states import Reason, Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome, Target
    from kiwi_core.pager.linked import LibraryStep, LinkedProcess
    from kiwi_core.pager.look import SessionLook, SessionProcess
    from kiwi_core.pager.plan import PlanStep

_T = TypeVar("_T")


class Performing:
    """Performs the steps of one operation. Methods may raise ``Stop``, and ``GpuError`` if NVML or
    the driver as a whole fails."""

    def __init__(
        self, parts: Parts, target: Target, deadline_ns: int, room_wait_ns: int | None
    ) -> None:
        self._parts = parts
        self._target = target
        self._deadline_ns = deadline_ns
        self._room_wait_ns = parts.config.room_wait_ns if room_wait_ns is None else room_wait_ns
        self._driver = DriverSteps(parts, target, deadline_ns)
        self._done: list[PlanStep] = []
        self._taken: set[ProcessRef] = set()
        """What the driver was to take out."""
        self._given_up = False
        """A call was given up: what the driver was to take may still go out."""
        self._found: dict[ProcessRef, Residency | None] | None = None
        self._known: set[ProcessRef] = set()
        """All that a look has shown. What has lost its parents meanwhile is not found again."""
        self._let_go_of_it = False

    def found(self, look: SessionLook) -> None:
        """Note what libraries reported before the operation: the state to which ``undo`` leads."""
        if self._found is None:
            self._found = {one.ref: one.reported for one in look}
        self._known.update(one.ref for one in look)

    def still_wanted(self) -> None:
        """Raise ``Stop`` if the root has ended, unless the session is just being let go."""
        if not self._let_go_of_it:
            self._driver.still_wanted()

    def commit(self) -> None:
        """What was done is done: nothing of it is undone later."""
        self._done.clear()
        self._taken.clear()

    def leave_in(self) -> None:
        """What the driver has brought back stays in, though a process cannot be released: nothing
        is gained by moving it all out again before the next try."""
        self._done = [step for step in self._done if step.verb != "restore"]

    # --- performing -----------------------------------------------------------------------------

    async def perform(self, steps: Sequence[PlanStep], until_ns: int | None = None) -> None:
        """Perform ``steps`` in their order; those with the same verb all at once. ``until_ns`` is
        the time limit for what only stops a process."""
        if until_ns is None:
            until_ns = clock.now_ns() + self._parts.config.lock_timeout_ns
        until_ns = min(self._deadline_ns, until_ns)
        for verb, group in groupby(steps, key=lambda step: step.verb):
            those = list(group)
            if verb == "lock":
                await self._all(those, lambda step: self._driver.lock(step.process.ref, until_ns))
            elif verb == "checkpoint":
                await self._checkpoint(those)
            else:
                await self._order(those, until_ns if verb == "shut" else None)

    async def _order(self, steps: Sequence[PlanStep], until_ns: int | None = None) -> int:
        """Make libraries do ``steps``; return the bytes that they moved. A process that has ended
        needs nothing any more, unless it is the root."""
        outcomes = await self._ordered(steps, until_ns)
        self.still_wanted()
        for outcome in sorted(outcomes, key=lambda one: not isinstance(one, Lost)):
            gone = isinstance(outcome, Refused) and outcome.reason is Reason.GONE
            if not isinstance(outcome, Moved) and not gone:
                raise Stop(outcome)
        return sum(outcome.bytes_moved for outcome in outcomes if isinstance(outcome, Moved))

    async def _ordered(
        self, steps: Sequence[PlanStep], until_ns: int | None = None
    ) -> Sequence[Outcome]:
        """Order ``steps``, which have the same verb, of libraries, and return the outcomes."""
        if not steps:
            return ()
        libraries, order = [step.library for step in steps], cast("LibraryStep", steps[0].verb)
        until_ns = until_ns or self._deadline_ns
        try:
            outcomes = await self._parts.links.perform(libraries, order, until_ns)
        except BaseException:
            self._done += steps  # cancelled: some may be done
            raise
        for step, outcome in zip(steps, outcomes, strict=True):
            # A library that fails to move out may have moved out a part.
            if isinstance(outcome, Moved) or step.verb == "page-out":
                self._done.append(step)
        return outcomes

    async def yielded(self, steps: Sequence[PlanStep]) -> list[SessionProcess]:
        """Return the processes whose libraries leave the driver alone now. A library without this
        order might bring its memory back by itself after it loses its daemon, and its call into the
        driver would then kill the program."""
        outcomes = zip(steps, await self._ordered(steps), strict=False)
        return [step.process for step, outcome in outcomes if isinstance(outcome, Moved)]

    async def end_yields(self, steps: Sequence[PlanStep]) -> None:
        """Perform ``plan.end_yields``. A library that does not answer learns it with its next
        order."""
        await self._ordered(steps)
        self._done = [step for step in self._done if step not in steps]

    async def _all(
        self, steps: Sequence[PlanStep], call: Callable[[PlanStep], Coroutine[Any, Any, _T]]
    ) -> list[_T]:
        """Perform ``steps`` by ``call``, all at once. If some fail, note those that are done."""
        try:
            results = await few_at_once([partial(call, step) for step in steps])
        except BaseException:
            # Cancelled: some are done, and the driver may still do the others.
            self._done += steps
            self._given_up = True
            raise
        failed = []
        for step, result in zip(steps, results, strict=True):
            if isinstance(result, BaseException):
                failed.append(result)
                self._given_up |= isinstance(result.__cause__, Hung)
            else:
                self._done.append(step)
        for error in sorted(failed, key=lambda one: not (isinstance(one, Stop) and one.over)):
            raise error
        return results  # type: ignore[return-value]  # no exception is among them

    async def _checkpoint(self, steps: Sequence[PlanStep]) -> None:
        """Move out what is locked: at once what NVML names, the others one after the other, because
        what becomes free is their size."""
        footprints = self._parts.footprints
        named = [step for step in steps if step.process.row_bytes is not None]
        free = await self._all(named, lambda step: self._driver.checkpoint(step.process.ref))
        measured = [
            (step.process, *known) for step, known in zip(named, free, strict=True) if known
        ]
        if measured:
            before_bytes = min(before for _, before, _ in measured)
            after_bytes = max(after for _, _, after in measured)
            sizes = {one.ref: one.row_bytes for one, _, _ in measured}
            footprints.gave_back(sizes, before_bytes, after_bytes)
        for step in steps:
            if step not in named:
                before_bytes = await self._parts.gpu.free_bytes()
                await self._all([step], lambda one: self._driver.checkpoint(one.process.ref))
                await self._driver.measure_nameless(step.process.ref, before_bytes)
        self.still_wanted()

    # --- out ------------------------------------------------------------------------------------

    async def take(self, steps: Sequence[PlanStep], look: SessionLook) -> int:
        """Let the driver take processes. What they have now is what they will need again. It is
        stored before anything moves, so that a daemon that takes over knows it."""
        parts = self._parts
        taken = [step.process for step in steps if step.verb == "checkpoint"]
        if not taken:
            return 0
        sizes = {one.ref: one.row_bytes for one in taken if one.row_bytes is not None}
        await parts.make_ram_room(self._target, sum(sizes.values()))
        self._taken |= {one.ref for one in taken}
        parts.footprints.put(sizes)
        if look.gpu.free_bytes is not None:
            # What libraries have moved out is free only until it is back.
            out_bytes = sum(one.report.paged_out_bytes for one in _libraries_out(look))
            reading = PageOutReading(max(0, look.gpu.free_bytes - out_bytes))
            parts.footprints.put_readings(dict.fromkeys((one.ref for one in taken), reading))
        parts.store_footprints()
        await self.perform(steps)
        return sum(parts.footprints.get(one.ref) or 0 for one in taken)

    # --- in -------------------------------------------------------------------------------------

    def reservation(self, look: SessionLook) -> Reservation:
        """Return the room that the session needs. A library that does not answer may still take
        it."""
        restored = [step.process for step in plan.driver_in(look)]
        sizes = [one.out_bytes for one in restored]
        libraries = _libraries_out(look)
        safe_bytes = sum(library.report.paged_out_bytes for library in libraries)
        return Reservation(
            None if None in sizes else safe_bytes + sum(filter(None, sizes)),
            {ref.pid for ref in look.refs},
            spare_bytes=self._parts.footprints.spare_bytes([one.ref for one in restored]),
            safe_bytes=safe_bytes,
            restores=len(restored),
            still_moving=lambda: any(library.moving for library in libraries),
        )

    async def _room(self, reservation: Reservation) -> GpuLook:
        until_ns = min(self._deadline_ns, clock.now_ns() + self._room_wait_ns)
        return await self._parts.room.wait(reservation, until_ns, self.still_wanted)

    async def bring_in(self, steps: Sequence[PlanStep], reservation: Reservation) -> int:
        """Have libraries bring back what they have out; return the bytes."""
        if not steps:
            return 0
        out_bytes = sum(step.library.report.paged_out_bytes for step in steps)
        await self._room(reservation)
        moved_bytes = await self._order(steps)
        reservation.spend(out_bytes, safe=True)
        return moved_bytes

    async def restore(self, steps: Sequence[PlanStep], reservation: Reservation) -> int:
        """Have the driver bring back processes, which stay locked; return the bytes. A few at once,
        unless somebody outside Kiwi may take their room: then it is claimed for one after the
        other."""
        refs = [step.process.ref for step in steps]
        for ref in refs:
            if (earlier := self._parts.failures.lost_before(ref)) is not None:
                raise Stop(earlier)
        left = list(steps)
        while left:
            spare_bytes = self._parts.footprints.spare_bytes([step.process.ref for step in left])
            reservation.spare_bytes, reservation.restores = spare_bytes, len(left)
            seen = await self._room(reservation)
            claims = {step.process.ref: self._claims(step, seen, spare_bytes) for step in left}
            now = left[: 1 if any(claims.values()) else AT_ONCE]
            await self._all(now, partial(self._restore_one, seen=seen, claims=claims))
            for step in now:
                reservation.spend(self._parts.footprints.get(step.process.ref))
            left = left[len(now) :]
        reservation.restores = 0
        sizes = {ref: self._parts.footprints.get(ref) for ref in refs}
        if None in sizes.values():
            with suppress(GpuError):
                rows = (await self._parts.gpu.look()).bytes_by_pid
                return sum(rows.get(ref.pid, 0) for ref in refs)
        return sum(size or 0 for size in sizes.values())

    async def _restore_one(
        self, step: PlanStep, seen: GpuLook, claims: Mapping[ProcessRef, list[int]]
    ) -> None:
        ref = step.process.ref
        await self._driver.restore(ref, seen, claims[ref])

    def _claims(self, step: PlanStep, seen: GpuLook, spare_bytes: int | None) -> list[int]:
        """Return how much room to claim for a process (``GpuRoom.claims_bytes``). One of unknown
        size comes back only into a GPU that nobody else uses."""
        size_bytes = self._parts.footprints.get(step.process.ref)
        if size_bytes is None:
            return []
        outside = partial(self._parts.survey.outside, self._target)
        return self._parts.room.claims_bytes(size_bytes, seen, outside, spare_bytes)

    async def unlock(self, look: SessionLook) -> None:
        """Unlock all that the driver holds; nothing is out any more."""
        steps = plan.unlock(look)
        errors = await self._driver.unlock([step.process.ref for step in steps])
        self._done += [step for step in steps if step.process.ref not in errors]
        self.still_wanted()
        for ref, error in errors.items():
            raise Stop(refusal(error, ref.pid)) from error


def _libraries_out(look: SessionLook) -> list[LinkedProcess]:
    """Return the libraries that have memory out."""
    libraries = [one.library for one in look if one.library is not None]
    return [one for one in libraries if one.report.residency is Residency.PAGED_OUT]
