"""The pager's interface: moves one session's GPU memory out and in.

Every backend has the interface ``Pager`` and passes the contract suite in
``tests/pager/contract.py``. Its coroutines run in the daemon's loop, one task for each operation,
and never block it: a driver call is made by a mover. Calls for one session wait for each other.

``deadline_ns`` is on ``kiwi_core.clock``'s time. It bounds what *can* be bounded (waiting for
the lock, waiting for room, the time that a driver call gets). The pager then gives up a driver call
that hangs, but the operation ends only when the driver reports the state of the process: the caller
watches that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kiwi_core.states import Reason
    from kiwi_core.units import SessionId

__all__ = [
    "Lost",
    "Moved",
    "Observation",
    "Outcome",
    "Pager",
    "ProcessMemory",
    "ProcessRef",
    "Refused",
    "Target",
    "worst",
]


@dataclass(frozen=True)
class Target:
    """A session as the pager sees it: the root process (the kernel). Each call looks up which
    descendants use the GPU, because they come and go."""

    session: SessionId
    root: ProcessRef


@dataclass(frozen=True)
class Moved:
    """The operation succeeded. ``bytes_moved`` is 0 where there was nothing to move (or if it only
    suspended or resumed). A page-out that finished an earlier one reports all bytes that are out
    now, which is what a page-in needs. ``stays_bytes`` is what the page-out left in the GPU: mostly
    contexts, which only the driver moves."""

    bytes_moved: int
    elapsed_ns: int
    stays_bytes: int = 0


@dataclass(frozen=True)
class Refused:
    """Nothing changed in the target: what ran runs, what was suspended is suspended, what was out
    is out. (If even that could not be kept, the detail says so, and ``observe`` reports the state.)
    """

    reason: Reason
    detail: str = ""


@dataclass(frozen=True)
class Lost:
    """The driver reports that the contents are lost for good."""

    detail: str = ""


Outcome = Moved | Refused | Lost


@dataclass(frozen=True)
class ProcessMemory:
    """One process of a session that the driver knows."""

    ref: ProcessRef
    residency: Residency
    resident_bytes: int


def worst(residencies: Collection[Residency]) -> Residency:
    """Return the worst: LOST > PAGED_OUT > SUSPENDED > RESIDENT; RESIDENT if there are none."""
    order = (Residency.LOST, Residency.PAGED_OUT, Residency.SUSPENDED)
    return next((one for one in order if one in residencies), Residency.RESIDENT)


@dataclass(frozen=True)
class Observation:
    """What the driver and NVML report of a session right now.

    ``residency`` is the worst one of the processes. A mixture of PAGED_OUT and RESIDENT (a page-out
    cut short) is reported as PAGED_OUT with both byte counts.
    ``busy``: the GPU has worked for it since the last look; ``None``: not known.
    ``alive`` is false when the root process is gone. ``owned``: libraries own and move its memory.
    """

    alive: bool
    residency: Residency
    resident_bytes: int
    paged_out_bytes: int
    busy: bool | None = None
    processes: tuple[ProcessMemory, ...] = field(default=())
    owned: bool = False
    allocated: bool = False
    """A library counts allocations of a process."""
    unsized: bool = False
    """NVML does not show what a process has in the GPU, and no library counts it."""
    stopped: str = ""
    """Why a process of the session does not run ("stopped by Ctrl-Z …"): then the pager does not
    ask the driver about it, because the driver does not answer before the process goes on. Empty:
    all run.
    """
    taken_bytes: int = 0
    """What the driver has taken of what libraries, which have their memory out, had left in the
    GPU."""


class Pager(Protocol):
    def why_stopped(self, target: Target) -> str:
        """Return why a process of the session that may use the driver does not run; "": all run.
        Read from ``/proc``."""
        ...

    async def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        """Make every GPU process of the session wait at its next driver call, or none."""
        ...

    async def resume(self, target: Target, deadline_ns: int) -> Outcome:
        """Let the processes that are suspended run again."""
        ...

    async def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        """Suspend and move out all processes of the session, or none. Works on a session that is
        already suspended, and finishes a page-out that was left half-way."""
        ...

    async def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Bring back and resume. Checks free GPU memory first and never starts a restore that
        might fail for lack of room (such a failure is permanent in the driver)."""
        ...

    async def residue_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Bring back only what the driver has taken of what libraries had left in the GPU: mostly
        contexts. Checks room in the same way. What the libraries have out stays out, and every
        process that was suspended stays so."""
        ...

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        """Return the bytes that each paged-out process will need in the GPU, for ``target`` or for
        all. The daemon stores them where they survive it: the driver cannot report them later."""
        ...

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        """Import what an earlier daemon has exported."""
        ...

    async def observe(self, target: Target) -> Observation:
        """Ask the driver and NVML; never a remembered flag. Waits for an operation on the session
        to end, and otherwise takes milliseconds. Raises ``GpuError``."""
        ...
