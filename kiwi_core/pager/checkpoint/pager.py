"""The pager that uses the driver's checkpoint calls, from outside, on unmodified programs.

It works on any state that an earlier caller, killed at any point, has left behind: it asks the
driver for each process's state, and operations start from there. Only the footprints of paged-out
processes cannot be asked for. The daemon keeps them (``export_footprints``), and a process of
unknown footprint is brought back only into a GPU that nobody else uses.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host, processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager.api import Observation, ProcessMemory, worst
from kiwi_core.pager.checkpoint.locking import FREE, Parts, stopped
from kiwi_core.pager.checkpoint.nameless import Nameless, NamelessMemory
from kiwi_core.pager.checkpoint.ports import Stop, refusal
from kiwi_core.pager.checkpoint.room import Footprints, GpuRoom
from kiwi_core.pager.checkpoint.stopped import BY_ANOTHER, has_driver, why_stopped
from kiwi_core.pager.checkpoint.survey import Survey, UsageMeter
from kiwi_core.pager.checkpoint.transaction import Transaction, refusal_for_ram
from kiwi_core.pager.checkpoint.unmovable import (
    RestoreFailures,
    Unmovable,
    has_no_context,
    has_uvm,
)
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Moved, Outcome, Refused, Target
    from kiwi_core.pager.checkpoint.ports import CheckpointCalls, GpuReadings
    from kiwi_core.pager.checkpoint.room import PageOutReading
    from kiwi_core.pager.checkpoint.survey import SessionLook, SessionProcess
    from kiwi_core.pager.checkpoint.unmovable import WhyUnmovable

_RESIDENCY = {
    CheckpointState.RUNNING: Residency.RESIDENT,
    CheckpointState.LOCKED: Residency.SUSPENDED,
    CheckpointState.CHECKPOINTING: Residency.SUSPENDED,
    CheckpointState.RESTORING: Residency.PAGED_OUT,
    CheckpointState.CHECKPOINTED: Residency.PAGED_OUT,
    CheckpointState.FAILED: Residency.LOST,
}


async def _enough(_target: Target, _size_bytes: int) -> None:
    pass


class CheckpointPager:
    """Pages the sessions of one GPU, with one call at a time for each session.

    ``make_ram_room(target, size_bytes)`` frees RAM before that much goes out.
    ``store_footprints()`` is called before a page-out moves anything: a daemon that takes over must
    know the footprints.
    ``other_roots()`` returns the root processes of all sessions: a session that was started inside
    another (``kiwi run -- jupyter lab``) does not belong to that one. ``known_unmovable`` says
    beforehand why a process must not be moved.
    """

    def __init__(
        self,
        driver: CheckpointCalls,
        gpu: GpuReadings,
        config: Config = DEFAULTS,
        *,
        make_ram_room: Callable[[Target, int], Awaitable[None]] = _enough,
        store_footprints: Callable[[], None] = lambda: None,
        other_roots: Callable[[], Collection[ProcessRef]] = frozenset,
        host_available_bytes: Callable[[Collection[int]], int] = host.available_host_bytes,
        known_unmovable: Callable[[ProcessRef], WhyUnmovable | None] = lambda _ref: None,
    ) -> None:
        self.room = GpuRoom(gpu, config)
        """Shared with others that bring memory into this GPU."""
        self.nameless = NamelessMemory(gpu)
        self._footprints = Footprints()
        self._meter = UsageMeter(gpu, self._footprints)
        self._survey = Survey(driver, gpu, self._meter, self._footprints, other_roots)
        self._parts = Parts(
            driver=driver,
            gpu=gpu,
            survey=self._survey,
            footprints=self._footprints,
            room=self.room,
            config=config,
            host_available_bytes=host_available_bytes,
            make_ram_room=make_ram_room,
            store_footprints=store_footprints,
            unmovable=Unmovable(known_unmovable),
            failures=RestoreFailures(),
        )

    async def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, Transaction(self._parts, target, deadline_ns).suspend)

    async def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, Transaction(self._parts, target, deadline_ns).resume)

    async def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, Transaction(self._parts, target, deadline_ns).page_out)

    async def page_in(
        self, target: Target, deadline_ns: int, room_wait_ns: int | None = None
    ) -> Outcome:
        """Page in. ``room_wait_ns`` replaces the configured wait for room by a shorter one."""
        parts = self._parts
        if room_wait_ns is not None:
            parts = replace(parts, config=replace(parts.config, room_wait_ns=room_wait_ns))
        return await self._run(target, Transaction(parts, target, deadline_ns).page_in)

    async def _run(self, target: Target, operation: Callable[[], Awaitable[Moved]]) -> Outcome:
        try:
            with self.operation(target):
                return await operation()
        except Stop as stop:
            return stop.outcome
        except GpuError as error:
            # NVML or the driver as a whole does not work; the transaction has undone its part.
            return refusal(error, target.root.pid)

    @contextmanager
    def operation(self, target: Target) -> Iterator[None]:
        """Share looks between the parts of an operation (``Survey.operation``)."""
        with self._survey.operation(target.session):
            try:
                yield
            finally:
                self._meter.forget()

    async def look(self, target: Target) -> SessionLook:
        """Return what the operation under way on the session knows. It asks only if something was
        done since the last look. Raises ``GpuError`` as ``observe`` does."""
        return await self._survey.look(target)

    def wall(self, target: Target) -> None:
        """Look again next time, because something was done, or may have happened."""
        self._survey.wall(target.session)

    async def observe(self, target: Target) -> Observation:
        """Observe. Raises ``GpuError`` only if the driver or NVML as a whole cannot be asked."""
        usage = await self._meter.read()
        members = await self._survey.members(target, usage)
        # This comes last: a process that ends after its memory was read must not count as one
        # without memory.
        alive = processes.alive(target.root)
        seen = tuple(self._memory(member, usage.bytes_by_pid) for member in members)
        busy = self._meter.busy(target.session, [m.ref.pid for m in members], usage)
        if not alive:
            self._meter.forget(target.session)
        return Observation(
            alive=alive,
            residency=worst({memory.residency for memory in seen}),
            resident_bytes=sum(memory.resident_bytes for memory in seen),
            paged_out_bytes=sum(
                self._footprints.get(memory.ref) or 0
                for memory in seen
                if memory.residency is Residency.PAGED_OUT
            ),
            busy=busy,
            processes=seen,
            stopped=next((member.stopped for member in members if member.stopped), ""),
        )

    async def sized(self, seen: Observation, counted: Mapping[ProcessRef, int]) -> Observation:
        """Return ``seen`` with the sizes of processes of which NVML shows none. ``counted`` is what
        libraries count, by process."""
        rows = self._meter.last.bytes_by_pid
        here = [one for one in seen.processes if one.residency is not Residency.PAGED_OUT]
        found = [
            Nameless(one.ref, counted.get(one.ref), bool(counted.get(one.ref)) or has_uvm(one.ref))
            for one in here
            if one.ref.pid not in rows and not has_no_context(one.ref)
        ]
        nameless = {one.ref for one in found}
        others = {one.ref: one.ref.pid in rows for one in seen.processes if one.ref not in nameless}
        sizes = await self.nameless.sizes(found, others, sum(rows.values()))
        if not sizes:
            return seen
        parts = tuple(
            replace(one, resident_bytes=sizes.get(one.ref, one.resident_bytes))
            for one in seen.processes
        )
        return replace(
            seen,
            processes=parts,
            resident_bytes=sum(one.resident_bytes for one in parts),
            unsized=any(ref not in counted for ref in sizes),
        )

    async def locked_or_out(
        self, target: Target, refs: Collection[ProcessRef]
    ) -> frozenset[ProcessRef]:
        """Return those of ``refs`` that the driver has locked, paged out or lost: their own calls
        to the driver do not return. Raises ``GpuError`` as ``observe`` does, and ``Stop`` if
        somebody else has checkpointed one of them."""
        try:
            known = (await self.look(target)).members
        except GpuError:
            # What is undone needs no figure of NVML's: the driver alone is asked.
            known = await self._survey.members(
                replace(target, left_out=frozenset()), self._meter.last
            )
        members = [one for one in known if one.ref in refs]
        for member in members:
            if member.stopped == BY_ANOTHER:
                raise Stop(stopped(member.ref, member.stopped))
        return frozenset(member.ref for member in members if self._is_locked_or_out(member))

    def _is_locked_or_out(self, member: SessionProcess) -> bool:
        if member.error is not None:
            return self._footprints.get(member.ref) is not None
        return member.state not in FREE

    def using(self, target: Target) -> list[ProcessRef]:
        """Return the processes of the session that may use the driver."""
        return [ref for ref in self._survey.refs(target) if has_driver(ref)]

    async def refusal_for_ram(self, target: Target) -> Refused | None:
        """Return a refusal if RAM cannot take what NVML says that the session has in the GPU.
        Raises ``GpuError`` as ``observe`` does."""
        usage = (await self.look(target)).gpu.bytes_by_pid
        pids = [ref.pid for ref in self._survey.refs(target) if ref.pid in usage]
        return refusal_for_ram(self._parts, pids, sum(usage[pid] for pid in pids))

    def refusal_of_stopped(self, target: Target) -> Refused | None:
        """Return a refusal if a process of the session does not run: the driver would not answer
        before it goes on."""
        return next((stopped(ref, why_stopped(ref)) for ref in self._stopped(target)), None)

    def why_stopped(self, target: Target) -> str:
        return next(map(why_stopped, self._stopped(target)), "")

    def _stopped(self, target: Target) -> list[ProcessRef]:
        halted = [ref for ref in self._survey.refs(target) if why_stopped(ref)]
        return [ref for ref in halted if has_driver(ref)]

    async def seen(self, target: Target) -> list[ProcessMemory]:
        """Return the processes that the driver knows, by the operation's look."""
        look = await self.look(target)
        return [self._memory(member, look.gpu.bytes_by_pid) for member in look.of(target)]

    def _memory(self, member: SessionProcess, bytes_by_pid: Mapping[int, int]) -> ProcessMemory:
        resident_bytes = max(bytes_by_pid.get(member.ref.pid, 0), member.kept_bytes)
        # If the driver gives no state, a process that used GPU memory and now uses none is out.
        unknown_out = resident_bytes == 0 and self._footprints.get(member.ref) is not None
        unknown = Residency.PAGED_OUT if unknown_out else Residency.RESIDENT
        residency = unknown if member.error is not None else _RESIDENCY[member.state]
        return ProcessMemory(member.ref, residency, resident_bytes)

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        self._footprints.drop([r for r in self._footprints.all() if not processes.alive(r)])
        sizes = self._footprints.all()
        if target is None:
            return sizes
        refs = self._survey.refs(target)
        return {ref: size for ref, size in sizes.items() if ref in refs}

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        self._footprints.put({r: size for r, size in footprints.items() if processes.alive(r)})

    def export_page_out_readings(self) -> dict[ProcessRef, PageOutReading]:
        """Return what each paged-out process left free, to be stored with its footprint."""
        return self._footprints.readings()

    def import_page_out_readings(self, readings: Mapping[ProcessRef, PageOutReading]) -> None:
        """Import what an earlier daemon has exported."""
        self._footprints.put_readings({r: one for r, one in readings.items() if processes.alive(r)})
