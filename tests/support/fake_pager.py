"""A pager in memory, for tests of everything above the pager: sizes, states and scripted faults.

It passes the same contract suite as the real backends. It knows only the sessions that ``start``
added; any other session is a process that does not use the GPU.

    pager = FakePager(total_bytes=8 * GIB)
    pager.start(session, resident_bytes=5 * GIB)
    pager.script("page_out", Refuse(Reason.LOCK_TIMEOUT), session=session)     # the next one only
    pager.script("page_in", hang := Hang())
    ...
    hang.release()
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kiwi_core.pager.api import (
    Lost,
    Moved,
    Observation,
    ProcessMemory,
    ProcessRef,
    Refused,
    Target,
)
from kiwi_core.states import Reason, Residency
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.pager.api import Outcome
    from kiwi_core.units import SessionId

Call = Literal["suspend", "resume", "page_out", "page_in", "residue_in"]


@dataclass(frozen=True)
class Refuse:
    """The call changes nothing and is refused."""

    reason: Reason
    detail: str = "scripted"


@dataclass(frozen=True)
class Lose:
    """The call loses the contents for good."""

    detail: str = "scripted"


@dataclass(frozen=True)
class Raise:
    """The call raises ``error``, which the caller must take for a bug."""

    error: Exception


@dataclass
class Hang:
    """The call does not begin until ``release()``. ``entered`` is set when it hangs. Any thread may
    use both."""

    entered: threading.Event = field(default_factory=threading.Event)
    _free: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        self._free.set()

    async def wait(self) -> None:
        self.entered.set()
        while not self._free.is_set():
            await asyncio.sleep(_POLL_S)


Fault = Refuse | Lose | Raise | Hang

_POLL_S = 0.002


@dataclass
class _Process:
    size_bytes: int
    residency: Residency = Residency.RESIDENT
    alive: bool = True
    busy: bool | None = None
    out_bytes: int = 0
    """The part that is in system RAM; the rest is in the GPU."""

    @property
    def left_bytes(self) -> int:
        return 0 if self.residency is Residency.LOST else self.size_bytes - self.out_bytes


class FakePager:
    """A pager in memory, whose moves take no time. Any thread may call the methods for the test."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.calls: list[tuple[str, SessionId]] = []
        """All operations that were requested, in order."""
        self._roots: dict[SessionId, ProcessRef] = {}
        self._outside_bytes = 0
        self._processes: dict[SessionId, _Process] = {}
        self._faults: list[tuple[Call, SessionId | None, deque[Fault]]] = []

    # --- for the test --------------------------------------------------------------------------

    def start(self, session: SessionId, resident_bytes: int, busy: bool | None = None) -> None:
        """Let a session use the GPU, or change how much it uses. Raise ``ValueError``, a mistake
        of the test, if the bytes do not fit."""
        process = self._processes.setdefault(session, _Process(0))
        grows_bytes = resident_bytes - process.size_bytes
        if process.residency is Residency.RESIDENT and grows_bytes > self.free_bytes:
            raise ValueError(f"{session} cannot grow by {format_bytes(grows_bytes)}")
        process.size_bytes, process.busy = resident_bytes, busy

    def end(self, session: SessionId) -> None:
        """Let its process die and free its memory, wherever it is."""
        self._processes[session] = _Process(0, alive=False)

    def hold_outside(self, size_bytes: int) -> None:
        """Set how much memory programs outside Kiwi hold."""
        self._outside_bytes = size_bytes

    def script(self, call: Call, *faults: Fault, session: SessionId | None = None) -> None:
        """Let the next calls meet ``faults``, one each; calls for ``session`` only, if given."""
        self._faults.append((call, session, deque(faults)))

    def residency(self, session: SessionId) -> Residency:
        return self._process(session).residency

    @property
    def free_bytes(self) -> int:
        used = sum(process.left_bytes for process in self._processes.values())
        return self.total_bytes - self._outside_bytes - used

    # --- the pager -----------------------------------------------------------------------------

    def why_stopped(self, target: Target) -> str:
        return ""

    async def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._perform("suspend", target, self._suspend)

    async def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._perform("resume", target, self._resume)

    async def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._perform("page_out", target, self._page_out)

    async def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        return await self._perform("page_in", target, self._page_in)

    async def residue_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Do nothing: its page-outs leave nothing in the GPU."""
        return await self._perform("residue_in", target, lambda _process: 0)

    async def observe(self, target: Target) -> Observation:
        process = self._process(target.session)
        if not process.alive:
            return Observation(False, Residency.RESIDENT, 0, 0)
        in_ram = process.residency is Residency.PAGED_OUT
        resident_bytes = process.left_bytes
        memory = ProcessMemory(target.root, process.residency, resident_bytes)
        return Observation(
            alive=True,
            residency=process.residency,
            resident_bytes=resident_bytes,
            paged_out_bytes=process.out_bytes if in_ram else 0,
            busy=process.busy,
            processes=(memory,) if process.size_bytes else (),
        )

    def busy(self, session: SessionId) -> bool:
        return False

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        return {
            root: self._processes[session].out_bytes
            for session, root in self._roots.items()
            if self._process(session).residency is Residency.PAGED_OUT
            and target in (None, Target(session, root))
        }

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        """Do nothing: the test has set the sizes."""

    # --- inside ---------------------------------------------------------------------------------

    async def _perform(
        self,
        call: Call,
        target: Target,
        operation: Callable[[_Process], int | Refused],
    ) -> Outcome:
        began_ns = time.monotonic_ns()
        self.calls.append((call, target.session))
        self._roots[target.session] = target.root
        outcome = await self._meet(self._take_fault(call, target.session), target)
        if outcome is not None:
            return outcome
        process = self._process(target.session)
        done = self._stopped(process, target) or operation(process)
        if isinstance(done, (Refused, Lost)):
            return done
        return Moved(done, time.monotonic_ns() - began_ns)

    def _take_fault(self, call: Call, session: SessionId) -> Fault | None:
        for scripted, of, faults in self._faults:
            if scripted == call and of in (None, session) and faults:
                return faults.popleft()
        return None

    async def _meet(self, fault: Fault | None, target: Target) -> Outcome | None:
        if isinstance(fault, Raise):
            raise fault.error
        if isinstance(fault, Refuse):
            return Refused(fault.reason, fault.detail)
        if isinstance(fault, Lose):
            self._process(target.session).residency = Residency.LOST
            return Lost(fault.detail)
        if isinstance(fault, Hang):
            await fault.wait()
        return None

    def _process(self, session: SessionId) -> _Process:
        return self._processes.setdefault(session, _Process(0))

    def _stopped(self, process: _Process, target: Target) -> Refused | Lost | None:
        if not process.alive:
            return Refused(Reason.GONE, f"Process {target.root.pid} has ended.")
        return Lost("It was lost earlier.") if process.residency is Residency.LOST else None

    def _suspend(self, process: _Process) -> int:
        if process.size_bytes and process.residency is Residency.RESIDENT:
            process.residency = Residency.SUSPENDED
        return 0

    def _resume(self, process: _Process) -> int | Refused:
        if process.residency is Residency.PAGED_OUT:
            return Refused(Reason.DRIVER, "Its memory is in system RAM.")
        process.residency = Residency.RESIDENT
        return 0

    def _page_out(self, process: _Process) -> int:
        if not process.left_bytes:
            return 0
        process.out_bytes = process.size_bytes
        process.residency = Residency.PAGED_OUT
        return process.out_bytes

    def _page_in(self, process: _Process) -> int | Refused:
        if process.residency is not Residency.PAGED_OUT:
            return self._resume(process)
        need_bytes = process.out_bytes
        if self.free_bytes < need_bytes:
            return Refused(Reason.NO_ROOM, f"Only {format_bytes(self.free_bytes)} are free.")
        process.out_bytes = 0
        process.residency = Residency.RESIDENT
        return need_bytes
