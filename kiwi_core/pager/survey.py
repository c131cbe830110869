"""Looks at a session: which processes use the GPU, their state in the driver, what they have. Each
operation looks again where it must decide; no state is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.looks import GpuLook
from kiwi_core.movers.errors import Busy, Hung
from kiwi_core.pager.linked import living
from kiwi_core.pager.look import SessionLook, SessionProcess
from kiwi_core.pager.stopped import (
    BY_ANOTHER,
    has_driver,
    why_frozen,
    why_halted,
    why_stopped,
)
from kiwi_core.pager.unmovable import has_no_context
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.footprints import Footprints
    from kiwi_core.pager.linked import LinkedProcess, LinkedProcesses
    from kiwi_core.pager.usage import UsageMeter

_LOCKED_MAX_NS: Final = 60 * NS_PER_S
"""How long somebody else's lock is respected: others use a limit of 10 to 30 s for a lock."""


class Survey:
    def __init__(
        self,
        driver: RemoteDriver,
        gpu: RemoteGpu,
        meter: UsageMeter,
        footprints: Footprints,
        links: LinkedProcesses,
        other_roots: Callable[[], Collection[ProcessRef]],
    ) -> None:
        self._driver = driver
        self._gpu = gpu
        self._meter = meter
        self._footprints = footprints
        self._links = links
        self._other_roots = other_roots
        self._free: dict[ProcessRef, int] = {}
        """The bytes that each process had in the GPU when the driver last said that it runs. An
        operation that locks it takes it off this list first. So a process on the list that is
        locked or out has been taken by somebody else."""
        self._locked_since_ns: dict[ProcessRef, int] = {}
        """When a process on that list was first found locked."""

    async def look(self, target: Target) -> SessionLook:
        """Return all that a decision needs, by one question. Another one follows only if NVML names
        a process of the session that was not known."""
        refs = self.refs(target)
        stopped = _stopped(target, refs)
        gpu = await self._look([ref.pid for ref in refs if ref not in stopped])
        self._meter.saw(gpu.bytes_by_pid)
        found = self._judged_all(target, refs, stopped, gpu.states, gpu.bytes_by_pid)
        if late := [ref for ref in self.refs(target) if ref not in refs]:
            found += await self._ask(target, late, gpu.bytes_by_pid)
        return SessionLook(gpu, (*refs, *late), tuple(found))

    async def states(self, target: Target, known: Collection[ProcessRef] = ()) -> SessionLook:
        """Return the same, but ask only the driver: NVML's figures are those of the last reading.
        So something can be undone while NVML fails. ``known`` belong to the session, too, also if
        they do not descend from its root any more."""
        refs = list(dict.fromkeys((*self.refs(target), *known)))
        rows = self._meter.last.bytes_by_pid
        gpu = GpuLook(None, rows)
        return SessionLook(gpu, tuple(refs), tuple(await self._ask(target, refs, rows)))

    def linked(self, target: Target) -> dict[ProcessRef, LinkedProcess]:
        return {one.ref: one for one in living(self._links, target.session)}

    def refs(self, target: Target) -> list[ProcessRef]:
        """Return all processes of the session, with or without CUDA, by the last reading. If the
        root is gone, return what it left behind, as far as that is in the terminal session that it
        led."""
        others, usage = self._other_roots(), self._meter.last
        refs = dict.fromkeys(processes.tree(target.root, others))
        for ref in (*usage.by_leader.get(target.root.pid, ()), *self._footprints.all()):
            if ref not in others and processes.in_session_of(target.root, ref.pid):
                refs.setdefault(ref)
        refs.update(dict.fromkeys(self.linked(target)))
        return list(refs)

    def stopped(self, target: Target) -> list[ProcessRef]:
        """Return the processes that do not run and may use the driver: it would not answer before
        they go on."""
        return [ref for ref in self.refs(target) if why_stopped(ref) and has_driver(ref)]

    def outside(self, target: Target, pids: Iterable[int]) -> list[int]:
        """Return those of ``pids`` that belong to no session."""
        roots = {*self._other_roots(), target.root}
        return [pid for pid in pids if not belongs(pid, roots)]

    def will_hold(self, ref: ProcessRef) -> None:
        """Note that an operation of this daemon is about to lock ``ref``."""
        self._free.pop(ref, None)
        self._locked_since_ns.pop(ref, None)

    # --- asking ---------------------------------------------------------------------------------

    async def _look(self, pids: list[int]) -> GpuLook:
        try:
            return await self._gpu.look(pids)
        except Hung:
            if not pids:
                raise
        # One by one: only the process that hangs has no state.
        gpu = await self._gpu.look()
        gpu.states.update({pid: await self._state(pid) for pid in pids})
        return gpu

    async def _ask(
        self, target: Target, refs: list[ProcessRef], rows: Mapping[int, int]
    ) -> list[SessionProcess]:
        stopped = _stopped(target, refs)
        states = {ref.pid: await self._state(ref.pid) for ref in refs if ref not in stopped}
        return self._judged_all(target, refs, stopped, states, rows)

    async def _state(self, pid: int) -> CheckpointState | GpuError:
        try:
            return await self._driver.checkpoint_state(pid)
        except GpuError as error:
            return error

    # --- what the answers mean ------------------------------------------------------------------

    def _judged_all(
        self,
        target: Target,
        refs: list[ProcessRef],
        stopped: Mapping[ProcessRef, str],
        states: Mapping[int, CheckpointState | GpuError],
        rows: Mapping[int, int],
    ) -> list[SessionProcess]:
        """Return what matters of ``refs``: what the driver knows, and what has Kiwi's library."""
        linked = self.linked(target)
        found = []
        for ref in refs:
            if ref in stopped:
                state, error = self._remembered(ref), None
            else:
                state, error = _judged(ref, states[ref.pid])
            row_bytes, why = rows.get(ref.pid), stopped.get(ref, "")
            asked = ref not in stopped and error is None
            taken = asked and self._taken(ref, state, row_bytes or 0)
            if state is CheckpointState.NOT_A_CUDA_PROCESS and error is None:
                # It has ended or exec'ed another program: what was out went with the old one.
                self._footprints.drop([ref])
                if ref not in linked:
                    continue
            kept_bytes = 0
            if taken:
                # Running, as far as Kiwi is concerned.
                state, why, kept_bytes = CheckpointState.RUNNING, BY_ANOTHER, self._free[ref]
            runs = state is CheckpointState.RUNNING and not (error or why)
            empty = runs and row_bytes is None and has_no_context(ref)
            found.append(
                SessionProcess(
                    ref, state, row_bytes, self._footprints.get(ref), linked.get(ref),
                    error, why, kept_bytes, empty,
                )
            )  # fmt: skip
        return found

    def _remembered(self, ref: ProcessRef) -> CheckpointState:
        """Return the state of a stopped process, which cannot change by itself."""
        if self._footprints.get(ref) is not None:
            return CheckpointState.CHECKPOINTED
        return CheckpointState.RUNNING if has_driver(ref) else CheckpointState.NOT_A_CUDA_PROCESS

    def _taken(self, ref: ProcessRef, state: CheckpointState, has_bytes: int) -> bool:
        """Return whether somebody else has locked or checkpointed ``ref``. Somebody else's lock is
        a step of a checkpoint. One that lasts is taken for a late effect of a call that a killed
        mover of an earlier daemon made, and such a process is released."""
        if state in (CheckpointState.RUNNING, CheckpointState.NOT_A_CUDA_PROCESS):
            if ref not in self._free:
                self._free = {one: n for one, n in self._free.items() if processes.alive(one)}
            self._free[ref] = has_bytes
            self._locked_since_ns.pop(ref, None)
            return False
        if ref not in self._free or state is CheckpointState.FAILED:
            return False
        if state is not CheckpointState.LOCKED:
            self._locked_since_ns.pop(ref, None)
            return True
        now_ns = clock.now_ns()
        return now_ns - self._locked_since_ns.setdefault(ref, now_ns) < _LOCKED_MAX_NS


