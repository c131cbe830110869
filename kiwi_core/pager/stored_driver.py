"""A driver, and a GPU, as the checkpoint pager sees them when keepers do the moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.gpu import processes
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager.keeper.messages import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.nvml import UtilisationSample
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.keepers import Keepers
    from kiwi_core.pager.ports import Driver, Gpu

log = structlog.get_logger(__name__)

_OUT: Final = frozenset(
    {CheckpointState.CHECKPOINTED, CheckpointState.CHECKPOINTING, CheckpointState.RESTORING}
)


class StoredGpu:
    """A GPU in which the keepers' own contexts are nobody: they take the same for ever, so they do
    not hinder a page-in into an otherwise empty GPU. What they take is not free."""

    def __init__(self, gpu: Gpu, keepers: Keepers) -> None:
        self._gpu = gpu
        self._keepers = keepers

    def free_bytes(self) -> int:
        return self._gpu.free_bytes()

    def total_bytes(self) -> int:
        return self._gpu.total_bytes()

    def names_users(self) -> bool:
        return self._gpu.names_users()

    def bytes_by_pid(self) -> dict[int, int]:
        keepers = self._keepers.pids()
        return {pid: size for pid, size in self._gpu.bytes_by_pid().items() if pid not in keepers}

    def users_elsewhere(self) -> dict[int, str]:
        return self._gpu.users_elsewhere()

    def samples(self, since_us: int) -> tuple[UtilisationSample, ...] | None:
        return self._gpu.samples(since_us)


class StoredDriver:
    """``driver``, but for moves that a keeper does. ``may_begin(ref)``: may ``ref``, which is
    locked, go out by its keeper, with all the RAM that it needs reserved?"""

    def __init__(
        self, driver: Driver, keepers: Keepers, may_begin: Callable[[ProcessRef], bool]
    ) -> None:
        self._driver = driver
        self._keepers = keepers
        self._may_begin = may_begin

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._driver.lock(pid, timeout_ms)

    def unlock(self, pid: int) -> None:
        self._driver.unlock(pid)

    def checkpoint_state(self, pid: int) -> CheckpointState:
        """FAILED also where the driver waits for somebody who is gone: ``story`` says more."""
        state = self._driver.checkpoint_state(pid)
        ref = processes.ref_of(pid) if state in _OUT else None
        return CheckpointState.FAILED if ref is not None and self.story(ref) else state

    def story(self, ref: ProcessRef) -> str:
        """Of one that is not in the GPU: why what a keeper took will never come back. "": it can,
        or no keeper took it."""
        record = self._keepers.record(ref)
        if record is None:
            return ""
        if record.way == "stuck":
            return (
                f"Moving the GPU memory of process {ref.pid} had begun and could not be ended; the "
                "driver has no way back from there. Restart the program."
            )
        if record.keeper_lives:
            return ""
        return (
            f"The process that kept the GPU memory of process {ref.pid} (its keeper, "
            f"{record.keeper_pid}) was killed, and the memory is lost with it. Restart the program."
        )

    def checkpoint(self, pid: int) -> None:
        ref = processes.ref_of(pid)
        if ref is not None and self._by_keeper(ref):
            return
        if ref is not None:
            self._keepers.forget(ref)  # what a dead one may have left: it is in the GPU
        self._driver.checkpoint(pid)

    def _by_keeper(self, ref: ProcessRef) -> bool:
        """False: nothing has begun. Raises ``GpuError`` where it may have, and failed."""
        if not self._may_begin(ref):
            return False
        reply = self._keepers.out(ref)
        if not isinstance(reply, Failed):
            return True
        if reply.begun:
            raise reply.error()
        log.warning("the driver moves what a keeper cannot", pid=ref.pid, why=reply.message)
        return False

    def restore(self, pid: int) -> None:
        """By the way that it went out, whatever was asked for meanwhile."""
        ref = processes.ref_of(pid)
        if ref is None or self._keepers.record(ref) is None:
            self._driver.restore(pid)
            return
        reply = self._keepers.bring_in(ref)
        if isinstance(reply, Failed):
            raise reply.error()
