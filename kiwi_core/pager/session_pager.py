"""The daemon's pager: linked processes move their own memory, the driver's checkpoint the rest.

A *linked* process has Kiwi's library loaded: a gate, which on request also owns the memory and
moves it. A process whose library is only a gate is moved by the driver, while that gate is shut.
What a page-out through the library leaves in the GPU (contexts, and what the library cannot own)
stays there, unless it is large or room is still short: then a second page-out, or the page-in of
another session, makes the driver move that, too.

It works on any state that an earlier caller, killed at any point, has left behind: the driver and
the libraries are asked, and operations start from there. Only the footprints of what the driver has
out cannot be asked for. The daemon keeps them (``export_footprints``), and a process of unknown
footprint is brought back only into a GPU that nobody else uses.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from kiwi_core import clock
from kiwi_core.config import DEFAULTS
from kiwi_core.gpu import host, processes
from kiwi_core.pager import plan
from kiwi_core.pager.api import Observation, ProcessMemory, Refused, worst
from kiwi_core.pager.continuing import continued
from kiwi_core.pager.driver_steps import Parts, few_at_once
from kiwi_core.pager.footprints import Footprints
from kiwi_core.pager.linked import LinkedProcesses, living
from kiwi_core.pager.nameless import Nameless, NamelessMemory
from kiwi_core.pager.operation import SessionOperation
from kiwi_core.pager.room import GpuRoom
from kiwi_core.pager.stopped import BY_SIGNAL, has_driver, why_stopped
from kiwi_core.pager.survey import Survey
from kiwi_core.pager.unmovable import RestoreFailures, Unmovable, has_no_context, has_uvm
from kiwi_core.pager.usage import UsageMeter
from kiwi_core.states import MovedBy, Reason, Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu
    from kiwi_core.pager.api import Moved, Outcome, Target
    from kiwi_core.pager.footprints import PageOutReading
    from kiwi_core.pager.linked import LinkedProcess
    from kiwi_core.pager.look import SessionLook
    from kiwi_core.pager.unmovable import WhyUnmovable
    from kiwi_core.units import SessionId

SCRUBBED_NS = NS_PER_S // 2
"""Time within which freed memory shows up as free. A page-in that still lacks room after it lacks
room for another reason."""


async def _enough(_target: Target, _size_bytes: int) -> None:
    pass


class SessionPager:
    """The pager of one GPU. Calls for one session wait for each other. While a session is being
    suspended or paged out, its processes that Ctrl-Z has stopped run, so that its turn can end.

    ``make_ram_room(target, size_bytes)`` frees RAM before that much goes out.
    ``store_footprints()`` is called before a page-out moves anything: a daemon that takes over must
    know the footprints.
    ``other_roots()`` returns the root processes of all sessions: a session that was started inside
    another (``kiwi run -- jupyter lab``) does not belong to that one. ``known_unmovable`` says
    beforehand why a process must not be moved.
    """

    def __init__(
        self,
        driver: RemoteDriver,
        gpu: RemoteGpu,
        config: Config = DEFAULTS,
        *,
        links: LinkedProcesses | None = None,
        make_ram_room: Callable[[Target, int], Awaitable[None]] = _enough,
        store_footprints: Callable[[], None] = lambda: None,
        other_roots: Callable[[], Collection[ProcessRef]] = frozenset,
        host_available_bytes: Callable[[Collection[int]], int] = host.available_host_bytes,
        known_unmovable: Callable[[ProcessRef], WhyUnmovable | None] = lambda _ref: None,
    ) -> None:
        self._config = config
        self._links = LinkedProcesses() if links is None else links
        self._busy: dict[SessionId, asyncio.Lock] = {}
        self._moved_by: dict[SessionId, MovedBy] = {}
        self._footprints = Footprints()
        self._meter = UsageMeter(gpu, self._footprints)
        self._nameless = NamelessMemory(gpu)
        self._survey = Survey(driver, gpu, self._meter, self._footprints, self._links, other_roots)
        self._parts = Parts(
            driver=driver,
            gpu=gpu,
            survey=self._survey,
            meter=self._meter,
            links=self._links,
            footprints=self._footprints,
            room=GpuRoom(gpu, config),
            config=config,
            host_available_bytes=host_available_bytes,
            make_ram_room=make_ram_room,
            store_footprints=store_footprints,
            unmovable=Unmovable(known_unmovable),
            failures=RestoreFailures(),
        )

    def moved_by(self, session: SessionId) -> MovedBy:
        """Return what moves the session's memory, as of the last observation."""
        return self._moved_by.get(session, MovedBy.CHECKPOINT)

    @property
    def nameless(self) -> bool:
        """Whether NVML does not show what some processes have in the GPU."""
        return self._nameless.some

    def why_stopped(self, target: Target) -> str:
        return next(map(why_stopped, self._survey.stopped(target)), "")

    def busy(self, session: SessionId) -> bool:
        """Return whether an operation on it is under way: then nobody may ask the driver about
        it.
        """
        lock = self._busy.get(session)
        return lock is not None and lock.locked()

    # --- moving ---------------------------------------------------------------------------------

    async def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._with_stopped_continued(target, deadline_ns, SessionOperation.suspend)

    async def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, deadline_ns, SessionOperation.resume)

    async def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        if self.why_stopped(target) == BY_SIGNAL and not self.busy(target.session):
            # Before it goes on: a program with too little RAM is tried again and again.
            refused = await self._run(target, deadline_ns, SessionOperation.refusal_for_ram)
            if isinstance(refused, Refused):
                return refused
        return await self._with_stopped_continued(target, deadline_ns, SessionOperation.page_out)

    async def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Page in. If room is lacking, first page out what other paged-out sessions have left in
        the GPU."""
        patience_ns = self._config.room_wait_ns
        if any(other.session != target.session for other in self._links.paged_out()):
            least_ns = min(patience_ns, SCRUBBED_NS)
            outcome = await self._run(target, deadline_ns, SessionOperation.page_in, least_ns)
            if not isinstance(outcome, Refused) or outcome.reason is not Reason.NO_ROOM:
                return outcome
            await self._clear_residues(target, deadline_ns)
        return await self._run(target, deadline_ns, SessionOperation.page_in)

    async def residue_in(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, deadline_ns, SessionOperation.residue_in, SCRUBBED_NS)

    # --- observing ------------------------------------------------------------------------------

    async def observe(self, target: Target) -> Observation:
        """Observe. Raises ``GpuError`` only if the driver or NVML as a whole cannot be asked."""
        async with self._lock_of(target.session):
            usage = await self._meter.read()
            look = await self._survey.states(target)
            # This comes last: a process that ends after its memory was read must not count as one
            # without memory.
            alive = processes.alive(target.root)
            pids = [one.ref.pid for one in look if not one.unknown]
            busy = self._meter.busy(target.session, pids, usage)
            sizes = await self._nameless_sizes(look)
        links = living(self._links, target.session)
        look = look.with_libraries({link.ref: link for link in links})
        if not alive:
            self._meter.forget(target.session)
            if not self.busy(target.session):
                self._busy.pop(target.session, None)
        self._moved_by.pop(target.session, None)
        if alive and links:
            self._moved_by[target.session] = self._who_moves(look)
        parts = tuple(
            ProcessMemory(one.ref, one.worst_residency, sizes.get(one.ref, one.resident_bytes))
            for one in look
            if not one.unknown
        )
        reports = [link.report for link in links]
        in_gpu = {one.ref: one.resident_bytes for one in parts}
        return Observation(
            alive=alive,
            residency=worst(
                {one.residency for one in parts} | {report.residency for report in reports}
            ),
            resident_bytes=sum(one.resident_bytes for one in parts),
            paged_out_bytes=sum(
                one.out_bytes or 0 for one in look if one.residency is Residency.PAGED_OUT
            )
            + sum(_still_out_bytes(link, in_gpu.get(link.ref, 0)) for link in links),
            busy=busy,
            processes=parts,
            owned=self.moved_by(target.session) is MovedBy.INPROCESS and plan.is_owned(look),
            allocated=any(report.held_bytes or report.paged_out_bytes for report in reports),
            unsized=any(ref not in {link.ref for link in links if link.connected} for ref in sizes),
            stopped=next((one.stopped for one in look if one.stopped), ""),
            taken_bytes=sum(one.out_bytes or 0 for one in plan.taken(look)),
        )

    async def _nameless_sizes(self, look: SessionLook) -> Mapping[ProcessRef, int]:
        """Return the sizes of processes of which NVML shows none."""
        here = [one for one in look if not one.unknown]
        counted = {
            one.ref: one.library.report.held_bytes
            for one in here
            if one.library is not None and one.library.connected
        }
        found = [
            Nameless(one.ref, counted.get(one.ref), bool(counted.get(one.ref)) or has_uvm(one.ref))
            for one in here
            if one.residency is not Residency.PAGED_OUT
            and one.row_bytes is None
            and not has_no_context(one.ref)
        ]
        nameless = {one.ref for one in found}
        others = {one.ref: one.row_bytes is not None for one in here if one.ref not in nameless}
        return await self._nameless.sizes(found, others, sum(look.gpu.bytes_by_pid.values()))

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        self._footprints.drop([r for r in self._footprints.all() if not processes.alive(r)])
        sizes = self._footprints.all()
        links = self._links.everybody()
        if target is not None:
            refs, links = self._survey.refs(target), self._links.of(target.session)
            sizes = {ref: size for ref, size in sizes.items() if ref in refs}
        for ref, size_bytes in _out_bytes(links).items():
            sizes[ref] = sizes.get(ref, 0) + size_bytes
        return sizes

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        """Import the driver's part. Libraries report what they have paged out themselves."""
        ours = _out_bytes(self._links.everybody())
        rest = {ref: size - ours.get(ref, 0) for ref, size in footprints.items()}
        self._footprints.put({r: n for r, n in rest.items() if n > 0 and processes.alive(r)})

    def export_page_out_readings(self) -> dict[ProcessRef, PageOutReading]:
        """Return what each paged-out process left free, to be stored with its footprint."""
        return self._footprints.readings()

    def import_page_out_readings(self, readings: Mapping[ProcessRef, PageOutReading]) -> None:
        """Import what an earlier daemon has exported."""
        self._footprints.put_readings({r: one for r, one in readings.items() if processes.alive(r)})

    # --- inside ---------------------------------------------------------------------------------

    async def _with_stopped_continued(
        self, target: Target, deadline_ns: int, what: Callable[[SessionOperation], Awaitable[Moved]]
    ) -> Outcome:
        """Run an operation that must not meet a process that Ctrl-Z has stopped. Run it a second
        time if Ctrl-Z came between the look for stopped processes and the operation's own."""
        for last in (False, True):
            refs = [ref for ref in self._survey.refs(target) if has_driver(ref)]
            async with continued(refs):
                outcome = await self._run(target, deadline_ns, what)
            stopped = isinstance(outcome, Refused) and outcome.reason is Reason.STOPPED
            if last or not stopped or self.why_stopped(target) not in ("", BY_SIGNAL):
                break
        return outcome

    async def _run(
        self,
        target: Target,
        deadline_ns: int,
        what: Callable[[SessionOperation], Awaitable[Moved]],
        room_wait_ns: int | None = None,
    ) -> Outcome:
        lock = self._lock_of(target.session)
        left_s = max(0.0, (deadline_ns - clock.now_ns()) / NS_PER_S)
        try:
            # If the lock is free, take it even after the deadline: the operation refuses by itself.
            await asyncio.wait_for(lock.acquire(), left_s if lock.locked() else None)
        except asyncio.TimeoutError:
            detail = "Another operation on this session is still under way."
            return Refused(Reason.LOCK_TIMEOUT, detail)
        try:
            return await SessionOperation(self._parts, target, deadline_ns, room_wait_ns).run(what)
        finally:
            self._meter.forget()
            lock.release()

    def _lock_of(self, session: SessionId) -> asyncio.Lock:
        return self._busy.setdefault(session, asyncio.Lock())

    async def _clear_residues(self, target: Target, deadline_ns: int) -> None:
        """Page out what paged-out sessions have left in the GPU, as a last resort, a few at once. A
        session that the driver cannot move stays, and so does a session whose library has a part
        in the GPU, since only the library can move that."""

        async def clear(other: Target) -> None:
            if not self.busy(other.session):
                await self._run(other, deadline_ns, SessionOperation.residues_out)

        others = [one for one in self._links.paged_out() if one.session != target.session]
        for result in await few_at_once([partial(clear, other) for other in others]):
            if result is not None:
                raise result

    def _who_moves(self, look: SessionLook) -> MovedBy:
        links = [one.library for one in look if one.library is not None]
        if not any(link.owns and not link.yields for link in links):
            return MovedBy.CHECKPOINT
        most_bytes = self._config.unowned_left_bytes
        mixed = any(
            not (one.library and one.library.owns) or one.library.yields
            for one in look
            if not one.unknown
        )
        mixed = mixed or any(link.report.unowned_bytes > most_bytes for link in links)
        return MovedBy.BOTH if mixed else MovedBy.INPROCESS


def _still_out_bytes(link: LinkedProcess, in_gpu_bytes: int) -> int:
    """Return the bytes that ``link`` has out. A disconnected process may be paging in since an
    earlier daemon: what it has in the GPU must not count twice."""
    if link.report.residency is not Residency.PAGED_OUT:
        return 0
    reported_bytes = link.report.paged_out_bytes
    return reported_bytes if link.connected else max(0, reported_bytes - in_gpu_bytes)


def _out_bytes(links: tuple[LinkedProcess, ...]) -> dict[ProcessRef, int]:
    return {
        link.ref: link.report.paged_out_bytes
        for link in links
        if link.report.residency is Residency.PAGED_OUT and processes.alive(link.ref)
    }
