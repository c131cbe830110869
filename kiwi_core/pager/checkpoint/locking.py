"""Lock a session: find its processes, lock all of them or none, and unlock them.

A process that has not initialised CUDA cannot be locked. A process that initialises CUDA after this
module has looked at it runs although its session is suspended; the scheduler sees its memory at the
next observation.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.movers.errors import Busy, Hung
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.pager.checkpoint.ports import Stop, refusal
from kiwi_core.pager.checkpoint.stopped import why_stopped
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_MS, format_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.checkpoint.ports import CheckpointCalls, GpuReadings
    from kiwi_core.pager.checkpoint.room import Footprints, GpuRoom
    from kiwi_core.pager.checkpoint.survey import SessionLook, SessionProcess, Survey
    from kiwi_core.pager.checkpoint.unmovable import RestoreFailures, Unmovable

_ROUNDS_MAX: Final = 8
"""Most searches for processes that started while others were being locked. A locked parent starts
few.
"""

_SETTLE_POLL_S: Final = 0.01
_STOPPED_POLL_S: Final = 0.1

_ASK_AGAIN_S: Final = (0.1, 1.0, 5.0, 20.0, 60.0)
"""Times between questions about a process on which a call hangs. Each question may occupy a mover
for its whole time limit, and there may be several such processes."""

_IN_TRANSIT: Final = frozenset({CheckpointState.CHECKPOINTING, CheckpointState.RESTORING})
FREE: Final = frozenset({CheckpointState.RUNNING, CheckpointState.NOT_A_CUDA_PROCESS})


@dataclass(frozen=True)
class Parts:
    """The dependencies of all operations of one pager. ``make_ram_room`` frees RAM for that many
    bytes that are about to go out of a session. ``store_footprints`` stores the footprints where
    they survive this process; it is called before anything is moved out.
    """

    driver: CheckpointCalls
    gpu: GpuReadings
    survey: Survey
    footprints: Footprints
    room: GpuRoom
    config: Config
    host_available_bytes: Callable[[Collection[int]], int]
    make_ram_room: Callable[[Target, int], Awaitable[None]]
    store_footprints: Callable[[], None]
    unmovable: Unmovable
    failures: RestoreFailures


class Locking:
    """One operation's view of one session's processes. Methods may raise ``Stop``."""

    def __init__(self, parts: Parts, target: Target, deadline_ns: int) -> None:
        self._parts = parts
        self._driver = parts.driver
        self._target = target
        self._deadline_ns = deadline_ns

    async def settled(self) -> list[SessionProcess]:
        """Return the session's processes that have something to move. Wait until the deadline for a
        call under way on one of them, perhaps of an earlier caller that died."""
        while True:
            members = (await self.look()).movable(self._target)
            for member in members:
                if member.stopped:
                    raise Stop(stopped(member.ref, member.stopped))
                if member.error is not None:
                    raise Stop(refusal(member.error, member.ref.pid)) from member.error
            under_way = [m.ref.pid for m in members if m.state in _IN_TRANSIT]
            if not under_way:
                return members
            if clock.now_ns() >= self._deadline_ns:
                detail = f"Another operation on process {under_way[0]} is still under way."
                raise Stop(Refused(Reason.DRIVER, detail))
            await asyncio.sleep(_SETTLE_POLL_S)
            self.wall()

    async def look(self) -> SessionLook:
        return await self._parts.survey.look(self._target)

    def wall(self) -> None:
        """Look again next time, because something was done."""
        self._parts.survey.wall(self._target.session)

    async def state(self, ref: ProcessRef) -> CheckpointState | None:
        """Return the state that the driver reports once it has settled; ``None`` if it reports
        none. A process that has ended is ``NOT_A_CUDA_PROCESS``; the root raises ``Stop(GONE)``."""
        state = await self._asked(ref)
        while state in _IN_TRANSIT and clock.now_ns() < self._deadline_ns:
            await asyncio.sleep(_SETTLE_POLL_S)
            state = await self._asked(ref)
        return self._of_the_living(ref, state)

    async def state_after(self, ref: ProcessRef, error: GpuError) -> CheckpointState | None:
        """Return ``state`` after a call on ``ref`` raised ``error``. A call that was given up may
        still be under way: nobody can go on before the driver reports the state."""
        if not isinstance(error, Hung):
            return await self.state(ref)
        for pause_s in chain(_ASK_AGAIN_S, repeat(_ASK_AGAIN_S[-1])):
            if not processes.alive(ref):
                break
            with suppress(Hung, Busy):
                state = await self._said(ref)
                if state not in _IN_TRANSIT:
                    return self._of_the_living(ref, state)
            await asyncio.sleep(pause_s)
        return self._of_the_living(ref, None)

    async def _said(self, ref: ProcessRef) -> CheckpointState | None:
        """Ask the driver for the state once the process runs. Raises ``Hung``, ``Busy``."""
        while why_stopped(ref):
            await asyncio.sleep(_STOPPED_POLL_S)
        try:
            return await self._driver.checkpoint_state(ref.pid)
        except (Hung, Busy):
            raise
        except GpuError:
            return None

    def _of_the_living(
        self, ref: ProcessRef, state: CheckpointState | None
    ) -> CheckpointState | None:
        if processes.alive(ref):
            return state
        self.still_wanted()
        return CheckpointState.NOT_A_CUDA_PROCESS

    async def _asked(self, ref: ProcessRef) -> CheckpointState | None:
        try:
            return await self._driver.checkpoint_state(ref.pid)
        except GpuError:
            return None

    def own_pids(self, members: Iterable[SessionProcess]) -> set[int]:
        """Return the pids of the session, also those that this operation leaves to libraries,
        because their memory in the GPU belongs to nobody else."""
        whole = replace(self._target, left_out=frozenset())
        refs = self._parts.survey.refs(whole)
        return {ref.pid for ref in refs} | {member.ref.pid for member in members}

    def outside(self, pids: Iterable[int]) -> list[int]:
        """Return those of ``pids`` that belong to no session."""
        return self._parts.survey.outside(self._target, pids)

    def root_alive(self) -> bool:
        return processes.alive(self._target.root)

    def still_wanted(self) -> None:
        if not self.root_alive():
            raise Stop(self.gone())

    def gone(self) -> Refused:
        return Refused(Reason.GONE, f"Process {self._target.root.pid} has ended.")

    @asynccontextmanager
    async def all_locked(
        self, present: Callable[[], Awaitable[list[SessionProcess]]]
    ) -> AsyncIterator[list[SessionProcess]]:
        """Lock all processes, or raise ``Stop``. If anything ends the operation early, unlock those
        that were locked here."""
        locked_here: list[ProcessRef] = []
        try:
            yield await self._lock_all(present, locked_here)
        except Stop as stop:
            if not stop.keep_locked:
                stop.add(await self.unlock_quietly(locked_here))
            raise
        except BaseException:
            await self.unlock_quietly(locked_here)
            raise

    async def _lock_all(
        self, present: Callable[[], Awaitable[list[SessionProcess]]], locked_here: list[ProcessRef]
    ) -> list[SessionProcess]:
        """Lock until a look finds no process running, because processes come and go meanwhile."""
        timeout_ns = self._parts.config.lock_timeout_ns
        until_ns = min(self._deadline_ns, clock.now_ns() + timeout_ns)
        for _ in range(_ROUNDS_MAX):
            members = await present()
            running = in_state(members, CheckpointState.RUNNING)
            if not running:
                return members
            for ref in running:
                await self._lock(ref, until_ns)
                locked_here.append(ref)
        detail = "It keeps starting new processes that use the GPU."
        raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))

    async def _lock(self, ref: ProcessRef, until_ns: int) -> None:
        left_ms = (until_ns - clock.now_ns()) // NS_PER_MS
        if left_ms <= 0:
            detail = f"No time was left to wait for process {ref.pid} to come to rest."
            raise Stop(Refused(Reason.LOCK_TIMEOUT, detail))
        self._parts.survey.will_hold(ref)
        self.wall()
        try:
            await self._driver.lock(ref.pid, left_ms)
        except GpuError as error:
            fine = (CheckpointState.LOCKED, CheckpointState.NOT_A_CUDA_PROCESS)
            if await self.state_after(ref, error) not in fine:
                raise Stop(refusal(error, ref.pid)) from error

    async def unlock_all(self, refs: Iterable[ProcessRef]) -> None:
        failed = [ref for ref in dict.fromkeys(refs) if await self._unlock(ref) is not None]
        # Try once more: a second unlock does no harm.
        errors = [(ref.pid, e) for ref in failed if (e := await self._unlock(ref)) is not None]
        self.still_wanted()
        for pid, error in errors:
            raise Stop(refusal(error, pid)) from error

    async def unlock_quietly(self, refs: Iterable[ProcessRef]) -> str:
        """Unlock ``refs`` to undo an operation. Return words about those that stay held."""
        errors = [(ref.pid, await self._unlock(ref)) for ref in refs]
        return " ".join(f"Process {pid} stays suspended: {e}" for pid, e in errors if e is not None)

    async def _unlock(self, ref: ProcessRef) -> GpuError | None:
        self.wall()
        try:
            await self._driver.unlock(ref.pid)
        except GpuError as error:
            return None if await self._is_free(ref) else error
        return None

    async def _is_free(self, ref: ProcessRef) -> bool:
        return not processes.alive(ref) or await self._asked(ref) in FREE


def in_state(members: list[SessionProcess], state: CheckpointState) -> list[ProcessRef]:
    return [member.ref for member in members if member.state is state]


def stopped(ref: ProcessRef, why: str) -> Refused:
    return Refused(Reason.STOPPED, f"Process {ref.pid} is {why}.")


def lost(pid: int, error: GpuError | None = None, held_bytes: int = 0) -> Lost:
    """Return the outcome. A failed restore has taken ``held_bytes`` and does not free them."""
    words = f" {error.message}" if error is not None else ""
    if held_bytes:
        words += f" It holds {format_bytes(held_bytes)} of GPU memory until it is restarted."
    return Lost(f"The driver cannot bring back the GPU memory of process {pid}.{words}")
