"""The role that looks at the machine and moves other processes' memory, as a daemon does."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver, host, nvml, processes
from kiwi_core.pager.api import Moved, Target
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from kiwi_core.bench.blocking import BlockingPager


class Paging:
    ENDS_WITHIN_S = 60.0
    """Includes the time to bring back what it has paged out, because nobody else would."""

    def __init__(self) -> None:
        self._pager: BlockingPager | None = None
        self._out: dict[int, Target] = {}

    def gpus(self) -> list[dict[str, Any]]:
        return [asdict(gpu) for gpu in nvml.gpus()]

    def memory(self, uuid: str) -> dict[str, Any]:
        """Return the free bytes of the GPU and of the host, and how much others use."""
        gpu = nvml.memory(uuid)
        users = nvml.processes(uuid)
        return {
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "used_bytes": gpu.used_bytes,
            "users": {str(pid): size for pid, size in users.items()},
            "host_available_bytes": host.available_host_bytes(),
        }

    def why_no_checkpoint(self) -> str:
        """Return why there are no checkpoint calls; empty if the driver has them."""
        return driver.capabilities().why_not

    def start(self, pager: str, uuid: str) -> None:
        """Make the pager ``pager``, which is ``module:class``."""
        module, _, name = pager.partition(":")
        self._pager = getattr(import_module(module), name)(uuid)

    def page_out(self, pid: int, timeout_s: float) -> dict[str, float]:
        target = self._target(pid)
        self._out[pid] = target
        return self._move("page_out", target, timeout_s)

    def page_in(self, pid: int, timeout_s: float) -> dict[str, float]:
        moved = self._move("page_in", self._target(pid), timeout_s)
        del self._out[pid]
        return moved

    def _target(self, pid: int) -> Target:
        if (target := self._out.get(pid)) is not None:
            return target
        ref = processes.ref_of(pid)
        if ref is None:
            raise GpuError("no-such-process", f"Process {pid} has ended.")
        return Target(SessionId("bench"), ref)

    def _move(self, what: str, target: Target, timeout_s: float) -> dict[str, float]:
        assert self._pager is not None
        deadline_ns = time.monotonic_ns() + round(timeout_s * 1e9)
        began = time.perf_counter()
        outcome = getattr(self._pager, what)(target, deadline_ns)
        took_s = time.perf_counter() - began
        if not isinstance(outcome, Moved):
            way = "out" if what == "page_out" else "in"
            raise GpuError("not-moved", f"Memory did not go {way}: {outcome.detail}")
        return {"bytes": outcome.bytes_moved, "seconds": took_s}

    def close(self) -> None:
        if self._pager is None:
            return
        for target in list(self._out.values()):
            self._pager.page_in(target, time.monotonic_ns() + 30 * 10**9)
        self._pager.close()
