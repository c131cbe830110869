"""The processes of a session that use the GPU, their state in the driver, and how much of the GPU
they use. Each operation looks them up again; no state is remembered."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.movers.errors import Busy, Hung
from kiwi_core.pager.checkpoint.stopped import (
    BY_ANOTHER,
    has_driver,
    why_frozen,
    why_halted,
)
from kiwi_core.pager.checkpoint.unmovable import has_no_context
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.checkpoint.ports import CheckpointCalls, GpuReadings
    from kiwi_core.pager.checkpoint.room import Footprints
    from kiwi_core.units import SessionId

_FRESH_NS: Final = 20 * NS_PER_MS
"""A reading of NVML serves all looks at sessions within this time: a reading costs about a
millisecond, and there may be 1,000 sessions."""

_LOCKED_MAX_NS: Final = 60 * NS_PER_S
"""How long somebody else's lock is respected: others use a limit of 10 to 30 s for a lock."""

_WINDOW_US: Final = 1_000_000
"""How far back the first look goes: NVML's samples are up to a second late."""


@dataclass(frozen=True)
class SessionProcess:
    """A live process that the driver knows. ``error`` is set if the driver did not report the
    state. ``stopped`` says why the process does not run, or that somebody else has checkpointed it:
    no operation touches it. ``kept_bytes`` is the room that must be kept for it then."""

    ref: ProcessRef
    state: CheckpointState
    error: GpuError | None = None
    stopped: str = ""
    kept_bytes: int = 0


@dataclass(frozen=True)
class SessionLook:
    """What an operation knows of its session and of the GPU: all processes of the session
    (``refs``), also those that the operation leaves alone; ``members`` are those that the driver
    knows."""

    gpu: GpuLook
    refs: list[ProcessRef]
    members: list[SessionProcess]

    def of(self, target: Target) -> list[SessionProcess]:
        return [member for member in self.members if member.ref not in target.left_out]

    def movable(self, target: Target) -> list[SessionProcess]:
        """Return ``of(target)`` without those that have nothing to move, for which no operation may
        wait."""
        return [one for one in self.of(target) if not self._has_nothing_to_move(one)]

    def _has_nothing_to_move(self, member: SessionProcess) -> bool:
        if member.state is not CheckpointState.RUNNING or member.error or member.stopped:
            return False
        return member.ref.pid not in self.gpu.bytes_by_pid and has_no_context(member.ref)


@dataclass(frozen=True)
class DeviceUsage:
    """Bytes by pid, and when NVML last saw each pid work (on its clock; ``None`` if it cannot say).
    ``by_leader`` has the GPU's users, also those paged out, by the leader of their terminal
    session. This finds a worker whose parent has ended."""

    bytes_by_pid: dict[int, int]
    busy_us: dict[int, int] | None
    seen_us: int
    by_leader: dict[int, list[ProcessRef]]