def _judged(
    ref: ProcessRef, said: CheckpointState | GpuError
) -> tuple[CheckpointState, GpuError | None]:
    """Return what the driver's answer about ``ref`` means."""
    nothing = CheckpointState.NOT_A_CUDA_PROCESS
    if not isinstance(said, GpuError):
        return said if processes.alive(ref) else nothing, None
    if said.driver_code is None and not isinstance(said, (Busy, Hung)):
        raise said  # no driver at all: the error is not about this process
    return nothing, said if processes.alive(ref) else None  # of an ended one it may report an error


def _stopped(target: Target, refs: list[ProcessRef]) -> dict[ProcessRef, str]:
    """Return why each of ``refs`` that is stopped does not run. Such a process is not asked about:
    the answer would not come."""
    # One look at the control group for all: nearly always they are in the same one.
    frozen = why_frozen(target.root)
    return {ref: why for ref in refs if (why := why_halted(ref) or frozen)}


def belongs(pid: int, roots: Collection[ProcessRef]) -> bool:
    """Return whether ``pid`` is one of ``roots``, descends from one, or is in a terminal session
    that one leads."""
    ref = processes.ref_of(pid)
    if ref is None:
        return True  # it has ended
    if ref in roots or any(parent in roots for parent in processes.ancestors(ref)):
        return True
    stat = processes.stat_of(pid)
    leaders = [root for root in roots if stat is not None and root.pid == stat.session]
    return any(processes.in_session_of(root, pid) for root in leaders)
