"""The driver's checkpoint calls and NVML's readings of one GPU, each made by a mover.

All raise ``GpuError``, of which ``Hung`` and ``Busy`` are subclasses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kiwi_core.errors import GpuError
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.looks import GpuLook
from kiwi_core.gpu.nvml import GpuGauges, GpuInfo, UtilisationSample
from kiwi_core.movers.errors import Busy, Hung
from kiwi_core.movers.messages import Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.movers.pool import MoverPool

ANSWER_S: Final = 5.0
"""Limit for calls that normally take a millisecond: a state, a reading, an unlock. A state query
waits for an operation in progress on its target, so a shorter limit would give no more information.
"""

AFTER_A_LOCK_S: Final = 5.0
"""Added to a lock's own time limit, which the driver keeps to the millisecond."""

WITHOUT_NVML_AFTER_S: Final = 10.0
"""Once NVML has answered nothing for this long, the GPU's free memory is asked of the driver. A
shorter silence loses nothing: everybody waits for its end."""

NVML_AGAIN_S: Final = 20.0
"""Pause before NVML is asked again after that."""

START_S: Final = 120.0
"""Limit for the very first answer: a mover has to start, and the driver to wake up."""


class RemoteDriver:
    """The driver's checkpoint calls, apart from those that also measure (``RemoteGpu``).
    ``restore`` takes a time limit in seconds, since the time for a move depends on its size."""

    def __init__(self, movers: MoverPool) -> None:
        self._movers = movers

    async def checkpoint_state(self, pid: int) -> CheckpointState:
        state = await self._movers.call("checkpoint_state", pid, deadline_s=ANSWER_S)
        return CheckpointState(state)

    async def lock(self, pid: int, timeout_ms: int) -> None:
        within_s = timeout_ms / 1000 + AFTER_A_LOCK_S
        await self._movers.call("lock", pid, timeout_ms, deadline_s=within_s)

    async def restore(self, pid: int, within_s: float) -> None:
        await self._movers.call("restore", pid, deadline_s=max(ANSWER_S, within_s))

    async def unlock(self, pid: int) -> None:
        await self._movers.call("unlock", pid, deadline_s=ANSWER_S)


class RemoteGpu:
    """One GPU's memory, the processes that use it, and its load.

    NVML may fail for good where the driver still works. Then the free memory comes from the driver
    itself, and no process has a row.
    """

    def __init__(self, movers: MoverPool, uuid: str, total_bytes: int) -> None:
        self._movers = movers
        self._uuid = uuid
        self._total_bytes = total_bytes
        self._rows_doubted = False
        self._only_gpu = False
        self._failing_since_s: dict[str, float] = {}
        """When each call to NVML that fails now failed first."""
        self._ask_again_s = 0.0
        self.without_nvml = ""
        """Why NVML is not asked any more, for the moment; "": it is."""

    def total_bytes(self) -> int:
        return self._total_bytes

    async def free_bytes(self) -> int:
        if not self._gave_up():
            try:
                return int(await self._ask_nvml("free_bytes"))
            except GpuError:
                if not self._gave_up():
                    raise
        ask = self._movers.call("free_bytes_of_driver", self._uuid, deadline_s=ANSWER_S)
        return int(await ask)

    def _gave_up(self) -> bool:
        """Return whether NVML is not to be asked now."""
        return bool(self.without_nvml) and time.monotonic() < self._ask_again_s

    async def _ask_nvml(self, call: str, *args: object, reads: Sequence[str] = ()) -> Any:
        """Make a call that reads NVML. ``reads`` are the calls that read the same."""
        try:
            found = await self._movers.call(call, self._uuid, *args, deadline_s=ANSWER_S)
        except Busy:
            raise  # NVML was not asked
        except GpuError as error:
            if isinstance(error, Hung) and any(args):
                raise  # one of the processes may hang, not NVML
            now_s = time.monotonic()
            for one in reads or (call,):
                if now_s - self._failing_since_s.setdefault(one, now_s) >= WITHOUT_NVML_AFTER_S:
                    self.without_nvml = str(error)
                    self._ask_again_s = now_s + NVML_AGAIN_S
            raise
        for one in reads or (call,):
            self._failing_since_s.pop(one, None)
        if not self._failing_since_s:
            self.without_nvml = ""
        return found

    async def gauges(self) -> GpuGauges:
        found = await self._movers.call("gauges", self._uuid, deadline_s=ANSWER_S)
        return msgspec.convert(found, GpuGauges)

    def doubt_rows(self, doubted: bool) -> None:
        self._rows_doubted = doubted

    async def look(self, pids: Sequence[int] = ()) -> GpuLook:
        """Look at the GPU, and ask for the state of ``pids``. While one of them hangs in the
        driver, nothing is known of the others. Without NVML, the free bytes are not known."""
        if self._gave_up():
            args = ("", list(pids))
            found = await self._movers.call("look", *args, deadline_s=ANSWER_S)
        else:
            found = await self._ask_nvml("look", list(pids), reads=("free_bytes", "processes"))
        seen = msgspec.convert(found, Seen)
        states: dict[int, CheckpointState | GpuError] = {
            pid: CheckpointState(state) for pid, state in seen.states.items()
        }
        return GpuLook(
            free_bytes=seen.free_bytes,
            bytes_by_pid=seen.bytes_by_pid,
            names_users=seen.names_users and not self._rows_doubted,
            states=states | {pid: failure.error() for pid, failure in seen.errors.items()},
        )

    async def bytes_by_pid(self) -> dict[int, int]:
        if self._gave_up():
            return {}
        found = await self._ask_nvml("processes")
        return msgspec.convert(found, dict[int, int])

    async def users_elsewhere(self) -> dict[int, str]:
        """Return the pids that use another GPU, and the UUID of that GPU. A machine does not get a
        second GPU while it runs, so one that has none is asked once."""
        if self._gave_up() or self._only_gpu:
            return {}
        found = await self._movers.call("users_elsewhere", self._uuid, deadline_s=ANSWER_S)
        self._only_gpu = found is None
        return msgspec.convert(found or {}, dict[int, str])

    async def measured_checkpoint(self, pid: int, within_s: float) -> tuple[int | None, int | None]:
        """Checkpoint ``pid``. Return the bytes that were free before and after; ``None``: NVML did
        not say."""
        args = (pid, "" if self._gave_up() else self._uuid)
        deadline_s = max(ANSWER_S, within_s)
        before, after = await self._movers.call("measured_checkpoint", *args, deadline_s=deadline_s)
        return before, after

    async def claimed_restore(self, pid: int, claims_bytes: Sequence[int], within_s: float) -> None:
        """Restore as ``RemoteDriver`` does, once one of ``claims_bytes`` could be allocated."""
        args = (pid, self._uuid, list(claims_bytes))
        await self._movers.call("claimed_restore", *args, deadline_s=max(ANSWER_S, within_s))

    async def samples(self, since_us: int) -> tuple[UtilisationSample, ...] | None:
        if self._gave_up():
            return None
        found = await self._movers.call("samples", self._uuid, since_us, deadline_s=ANSWER_S)
        return msgspec.convert(found, tuple[UtilisationSample, ...] | None)


async def why_no_moves(movers: MoverPool) -> str:
    """Return why this machine's driver cannot move memory out and back in; "": it can."""
    return str(await movers.call("why_no_moves", deadline_s=START_S))


async def gpus(movers: MoverPool) -> tuple[GpuInfo, ...]:
    """Return all GPUs of this machine, by index."""
    found = await movers.call("gpus", deadline_s=START_S)
    return msgspec.convert(found, tuple[GpuInfo, ...])
