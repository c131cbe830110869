"""One operation on one session that has linked processes: all of its processes, or none.

A page-out shuts the gates, locks what has no gate, moves the libraries' memory, and lets the driver
checkpoint. The driver moves a linked process only while its gate is shut: a synchronise call in
between would kill it. A page-in brings back what the libraries have, restores and unlocks, and
opens the gates last. After an error each process is as the operation found it, as far as possible.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Lost, Moved, Refused, worst
from kiwi_core.pager.checkpoint.ports import Stop, as_stop
from kiwi_core.pager.checkpoint.room import Reservation
from kiwi_core.pager.linked import all_yield
from kiwi_core.states import NOT_FREE, Reason, Residency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome, ProcessMemory, Target
    from kiwi_core.pager.checkpoint.pager import CheckpointPager
    from kiwi_core.pager.linked import LibraryStep, LinkedProcess, LinkedProcesses

_ROUNDS_MAX: Final = 8
"""Rounds of looking for processes that started while others were being suspended."""


@dataclass(eq=False, repr=False)
class LinkedOperation:
    """Performs ``suspend``, ``resume``, ``page_out`` or ``page_in`` once, with ``do``. That may
    raise ``Stop``, and ``GpuError`` if the driver is out of order. ``_look`` finds the linked
    processes."""

    _checkpoint: CheckpointPager
    _links: LinkedProcesses
    _config: Config
    _target: Target
    _deadline_ns: int
    _look: Callable[[Target], list[LinkedProcess]]
    _began_ns: int = field(default_factory=clock.now_ns)

    async def do(self, operation: Callable[[LinkedOperation], Awaitable[Moved]]) -> Moved:
        try:
            self._check_first()
            return await operation(self)
        except Stop as stop:
            await self._let_all_go_if_over(stop)
            raise

    async def suspend(self) -> Moved:
        suspended: list[LinkedProcess] = []
        try:
            await self._suspend_all(suspended)
            await self._ask(self._checkpoint.suspend, await self._driver_part())
        except (Stop, GpuError) as error:
            stop = as_stop(error, self._target.root.pid)
            await self._undo_suspend(stop, suspended)
            raise stop from error
        return self._moved(0)

    async def resume(self) -> Moved:
        links = self._look(self._target)
        if _in(links, Residency.PAGED_OUT):
            detail = "Its memory is in system RAM: it has to be paged in, not only resumed."
            raise Stop(Refused(Reason.DRIVER, detail))
        await self._ask(self._checkpoint.resume, self._target)
        await self._all_do(_in(links, Residency.SUSPENDED), "resume")
        return self._moved(0)

    async def page_out(self) -> Moved:
        """Page out. If the session is out already, also move what its libraries have left in the
        GPU: the scheduler asks a second time only if room is short."""
        found = await self._found()
        suspended: list[LinkedProcess] = []
        rest_bytes = 0
        try:
            links = await self._suspend_all(suspended)
            await self._ask(self._checkpoint.suspend, await self._driver_part())
            await self._all_do(_unsure(links), "page-out")
            todo = [link for link in links if link.owns and _something_in(link)]
            await self._all_do(todo, "page-out")
            links = await self._still_suspended(links, suspended)
            # With the default pager no library owns memory: the driver moves all processes.
            only_gated = {link.ref for link in links if not link.owns}
            rest = await self._driver_part(also=only_gated)
            rest_bytes = await self._ask(self._checkpoint.page_out, rest)
            self._still_wanted()
        except (Stop, GpuError) as error:
            stop = as_stop(error, self._target.root.pid)
            if await self._let_all_go_if_over(stop) or await self._undo_page_out(
                stop, found, suspended
            ):
                raise stop from error
            return await self._out_now()
        if todo:
            await self._take_what_is_large(links)
        if todo or rest_bytes or await self._ask(self._checkpoint.page_out, await self._yielded()):
            return await self._out_now()
        return self._moved(0)  # the session was out already, with all its memory

    async def page_in(self, room_wait_ns: int) -> Moved:
        seen = await self._checkpoint.seen(self._target)
        links = self._look(self._target)
        by_driver = await self._held_by_driver(links)
        out = _in(links, Residency.PAGED_OUT)
        first = [link for link in out if link.ref not in by_driver]
        later = [link for link in out if link.ref in by_driver]
        own_pids = [m.ref.pid for m in seen] + [link.ref.pid for link in links]
        reservation = _reservation(out, own_pids)
        back: list[LinkedProcess] = []
        resumed: list[LinkedProcess] = []
        rest_bytes = moved_bytes = 0
        with self._checkpoint.room.reserved(reservation):
            try:
                moved_bytes += await self._bring(first, reservation, room_wait_ns, back)
                rest_in = partial(self._checkpoint.page_in, room_wait_ns=room_wait_ns)
                rest_bytes = await self._ask(rest_in, await self._driver_part())
                moved_bytes += await self._bring(later, reservation, room_wait_ns, back)
                await self._all_do(_in(links, Residency.SUSPENDED), "resume", resumed)
            except (Stop, GpuError) as error:
                stop = as_stop(error, self._target.root.pid)
                if not await self._let_all_go_if_over(stop):
                    await self._undo(stop, resumed, "suspend", "runs")
                    await self._undo_page_in(stop, back, by_driver if rest_bytes else None)
                raise stop from error
        return self._moved(moved_bytes + rest_bytes)

    # --- steps ----------------------------------------------------------------------------------

    async def _ours(self) -> list[LinkedProcess]:
        """Return the linked processes that their libraries can move: those that the driver has not
        locked or paged out. In a process that the driver holds, the library would not return from
        its first driver call; the driver moves such a process until a page-in or resume unlocks it.
        """
        links = self._look(self._target)
        by_driver = await self._held_by_driver(links)
        return [link for link in links if link.ref not in by_driver]

    async def _held_by_driver(self, links: Sequence[LinkedProcess]) -> frozenset[ProcessRef]:
        refs = [link.ref for link in links]
        return await self._checkpoint.locked_or_out(self._target, refs)

    async def _found(self) -> _Found:
        links = await self._ours()
        rest = await self._checkpoint.seen(await self._driver_part())
        return _Found(
            suspended=_in(links, Residency.SUSPENDED),
            out={link.ref for link in _in(links, Residency.PAGED_OUT)},
            rest_ran=worst([memory.residency for memory in rest]) is Residency.RESIDENT,
        )

    async def _out_now(self) -> Moved:
        links = self._look(self._target)
        sizes = self._checkpoint.export_footprints(self._target)
        moved = self._moved(_out_bytes(links) + sum(sizes.values()))
        return replace(moved, stays_bytes=await self._in_gpu_bytes())

    async def _in_gpu_bytes(self) -> int:
        """Return what NVML counts; 0 if it cannot be read, because the move is done anyway."""
        with suppress(GpuError):
            return sum(one.resident_bytes for one in await self._checkpoint.seen(self._target))
        return 0

    async def _suspend_all(self, suspended: list[LinkedProcess]) -> list[LinkedProcess]:
        """Shut gates until a look finds none open. ``suspended`` gets the processes whose gates
        are shut here."""
        until_ns = min(self._deadline_ns, clock.now_ns() + self._config.lock_timeout_ns)
        for _ in range(_ROUNDS_MAX):
            links = await self._ours()
            running = _in(links, Residency.RESIDENT)
            if not running:
                return links
            await self._all_do(running, "suspend", suspended, until_ns)
        detail = "It keeps starting new processes that use the GPU."
        raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))

    async def _still_suspended(
        self, links: list[LinkedProcess], suspended: list[LinkedProcess]
    ) -> list[LinkedProcess]:
        """Suspend what is open again before the driver moves the rest: a program may have been
        replaced (exec), or a new one with an open gate may have started."""
        running = _in(self._look(self._target), Residency.RESIDENT)
        return await self._suspend_all(suspended) if running else links

    async def _bring(
        self,
        out: list[LinkedProcess],
        reservation: Reservation,
        room_wait_ns: int,
        back: list[LinkedProcess],
    ) -> int:
        if not out:
            return 0
        until_ns = min(self._deadline_ns, clock.now_ns() + room_wait_ns)
        await self._checkpoint.room.wait(reservation, until_ns, self._still_wanted)
        sizes = _out_bytes(out)
        moved_bytes = await self._all_do(out, "page-in", back)
        reservation.spend(sizes)
        return moved_bytes

    async def _take_what_is_large(self, links: list[LinkedProcess]) -> None:
        """Have the driver move what the libraries could not, if it is large. If the driver cannot
        move it either, it stays in the GPU, and the session counts as out all the same."""
        most_bytes = self._config.unowned_left_bytes
        large = [link for link in links if link.report.unowned_bytes > most_bytes]
        if refs := await all_yield(self._links, large, self._deadline_ns):
            await self._checkpoint.page_out(await self._driver_part(also=refs), self._deadline_ns)

    async def _yielded(self) -> Target:
        """Return the target without the processes whose libraries may still call the driver."""
        refs = await all_yield(self._links, await self._ours(), self._deadline_ns)
        return await self._driver_part(also=refs)

    async def _all_do(
        self,
        links: Sequence[LinkedProcess],
        step: LibraryStep,
        done: list[LinkedProcess] | None = None,
        deadline_ns: int | None = None,
    ) -> int:
        """Make all ``links`` do ``step``; return the bytes that they moved. ``done`` gets those
        that succeed. A process that has ended needs nothing any more, unless it is the root."""
        if not links:
            return 0
        until_ns = deadline_ns or self._deadline_ns
        outcomes = await self._perform(links, step, until_ns)
        moved_bytes = 0
        failed: list[Outcome] = []
        for link, outcome in zip(links, outcomes, strict=True):
            if isinstance(outcome, Moved):
                moved_bytes += outcome.bytes_moved
                if done is not None:
                    done.append(link)
            elif isinstance(outcome, Lost) or outcome.reason is not Reason.GONE:
                failed.append(outcome)
        self._still_wanted()
        for outcome in sorted(failed, key=lambda one: not isinstance(one, Lost)):
            raise Stop(outcome)  # type: ignore[arg-type]  # no Moved is among them
        return moved_bytes

    async def _perform(
        self, links: Sequence[LinkedProcess], step: LibraryStep, until_ns: int
    ) -> list[Outcome]:
        if links:
            self._checkpoint.wall(self._target)
        return await self._links.perform(links, step, until_ns)

    async def _ask(self, call: Callable[[Target, int], Awaitable[Outcome]], target: Target) -> int:
        outcome = await call(target, self._deadline_ns)
        if not isinstance(outcome, Moved):
            raise Stop(outcome)
        return outcome.bytes_moved

    async def _driver_part(self, also: Collection[ProcessRef] = ()) -> Target:
        """Return the part of the target that the driver is to move: the processes without a
        library, those that the driver has locked or paged out already, and those in ``also``."""
        linked = {link.ref for link in await self._ours() if link.ref not in also}
        return replace(self._target, left_out=self._target.left_out | linked)

    # --- the end --------------------------------------------------------------------------------

    def _check_first(self) -> None:
        self._still_wanted()
        for link in _in(self._look(self._target), Residency.LOST):
            raise Stop(Lost(f"The GPU memory of process {link.ref.pid} was lost earlier."))

    def _still_wanted(self) -> None:
        if not processes.alive(self._target.root):
            detail = f"Process {self._target.root.pid} has ended."
            raise Stop(Refused(Reason.GONE, detail))

    async def _let_all_go_if_over(self, stop: Stop) -> bool:
        """Return whether the session has ended. If so, bring back what can be brought back and
        release all of it, because nobody else does that. Best effort; ``stop`` records only lack of
        room.
        """
        if not stop.over or stop.left_running:
            return stop.over
        stop.left_running = True
        outcomes = [await self._checkpoint.page_in(await self._driver_part(), self._undo_by_ns())]
        links = await self._ours()  # includes those that the driver has just brought back
        out = _in(links, Residency.PAGED_OUT)
        outcomes += await self._perform(out, "page-in", self._undo_by_ns())
        await self._perform(_in(links, Residency.SUSPENDED), "resume", self._undo_by_ns())
        for outcome in outcomes:
            stop.lacks_room(outcome)
        return True

    async def _undo_suspend(self, stop: Stop, suspended: list[LinkedProcess]) -> None:
        if not await self._let_all_go_if_over(stop):
            await self._undo(stop, suspended, "resume", "stays suspended")

    async def _undo_page_out(
        self, stop: Stop, found: _Found, suspended: list[LinkedProcess]
    ) -> bool:
        """Undo as much as possible. Return whether the session counts as undone. If a part must
        stay out and libraries own all memory, it counts as out. If a part must stay out and the
        driver moves some of the memory, it counts as undone, and the refusal names what stays
        out."""
        links = self._look(self._target)
        out = [link for link in _in(links, Residency.PAGED_OUT) if link.ref not in found.out]
        await self._bring_back(stop, out)
        if _in(out, Residency.PAGED_OUT) and await self._is_owned():
            return False
        await self._undo(stop, [link for link in found.suspended if link in out], "suspend", "runs")
        free = await self._ours()  # a process that the driver could not release keeps its gate shut
        suspended = [link for link in _in(suspended, Residency.SUSPENDED) if link in free]
        await self._undo(stop, suspended, "resume", "stays suspended")
        if found.rest_ran:
            outcome = await self._checkpoint.resume(await self._driver_part(), self._undo_by_ns())
            stop.add(outcome.detail if not isinstance(outcome, Moved) else "")
        return True

    async def _is_owned(self) -> bool:
        seen = await self._checkpoint.seen(self._target)
        return is_owned(self._look(self._target), seen)

    async def _bring_back(self, stop: Stop, out: list[LinkedProcess]) -> None:
        """Bring ``out`` back into the room that it has just left. That room shows up as free late,
        and others may want it."""
        if not out:
            return
        pids = [link.ref.pid for link in self._look(self._target)]
        reservation = _reservation(out, pids)
        with self._checkpoint.room.reserved(reservation):
            with suppress(Stop):  # the libraries notice it themselves, and give a better text
                await self._checkpoint.room.wait(reservation, self._undo_by_ns(), lambda: None)
            await self._undo(stop, out, "page-in", "stays in system RAM until it can be paged in")

    async def _undo_page_in(
        self, stop: Stop, back: list[LinkedProcess], rest_back: Collection[ProcessRef] | None
    ) -> None:
        """Page out again what came back. ``rest_back`` are the linked processes that the driver
        brought back; ``None``: it brought back nothing. A process with an open gate stays in."""
        await self._undo(stop, back, "page-out", "is back in the GPU")
        if rest_back is not None:
            links = self._look(self._target)
            shut = [link for link in links if link.report.residency is not Residency.RESIDENT]
            again = [link for link in shut if link.ref in rest_back]
            refs = await all_yield(self._links, again, self._undo_by_ns())
            rest = await self._driver_part(also=refs)
            outcome = await self._checkpoint.page_out(rest, self._undo_by_ns())
            stop.add(outcome.detail if not isinstance(outcome, Moved) else "")

    async def _undo(
        self, stop: Stop, links: list[LinkedProcess], step: LibraryStep, else_: str
    ) -> None:
        outcomes = await self._perform(links, step, self._undo_by_ns())
        for link, outcome in zip(links, outcomes, strict=True):
            if not isinstance(outcome, Moved):
                stop.add(f"Process {link.ref.pid} {else_}: {outcome.detail}")

    def _undo_by_ns(self) -> int:
        """Return the deadline for undoing, which has its own time: the operation's may be over."""
        return clock.now_ns() + self._config.operation_deadline_min_ns

    def _moved(self, moved_bytes: int) -> Moved:
        return Moved(moved_bytes, clock.now_ns() - self._began_ns)