class UsageMeter:
    """Reads NVML for many observers, and says for each whether a process worked since *its* last
    look."""

    def __init__(self, gpu: GpuReadings, footprints: Footprints) -> None:
        self._gpu = gpu
        self._footprints = footprints
        self._reading = asyncio.Lock()
        self._usage = DeviceUsage({}, {}, 0, {})
        self._fresh_until_ns = 0
        self._looked_us: dict[SessionId, int] = {}

    def forget(self, session: SessionId | None = None) -> None:
        """Read again next time, because an operation moved memory; forget an ended ``session``."""
        self._fresh_until_ns = 0
        if session is not None:
            self._looked_us.pop(session, None)

    @property
    def last(self) -> DeviceUsage:
        """The last reading, even if it is old."""
        return self._usage

    def saw(self, bytes_by_pid: dict[int, int]) -> None:
        """Record what an operation's look has shown. When each process worked is read later."""
        leaders = self._by_leader(bytes_by_pid)
        self._usage = replace(self._usage, bytes_by_pid=bytes_by_pid, by_leader=leaders)
        self._fresh_until_ns = 0

    async def read(self) -> DeviceUsage:
        async with self._reading:
            if clock.now_ns() >= self._fresh_until_ns:
                self._usage = await self._next(self._usage)
                self._fresh_until_ns = clock.now_ns() + _FRESH_NS
            return self._usage

    def busy(self, session: SessionId, pids: Collection[int], usage: DeviceUsage) -> bool | None:
        """Return whether one of ``pids`` used the GPU since the session's last look, if known."""
        if usage.busy_us is None:
            return None
        since_us = self._looked_us.get(session, usage.seen_us - _WINDOW_US)
        self._looked_us[session] = usage.seen_us
        return any(usage.busy_us.get(pid, -1) > since_us for pid in pids)

    async def _next(self, last: DeviceUsage) -> DeviceUsage:
        bytes_by_pid = await self._gpu.bytes_by_pid()
        # From the newest sample seen, not from a clock, because samples are late.
        samples = await self._gpu.samples(last.seen_us)
        if samples is None:
            return DeviceUsage(bytes_by_pid, None, last.seen_us, self._by_leader(bytes_by_pid))
        busy_us = {pid: at for pid, at in (last.busy_us or {}).items() if pid in bytes_by_pid}
        for sample in samples:
            if sample.percent > 0:
                busy_us[sample.pid] = max(sample.time_us, busy_us.get(sample.pid, 0))
        seen_us = max((s.time_us for s in samples), default=last.seen_us)
        return DeviceUsage(bytes_by_pid, busy_us, seen_us, self._by_leader(bytes_by_pid))

    def _by_leader(self, bytes_by_pid: dict[int, int]) -> dict[int, list[ProcessRef]]:
        refs = {ref for pid in bytes_by_pid if (ref := processes.ref_of(pid)) is not None}
        refs.update(ref for ref in self._footprints.all() if processes.alive(ref))
        found: dict[int, list[ProcessRef]] = {}
        for ref in refs:
            stat = processes.stat_of(ref.pid)
            if stat is not None:
                found.setdefault(stat.session, []).append(ref)
        return found


