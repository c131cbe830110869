"""What the checkpoint backend needs from the driver and NVML, and how an operation ends early.

The real ones are ``kiwi_core.movers.RemoteDriver`` and ``RemoteGpu``; tests pass scripted ones to
reach states that neither a real nor an emulated driver can be brought into.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kiwi_core.gpu import claims, processes
from kiwi_core.gpu.results import OPERATING_SYSTEM
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.states import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.errors import GpuError
    from kiwi_core.gpu.driver import CheckpointState
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.nvml import UtilisationSample
    from kiwi_core.pager.api import Outcome


class CheckpointCalls(Protocol):
    """The driver's calls, see ``kiwi_core.gpu.driver``. All raise ``GpuError``: ``Hung`` if the
    result is unknown, ``Busy`` if the call did not begin. ``within_s`` is the limit for a move."""

    async def checkpoint_state(self, pid: int) -> CheckpointState: ...
    async def lock(self, pid: int, timeout_ms: int) -> None: ...
    async def restore(self, pid: int, within_s: float) -> None: ...
    async def unlock(self, pid: int) -> None: ...


class GpuReadings(Protocol):
    """One GPU's memory. All raise ``GpuError``."""

    async def look(self, pids: Sequence[int] = ()) -> GpuLook:
        """Look at the GPU as a whole, and ask the driver for the state of each of ``pids``. Also
        ``Hung`` if one of them does not answer."""
        ...

    async def free_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...

    def doubt_rows(self, doubted: bool) -> None:
        """Record whether processes with a context lack rows: ``names_users`` is false then."""
        ...

    async def bytes_by_pid(self) -> dict[int, int]:
        """Return the bytes, contexts included, of the processes that NVML can name."""
        ...

    async def users_elsewhere(self) -> dict[int, str]:
        """Return the pids that use another GPU, and the name of that GPU."""
        ...

    async def measured_checkpoint(self, pid: int, within_s: float) -> tuple[int | None, int | None]:
        """Checkpoint ``pid``. Return the bytes that were free before and after, if known."""
        ...

    async def claimed_restore(self, pid: int, claims_bytes: Sequence[int], within_s: float) -> None:
        """Restore ``pid`` into room that was allocated for a moment before: the first of
        ``claims_bytes`` that could be had. "no-room-to-claim": none could; nothing was tried."""
        ...

    async def samples(self, since_us: int) -> tuple[UtilisationSample, ...] | None:
        """Return the samples since ``since_us``; ``None`` if NVML cannot say who used the GPU."""
        ...


class Stop(Exception):  # noqa: N818 - not an error: an answer
    """Ends an operation with ``outcome``, after the parts that must be undone are undone.

    ``keep_locked``: undoing failed for a part, so the other processes of the session must not run
    on.
    ``over``: the session has ended (its root is gone, or a part is lost), so nothing of it need
    stay as it was. ``left_running``: all of it that is left runs on already.
    """

    def __init__(self, outcome: Refused | Lost) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.keep_locked = False
        self.over = isinstance(outcome, Lost) or outcome.reason is Reason.GONE
        self.left_running = False

    def __str__(self) -> str:
        return self.outcome.detail

    def lacks_room(self, outcome: Outcome) -> None:
        """Report that releasing the session failed for lack of room, which is worth another try."""
        if isinstance(outcome, Refused) and outcome.reason is Reason.NO_ROOM:
            self.outcome = outcome

    def add(self, words: str) -> None:
        """Add ``words`` to the detail, for instance what could not be undone."""
        if words:
            self.outcome = replace(self.outcome, detail=f"{self.outcome.detail} {words}")


_REASONS = {
    "lock-timeout": Reason.LOCK_TIMEOUT,
    "no-gpu-memory": Reason.NO_ROOM,
    claims.NO_ROOM: Reason.NO_ROOM,
    "not-permitted": Reason.NOT_PERMITTED,
    "unsupported": Reason.UNSUPPORTED,
    "driver-too-old": Reason.UNSUPPORTED,
    "no-such-process": Reason.GONE,
}


def refusal(error: GpuError, pid: int) -> Refused:
    """Return the driver's error as an outcome, for a target that is unchanged."""
    reason = _REASONS.get(error.code, Reason.DRIVER)
    if error.driver_code == OPERATING_SYSTEM and not may_control(pid):
        reason = Reason.NOT_PERMITTED  # the driver reports no more than "OS call failed"
    return Refused(reason, str(error))


def as_stop(error: Stop | GpuError, pid: int) -> Stop:
    """Return ``error`` as the end of an operation on a target that is unchanged."""
    return error if isinstance(error, Stop) else Stop(refusal(error, pid))


def may_control(pid: int) -> bool:
    """Return whether ``pid`` has the same user, or this is root. (Others need CAP_SYS_PTRACE.)"""
    return os.geteuid() in (0, processes.owner_uid(pid))
