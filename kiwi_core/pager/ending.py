"""How an operation of the pager ends early: with a refusal, or because memory is lost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kiwi_core.gpu import claims, processes
from kiwi_core.gpu.results import OPERATING_SYSTEM
from kiwi_core.pager.api import Lost, Refused
from kiwi_core.states import Reason
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from kiwi_core.errors import GpuError
    from kiwi_core.pager.api import Outcome


class Stop(Exception):  # noqa: N818 - not an error: an answer
    """Ends an operation with ``outcome``, after the parts that must be undone are undone.

    ``keep_locked``: undoing failed for a part, so the other processes of the session must not run
    on.
    ``over``: the session has ended (its root is gone, or a part is lost), so nothing of it need
    stay as it was. ``counts_as_out``: a part stays out, and libraries own all of the session.
    """

    def __init__(self, outcome: Refused | Lost) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.keep_locked = False
        self.over = isinstance(outcome, Lost) or outcome.reason is Reason.GONE
        self.counts_as_out = False

    def __str__(self) -> str:
        return self.outcome.detail

    def lacks_room(self, outcome: Outcome) -> None:
        """Report that releasing the session failed for lack of room, which is worth another try."""
        lost = isinstance(self.outcome, Lost)
        if not lost and isinstance(outcome, Refused) and outcome.reason is Reason.NO_ROOM:
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


def lost(pid: int, error: GpuError | None = None, held_bytes: int = 0) -> Lost:
    """Return the outcome. A failed restore has taken ``held_bytes`` and does not free them."""
    words = f" {error.message}" if error is not None else ""
    if held_bytes:
        words += f" It holds {format_bytes(held_bytes)} of GPU memory until it is restarted."
    return Lost(f"The driver cannot bring back the GPU memory of process {pid}.{words}")
