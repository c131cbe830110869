"""The daemon's pager: linked processes move their own memory, the driver's checkpoint the rest.

A *linked* process has Kiwi's library loaded: a gate, which on request also owns the memory and
moves it. A process whose library is only a gate is moved by the driver, while that gate is shut.
What a page-out through the library leaves in the GPU (contexts, and what the library cannot own)
stays there, unless it is large or room is still short: then a second page-out, or the page-in of
another session, makes the driver move that, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kiwi_core import clock
from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host, processes
from kiwi_core.pager.api import Refused, worst
from kiwi_core.pager.checkpoint.continuing import continued
from kiwi_core.pager.checkpoint.ports import Stop, refusal
from kiwi_core.pager.checkpoint.stopped import BY_SIGNAL
from kiwi_core.pager.linked import all_out, all_yield
from kiwi_core.pager.linked_operation import LinkedOperation, is_owned
from kiwi_core.states import MovedBy, Reason, Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Moved, Observation, Outcome, ProcessMemory, Target
    from kiwi_core.pager.checkpoint.pager import CheckpointPager
    from kiwi_core.pager.checkpoint.room import PageOutReading
    from kiwi_core.pager.linked import LibraryReport, LinkedProcess, LinkedProcesses
    from kiwi_core.units import SessionId

SCRUBBED_NS = NS_PER_S // 2
"""Time within which freed memory shows up as free. A page-in that still lacks room after it lacks
room for another reason."""


class SessionPager:
    """The pager of the daemon. ``checkpoint`` is the driver's part. Calls for one session wait for
    each other. While a session is being suspended or paged out, its processes that Ctrl-Z has
    stopped run, so that its turn can end."""

    def __init__(
        self, checkpoint: CheckpointPager, links: LinkedProcesses, config: Config = DEFAULTS
    ) -> None:
        self._checkpoint = checkpoint
        self._links = links
        self._config = config
        self._busy: dict[SessionId, asyncio.Lock] = {}
        self._moved_by: dict[SessionId, MovedBy] = {}

    def moved_by(self, session: SessionId) -> MovedBy:
        """Return what moves the session's memory, as of the last observation."""
        return self._moved_by.get(session, MovedBy.CHECKPOINT)

    @property
    def nameless(self) -> bool:
        """Whether NVML does not show what some processes have in the GPU."""
        return self._checkpoint.nameless.some

    def why_stopped(self, target: Target) -> str:
        return self._checkpoint.why_stopped(target)

    def busy(self, session: SessionId) -> bool:
        """Return whether an operation on it is under way: then nobody may ask the driver about
        it.
        """
        lock = self._busy.get(session)
        return lock is not None and lock.locked()

    # --- the pager ------------------------------------------------------------------------------

    async def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        by_driver, with_libraries = self._checkpoint.suspend, LinkedOperation.suspend
        return await self._with_stopped_continued(
            target, lambda: self._run(target, deadline_ns, by_driver, with_libraries)
        )

    async def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._run(target, deadline_ns, self._checkpoint.resume, LinkedOperation.resume)

    async def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        by_driver, with_libraries = self._checkpoint.page_out, LinkedOperation.page_out
        with self._checkpoint.operation(target):
            if (refused := await self._refusal_for_ram(target)) is not None:
                return refused
            outcome = await self._with_stopped_continued(
                target, lambda: self._run(target, deadline_ns, by_driver, with_libraries)
            )
        if isinstance(outcome, Refused) and outcome.reason is Reason.NO_HOST_MEMORY:
            return _with_shortage(outcome, self._living(target))
        return outcome

    async def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Page in. If room is lacking, first page out what other paged-out sessions have left in
        the GPU."""
        patience_ns = self._config.room_wait_ns
        if any(other.session != target.session for other in self._links.paged_out()):
            outcome = await self._page_in(target, deadline_ns, min(patience_ns, SCRUBBED_NS))
            if not isinstance(outcome, Refused) or outcome.reason is not Reason.NO_ROOM:
                return outcome
            await self._clear_residues(target, deadline_ns)
        return await self._page_in(target, deadline_ns, patience_ns)

    async def observe(self, target: Target) -> Observation:
        """Observe. Raises ``GpuError`` only if the driver or NVML as a whole cannot be asked."""
        links = self._living(target)
        async with self._lock_of(target.session):
            seen = await self._checkpoint.observe(target)
            counted = {link.ref: link.report.held_bytes for link in links if link.connected}
            seen = await self._checkpoint.sized(seen, counted)
        links = self._living(target)
        linked = {link.ref: link.report for link in links}
        if not seen.alive:
            self._moved_by.pop(target.session, None)
            if not self.busy(target.session):
                self._busy.pop(target.session, None)
        if not linked:
            self._moved_by.pop(target.session, None)
            return seen
        parts = tuple(_with_report(memory, linked.get(memory.ref)) for memory in seen.processes)
        self._moved_by[target.session] = self._who_moves(parts, links)
        by_libraries = self._moved_by[target.session] is MovedBy.INPROCESS
        in_gpu = {memory.ref: memory.resident_bytes for memory in seen.processes}
        out_bytes = sum(_still_out_bytes(link, in_gpu.get(link.ref, 0)) for link in links)
        return replace(
            seen,
            residency=worst({seen.residency, *(report.residency for report in linked.values())}),
            paged_out_bytes=seen.paged_out_bytes + out_bytes,
            processes=parts,
            allocated=any(one.held_bytes or one.paged_out_bytes for one in linked.values()),
            owned=by_libraries and is_owned(links, seen.processes),
        )

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        sizes = dict(self._checkpoint.export_footprints(target))
        links = self._links.everybody() if target is None else self._links.of(target.session)
        for ref, size_bytes in _out_bytes(links).items():
            sizes[ref] = sizes.get(ref, 0) + size_bytes
        return sizes

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        """Import the driver's part. Libraries report what they have paged out themselves."""
        ours = _out_bytes(self._links.everybody())
        rest = {ref: size - ours.get(ref, 0) for ref, size in footprints.items()}
        self._checkpoint.import_footprints({ref: size for ref, size in rest.items() if size > 0})

    def export_page_out_readings(self) -> dict[ProcessRef, PageOutReading]:
        return self._checkpoint.export_page_out_readings()

    def import_page_out_readings(self, readings: Mapping[ProcessRef, PageOutReading]) -> None:
        self._checkpoint.import_page_out_readings(readings)

    # --- inside ---------------------------------------------------------------------------------

    def _living(self, target: Target) -> list[LinkedProcess]:
        """Return the session's live linked processes that can be reached. An unreachable process
        with its memory in the GPU is left to the driver once it cannot reconnect any more. Before
        that its library may be at work, and the driver must not take it."""
        return [
            link
            for link in self._links.of(target.session)
            if (link.connected or link.expected or link.report.residency is not Residency.RESIDENT)
            and link.ref not in target.left_out
            and processes.alive(link.ref)
        ]

    async def _refusal_for_ram(self, target: Target) -> Refused | None:
        """Return a refusal if RAM cannot take the session's memory, found out before its gates are
        shut or a stopped process goes on: a program with too little RAM is tried again and again.
        A library that owns memory has RAM in reserve and finds out by itself."""
        if any(link.owns for link in self._links.of(target.session)):
            return None
        if self.why_stopped(target) not in ("", BY_SIGNAL):
            return None  # this is the reason, whatever RAM there is
        if self.busy(target.session):
            return None  # the driver is at work on it
        try:
            return await self._checkpoint.refusal_for_ram(target)
        except GpuError:
            return None  # the page-out meets the same error, and reports it

    async def _page_in(self, target: Target, deadline_ns: int, room_wait_ns: int) -> Outcome:
        by_driver = partial(self._checkpoint.page_in, room_wait_ns=room_wait_ns)
        with_libraries = partial(LinkedOperation.page_in, room_wait_ns=room_wait_ns)
        return await self._run(target, deadline_ns, by_driver, with_libraries)

    async def _with_stopped_continued(
        self, target: Target, run: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        """Run an operation that must not meet a process that Ctrl-Z has stopped. Run it a second
        time if Ctrl-Z came between the look for stopped processes and the operation's own."""
        for last in (False, True):
            if self.why_stopped(target):
                self._checkpoint.wall(target)  # what goes on now can be asked
            async with continued(self._checkpoint.using(target)):
                outcome = await run()
            stopped = isinstance(outcome, Refused) and outcome.reason is Reason.STOPPED
            if last or not stopped or self.why_stopped(target) not in ("", BY_SIGNAL):
                break
        return outcome

    async def _run(
        self,
        target: Target,
        deadline_ns: int,
        by_driver: Callable[[Target, int], Awaitable[Outcome]],
        with_libraries: Callable[[LinkedOperation], Awaitable[Moved]],
    ) -> Outcome:
        """Run ``by_driver`` if no process has Kiwi's library, else ``with_libraries``. That is the
        usual case, also with the default pager: every kernel has the library's gate."""
        lock = self._lock_of(target.session)
        left_s = max(0.0, (deadline_ns - clock.now_ns()) / NS_PER_S)
        try:
            # With the lock free, a deadline that is over does not refuse: the operation itself
            # does.
            waits = lock.locked()
            await asyncio.wait_for(lock.acquire(), left_s if waits else None)
        except asyncio.TimeoutError:
            detail = "Another operation on this session is still under way."
            return Refused(Reason.LOCK_TIMEOUT, detail)
        try:
            if waits:
                self._checkpoint.wall(target)
            if (refused := self._checkpoint.refusal_of_stopped(target)) is not None:
                return refused
            if not self._living(target):
                return await by_driver(target, deadline_ns)
            operation = LinkedOperation(
                self._checkpoint, self._links, self._config, target, deadline_ns, self._living
            )
            with self._checkpoint.operation(target):
                return await operation.do(with_libraries)
        except Stop as stop:
            return stop.outcome
        except GpuError as error:
            return refusal(error, target.root.pid)
        finally:
            lock.release()

    def _lock_of(self, session: SessionId) -> asyncio.Lock:
        return self._busy.setdefault(session, asyncio.Lock())

    async def _clear_residues(self, target: Target, deadline_ns: int) -> None:
        """Page out what paged-out sessions have left in the GPU, as a last resort. A session that
        the driver cannot move stays, and so does a session whose library has a part in the GPU,
        since only the library can move that."""
        for other in self._links.paged_out():
            if other.session == target.session or self.busy(other.session):
                continue
            async with self._lock_of(other.session):
                links = self._living(other)
                if not all(map(all_out, links)):
                    continue  # the session is being paged in
                refs = await all_yield(self._links, links, deadline_ns)
                if len(refs) == len(links):
                    await self._checkpoint.page_out(other, deadline_ns)

    def _who_moves(self, parts: tuple[ProcessMemory, ...], links: list[LinkedProcess]) -> MovedBy:
        owned = {link.ref for link in links if link.owns}
        if not owned:
            return MovedBy.CHECKPOINT
        most_bytes = self._config.unowned_left_bytes
        mixed = any(memory.ref not in owned for memory in parts)
        mixed = mixed or any(link.report.unowned_bytes > most_bytes for link in links)
        return MovedBy.BOTH if mixed else MovedBy.INPROCESS


def _still_out_bytes(link: LinkedProcess, in_gpu_bytes: int) -> int:
    """Return the bytes that ``link`` has out. A disconnected process may be paging in since an
    earlier daemon: what it has in the GPU must not count twice."""
    if link.report.residency is not Residency.PAGED_OUT:
        return 0
    reported_bytes = link.report.paged_out_bytes
    return reported_bytes if link.connected else max(0, reported_bytes - in_gpu_bytes)


def _with_shortage(refused: Refused, links: list[LinkedProcess]) -> Refused:
    """Return ``refused`` with the true reason, if the libraries lack RAM because the own control
    group of their processes is too small: a library sees only that it gets no more."""
    reserve_bytes = sum(max(0, x.report.arena_bytes - x.report.paged_out_bytes) for x in links)
    more_bytes = sum(link.report.resident_bytes for link in links) - reserve_bytes
    try:
        lacking = host.own_shortage([link.ref.pid for link in links], max(0, more_bytes))
    except GpuError:
        return refused
    if lacking is None:
        return refused
    detail = f"{refused.detail.removesuffix('.')}. In its control group, {lacking}."
    return Refused(Reason.NO_JOB_MEMORY, detail)


def _out_bytes(links: tuple[LinkedProcess, ...]) -> dict[ProcessRef, int]:
    return {
        link.ref: link.report.paged_out_bytes
        for link in links
        if link.report.residency is Residency.PAGED_OUT and processes.alive(link.ref)
    }


def _with_report(memory: ProcessMemory, report: LibraryReport | None) -> ProcessMemory:
    """Return ``memory`` with the worse of the driver's and the library's residency."""
    if report is None:
        return memory
    return replace(memory, residency=worst((memory.residency, report.residency)))
