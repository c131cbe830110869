"""Holding a session: who belongs to it, locking all of its processes or none, letting them go.

A process that has not initialised CUDA cannot be held. One that does so after it was looked for
runs although its session is suspended; the scheduler sees its memory at the next observation.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.pager.ports import Stop, refusal
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.fitness import Unmovable
    from kiwi_core.pager.ports import Driver, Gpu
    from kiwi_core.pager.room import Footprints, Room
    from kiwi_core.pager.survey import Member, Survey

_ROUNDS_MAX: Final = 8
"""Looks for processes that started while others were being locked; a locked parent starts few."""

_SETTLE_POLL_S: Final = 0.01
_IN_TRANSIT: Final = frozenset({CheckpointState.CHECKPOINTING, CheckpointState.RESTORING})
FREE: Final = frozenset({CheckpointState.RUNNING, CheckpointState.NOT_A_CUDA_PROCESS})


@dataclass(frozen=True)
class Parts:
    """What all operations of one pager share. ``remember`` stores footprints where they survive
    this process; it is called before anything is moved out."""

    driver: Driver
    gpu: Gpu
    survey: Survey
    footprints: Footprints
    room: Room
    config: Config
    host_available_bytes: Callable[[Collection[int]], int]
    remember: Callable[[Target, Mapping[ProcessRef, int]], None]
    unmovable: Unmovable


class Holding:
    """One operation's view of one session's processes. Methods may raise ``Stop``."""

    def __init__(self, parts: Parts, target: Target, deadline_ns: int) -> None:
        self._parts = parts
        self._driver = parts.driver
        self._target = target
        self._deadline_ns = deadline_ns

    def settled(self) -> list[Member]:
        """Who is there. A call on a process that is under way, by an earlier caller that died
        perhaps, is waited for until the deadline."""
        while True:
            members = self._parts.survey.members(self._target)
            for member in members:
                if member.error is not None:
                    raise Stop(refusal(member.error, member.ref.pid)) from member.error
            under_way = [m.ref.pid for m in members if m.state in _IN_TRANSIT]
            if not under_way:
                return members
            if time.monotonic_ns() >= self._deadline_ns:
                detail = f"Another operation on process {under_way[0]} is still under way."
                raise Stop(Refused(Reason.DRIVER, detail))
            time.sleep(_SETTLE_POLL_S)

    def state(self, ref: ProcessRef) -> CheckpointState | None:
        """What the driver says now (once it has settled); ``None`` where it says nothing. A process
        that has ended is ``NOT_A_CUDA_PROCESS``; ``Stop(GONE)`` if that is the root."""
        state = self._asked(ref)
        while state in _IN_TRANSIT and time.monotonic_ns() < self._deadline_ns:
            time.sleep(_SETTLE_POLL_S)
            state = self._asked(ref)
        if processes.alive(ref):
            return state
        self.still_wanted()
        return CheckpointState.NOT_A_CUDA_PROCESS

    def _asked(self, ref: ProcessRef) -> CheckpointState | None:
        try:
            return self._driver.checkpoint_state(ref.pid)
        except GpuError:
            return None

    def root_alive(self) -> bool:
        return processes.alive(self._target.root)

    def still_wanted(self) -> None:
        if not self.root_alive():
            raise Stop(self.gone())

    def gone(self) -> Refused:
        return Refused(Reason.GONE, f"Process {self._target.root.pid} has ended.")

    @contextmanager
    def all_held(self, present: Callable[[], list[Member]]) -> Iterator[list[Member]]:
        """All processes held, or ``Stop``. Whatever ends the operation early, those that were
        locked here are unlocked again."""
        locked_here: list[ProcessRef] = []
        try:
            yield self._lock_all(present, locked_here)
        except Stop as stop:
            if not stop.keep_held:
                stop.add(self.unlock_quietly(locked_here))
            raise
        except BaseException:
            self.unlock_quietly(locked_here)
            raise

    def _lock_all(
        self, present: Callable[[], list[Member]], locked_here: list[ProcessRef]
    ) -> list[Member]:
        """Again and again until a look finds nobody running: processes come and go meanwhile."""
        timeout_ns = self._parts.config.lock_timeout_ns
        until_ns = min(self._deadline_ns, time.monotonic_ns() + timeout_ns)
        for _ in range(_ROUNDS_MAX):
            members = present()
            running = in_state(members, CheckpointState.RUNNING)
            if not running:
                return members
            for ref in running:
                self._lock(ref, until_ns)
                locked_here.append(ref)
        detail = "It keeps starting new processes that use the GPU."
        raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))

    def _lock(self, ref: ProcessRef, until_ns: int) -> None:
        left_ms = (until_ns - time.monotonic_ns()) // NS_PER_MS
        if left_ms <= 0:
            detail = f"No time was left to wait for process {ref.pid} to come to rest."
            raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))
        try:
            self._driver.lock(ref.pid, left_ms)
        except GpuError as error:
            fine = (CheckpointState.LOCKED, CheckpointState.NOT_A_CUDA_PROCESS)
            if self.state(ref) not in fine:
                raise Stop(refusal(error, ref.pid)) from error

    def unlock_all(self, refs: Iterable[ProcessRef]) -> None:
        failed = [ref for ref in dict.fromkeys(refs) if self._unlock(ref) is not None]
        # Once more: an unlock has no side effect that a second one could do harm to.
        errors = [(ref.pid, e) for ref in failed if (e := self._unlock(ref)) is not None]
        self.still_wanted()
        for pid, error in errors:
            raise Stop(refusal(error, pid)) from error

    def unlock_quietly(self, refs: Iterable[ProcessRef]) -> str:
        """For undoing: returns words about what could not be undone."""
        errors = ((ref.pid, self._unlock(ref)) for ref in refs)
        return " ".join(f"Process {pid} stays held: {e}" for pid, e in errors if e is not None)

    def _unlock(self, ref: ProcessRef) -> GpuError | None:
        try:
            self._driver.unlock(ref.pid)
        except GpuError as error:
            return None if self._is_free(ref) else error
        return None

    def _is_free(self, ref: ProcessRef) -> bool:
        return not processes.alive(ref) or self._asked(ref) in FREE


def in_state(members: list[Member], state: CheckpointState) -> list[ProcessRef]:
    return [member.ref for member in members if member.state is state]


def lost(pid: int, error: GpuError | None = None) -> Lost:
    words = f" {error}" if error is not None else ""
    return Lost(f"The driver cannot bring back the GPU memory of process {pid}.{words}")