def is_owned(links: Sequence[LinkedProcess], processes: Sequence[ProcessMemory]) -> bool:
    """Return whether libraries own and move all memory of a session. ``processes`` are those that
    the driver knows, with the state that it reports."""
    refs = {link.ref for link in links if link.connected and link.owns}
    return len(refs) == len(links) > 0 and all(
        memory.ref in refs and memory.residency not in NOT_FREE for memory in processes
    )


@dataclass(frozen=True)
class _Found:
    """The state in which a page-out found the session."""

    suspended: list[LinkedProcess]
    out: set[ProcessRef]
    rest_ran: bool


def _reservation(out: Sequence[LinkedProcess], own_pids: Collection[int]) -> Reservation:
    """Reserve room for what comes back; a library that does not answer may still take it."""
    moving = lambda: any(link.moving for link in out)  # noqa: E731
    return Reservation(_out_bytes(out), own_pids, can_fail=True, still_moving=moving)


def _something_in(link: LinkedProcess) -> bool:
    out = link.report.residency is Residency.PAGED_OUT
    return not out or (link.connected and link.report.resident_bytes > 0)


def _unsure(links: Sequence[LinkedProcess]) -> list[LinkedProcess]:
    """Return those that were out at their last report, perhaps to an earlier daemon. They may be
    paging in: the driver must not move them meanwhile, and their bytes would count twice."""
    return [link for link in _in(links, Residency.PAGED_OUT) if not link.connected]


def _in(links: Sequence[LinkedProcess], residency: Residency) -> list[LinkedProcess]:
    return [link for link in links if link.report.residency is residency]


def _out_bytes(links: Sequence[LinkedProcess]) -> int:
    return sum(link.report.paged_out_bytes for link in _in(links, Residency.PAGED_OUT))
