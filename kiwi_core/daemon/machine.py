"""What a daemon knows of its machine: the GPU, its free memory, the RAM, and the pager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError
from kiwi_core.gpu import driver, host, nvml
from kiwi_core.pager.checkpoint import CheckpointPager
from kiwi_core.pager.fitness import unfit
from kiwi_core.pager.inprocess import InProcessPager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.fitness import Unfit
    from kiwi_core.pager.linked import Links

    Remember = Callable[[Target, Mapping[ProcessRef, int]], None]
    OtherRoots = Callable[[], Collection[ProcessRef]]


@dataclass
class Machine:
    """``fixed_budget_bytes`` is the admin's word on system RAM; ``None``: the machine is asked."""

    gpu: GpuInfo
    config: Config
    fixed_budget_bytes: int | None = None

    def pager(self, remember: Remember, other_roots: OtherRoots, links: Links) -> InProcessPager:
        def why_unfit(ref: ProcessRef) -> Unfit | None:
            told = {
                kind
                for link in links.everybody()
                if link.ref == ref
                for kind, amount in link.told.unowned.items()
                if amount
            }
            return unfit(ref, self.gpu.driver_version, gpu_uuid=self.gpu.uuid, told=told)

        checkpoint = CheckpointPager(
            self.gpu.uuid, self.config, remember=remember, other_roots=other_roots, unfit=why_unfit
        )
        return InProcessPager(checkpoint, links, checkpoint.room, self.config)

    def free_bytes(self) -> int:
        return nvml.memory(self.gpu.uuid).free_bytes

    def host_budget_bytes(self, paged_out_bytes: int, reclaimable_bytes: int = 0) -> int:
        """How much all paged-out memory together may take, ``paged_out_bytes`` included.
        ``reclaimable_bytes``: what is taken, but would be given back for it."""
        if self.fixed_budget_bytes is not None:
            return self.fixed_budget_bytes
        taken_bytes = paged_out_bytes + reclaimable_bytes
        return host.host_budget_bytes(self.config.host_reserve_bytes, taken_bytes)

    def host_left_bytes(self, paged_out_bytes: int, reclaimable_bytes: int) -> int:
        """How much of that nobody has taken."""
        if self.fixed_budget_bytes is not None:
            return max(0, self.fixed_budget_bytes - paged_out_bytes - reclaimable_bytes)
        return host.host_budget_bytes(self.config.host_reserve_bytes)


def this_machine(gpu_uuid: str, config: Config, fixed_budget_bytes: int | None) -> Machine:
    """Initialises the driver. Raises ``KiwiError`` where this machine cannot do it."""
    driver.warm_up()
    gpu = next((gpu for gpu in nvml.gpus() if gpu.uuid == gpu_uuid), None)
    if gpu is None:
        raise CallerError("no-such-gpu", f"There is no GPU {gpu_uuid} on this machine.")
    return Machine(gpu, config, fixed_budget_bytes)