class Survey:
    def __init__(
        self,
        driver: CheckpointCalls,
        gpu: GpuReadings,
        meter: UsageMeter,
        footprints: Footprints,
        other_roots: Callable[[], Collection[ProcessRef]],
    ) -> None:
        self._driver = driver
        self._gpu = gpu
        self._looks: dict[SessionId, SessionLook] = {}
        """The looks of the operations under way."""
        self._operations: Counter[SessionId] = Counter()
        self._footprints = footprints
        self._meter = meter
        self._other_roots = other_roots
        self._free: dict[ProcessRef, int] = {}
        """The bytes that each process had in the GPU when the driver last said that it runs. An
        operation that locks it takes it off this list first. So a process on the list that is
        locked or out has been taken by somebody else."""
        self._locked_since_ns: dict[ProcessRef, int] = {}
        """When a process on that list was first found locked."""

    async def members(self, target: Target, usage: DeviceUsage) -> list[SessionProcess]:
        """Return the session's processes that use CUDA, the root first. If the root is gone, return
        what it left behind, as far as that is in the terminal session that it led."""
        return (await self._ask(target, self._all_of(target, usage), usage.bytes_by_pid))[0]

    async def look(self, target: Target) -> SessionLook:
        """Return the look of the operation that is under way on the session. The first one asks;
        the next ones get the same, until something is done (``wall``)."""
        if (seen := self._looks.get(target.session)) is None:
            whole = replace(target, left_out=frozenset())
            refs = self._all_of(whole, self._meter.last)
            members, gpu = await self._ask(whole, refs, None)
            assert gpu is not None
            self._meter.saw(gpu.bytes_by_pid)
            late = [ref for ref in self._all_of(whole, self._meter.last) if ref not in refs]
            members += (await self._ask(whole, late, gpu.bytes_by_pid))[0] if late else []
            seen = self._looks[target.session] = SessionLook(gpu, refs + late, members)
        return seen

    def wall(self, session: SessionId) -> None:
        """Forget the look: something was done, so the next one asks again."""
        self._looks.pop(session, None)

    @contextmanager
    def operation(self, session: SessionId) -> Iterator[None]:
        """Keep looks for an operation on the session, and for the operations that are parts of it:
        what one of them has seen is as good for the next one."""
        self._operations[session] += 1
        try:
            yield
        finally:
            self._operations[session] -= 1
            if not self._operations[session]:
                del self._operations[session]
                self.wall(session)

    async def _ask(
        self, target: Target, refs: list[ProcessRef], bytes_by_pid: Mapping[int, int] | None
    ) -> tuple[list[SessionProcess], GpuLook | None]:
        """Ask the driver about ``refs`` and, if ``bytes_by_pid`` is not known, NVML about the GPU,
        with one question. Processes that are stopped are not asked: the answer would not come."""
        # One look at the control group for all: nearly always they are in the same one.
        frozen = why_frozen(target.root)
        stopped = {ref: why for ref in refs if (why := why_halted(ref) or frozen)}
        asked = [ref.pid for ref in refs if ref not in stopped]
        gpu: GpuLook | None = None
        states: Mapping[int, CheckpointState | GpuError]
        if bytes_by_pid is None:
            gpu = await self._look(asked)
            states, bytes_by_pid = gpu.states, gpu.bytes_by_pid
        else:
            states = {pid: await self._state(pid) for pid in asked}
        found = [
            self._unasked(ref, stopped[ref])
            if ref in stopped
            else self._judged(ref, states[ref.pid], bytes_by_pid)
            for ref in refs
        ]
        # The process has ended or exec'ed another program: what was out went with the old one.
        self._footprints.drop([m.ref for m in found if _has_nothing(m)])
        there = [m for m in found if m.state is not CheckpointState.NOT_A_CUDA_PROCESS or m.error]
        return there, gpu

    async def _look(self, pids: list[int]) -> GpuLook:
        try:
            return await self._gpu.look(pids)
        except Hung:
            if not pids:
                raise
        # One by one: only the process that hangs has no state.
        return replace(await self._gpu.look(), states={pid: await self._state(pid) for pid in pids})

    async def _state(self, pid: int) -> CheckpointState | GpuError:
        try:
            return await self._driver.checkpoint_state(pid)
        except GpuError as error:
            return error

    def refs(self, target: Target) -> list[ProcessRef]:
        """Return all processes of the session, with or without CUDA, by the last reading."""
        if (seen := self._looks.get(target.session)) is not None:
            return [ref for ref in seen.refs if ref not in target.left_out]
        return self._all_of(target, self._meter.last)

    def outside(self, target: Target, pids: Iterable[int]) -> list[int]:
        """Return those of ``pids`` that belong to no session."""
        roots = {*self._other_roots(), target.root}
        return [pid for pid in pids if not belongs(pid, roots)]

    def _all_of(self, target: Target, usage: DeviceUsage) -> list[ProcessRef]:
        others = self._other_roots()
        refs = dict.fromkeys(processes.tree(target.root, others))
        for ref in (*usage.by_leader.get(target.root.pid, ()), *self._footprints.all()):
            if ref not in others and processes.in_session_of(target.root, ref.pid):
                refs.setdefault(ref)
        return [ref for ref in refs if ref not in target.left_out]

    def _judged(
        self, ref: ProcessRef, said: CheckpointState | GpuError, bytes_by_pid: Mapping[int, int]
    ) -> SessionProcess:
        """Return what the driver's answer about ``ref`` means."""
        if isinstance(said, GpuError):
            if said.driver_code is None and not isinstance(said, (Busy, Hung)):
                raise said  # no driver at all: the error is not about this process
            ended = not processes.alive(ref)  # then the driver may report an error
            return SessionProcess(ref, CheckpointState.NOT_A_CUDA_PROCESS, None if ended else said)
        state = said if processes.alive(ref) else CheckpointState.NOT_A_CUDA_PROCESS
        if self._taken(ref, state, bytes_by_pid.get(ref.pid, 0)):
            running = CheckpointState.RUNNING  # as far as Kiwi is concerned
            return SessionProcess(ref, running, stopped=BY_ANOTHER, kept_bytes=self._free[ref])
        return SessionProcess(ref, state)

    def will_hold(self, ref: ProcessRef) -> None:
        """Note that an operation of this daemon is about to lock ``ref``."""
        self._free.pop(ref, None)
        self._locked_since_ns.pop(ref, None)

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

    def _unasked(self, ref: ProcessRef, stopped: str) -> SessionProcess:
        """Return a stopped process with its remembered state, which cannot change by itself."""
        if self._footprints.get(ref) is not None:
            return SessionProcess(ref, CheckpointState.CHECKPOINTED, stopped=stopped)
        state = CheckpointState.RUNNING if has_driver(ref) else CheckpointState.NOT_A_CUDA_PROCESS
        return SessionProcess(ref, state, stopped=stopped)


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


def _has_nothing(member: SessionProcess) -> bool:
    return member.state is CheckpointState.NOT_A_CUDA_PROCESS and member.error is None
