"""A daemon's knowledge of its machine: the GPU, its memory, and the RAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError, GpuError
from kiwi_core.movers.driver_calls import RemoteGpu, gpus, why_no_moves
from kiwi_core.movers.pool import MoverPool
from kiwi_core.pager.unmovable import MIG, WhyUnmovable, unreached, why_unmovable
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.linked import LinkedProcesses


@dataclass(frozen=True)
class Machine:
    """``memory`` is the GPU's. ``fixed_budget_bytes`` is the admin's budget of system RAM;
    ``None``: the machine's state decides. ``lacks`` says what the driver or its bindings lack for
    moving memory out and back in; "": nothing."""

    gpu: GpuInfo
    movers: MoverPool
    memory: RemoteGpu
    fixed_budget_bytes: int | None = None
    lacks: str = ""

    def why_not_to_move(self, links: LinkedProcesses, ref: ProcessRef) -> WhyUnmovable | None:
        """Return why the driver must not move ``ref``, or ``None``. What a library reported before
        its connection was lost counts, too.
        """
        link = next((link for link in links.everybody() if link.ref == ref), None)
        unowned = link.report.unowned if link is not None else {}
        reported = {kind for kind, amount in unowned.items() if amount}
        if self.lacks:
            return WhyUnmovable(self.lacks, "`kiwi doctor` shows what to install.")
        why = why_unmovable(ref, self.gpu.driver_version, mig=self.gpu.mig, reported=reported)
        # A gate that was shut when its connection was lost stays shut: the driver may move it.
        reached = link is not None and (
            link.connected or link.report.residency is not Residency.RESIDENT
        )
        return why or (None if reached else unreached(ref))

    def warnings(self) -> list[str]:
        """Return what keeps Kiwi from sharing this GPU fully, in sentences."""
        some = "Programs that fit run; the others wait."
        found = [f"{MIG} {some}"] if self.gpu.mig else []
        if self.lacks:
            found.append(f"The driver moves no memory here: {self.lacks} {some}")
        return found


async def this_machine(gpu_uuid: str, fixed_budget_bytes: int | None) -> Machine:
    """Start the movers. Raise ``KiwiError`` if this machine cannot run them."""
    movers = MoverPool()
    movers.start()
    gpu = next((gpu for gpu in await gpus(movers) if gpu.uuid == gpu_uuid), None)
    if gpu is None:
        raise CallerError("no-such-gpu", f"There is no GPU {gpu_uuid} on this machine.")
    memory = RemoteGpu(movers, gpu.uuid, gpu.total_bytes)
    try:
        lacks = await why_no_moves(movers)
    except GpuError:
        lacks = ""  # nobody knows; each page-out meets the same error, and says so
    return Machine(gpu, movers, memory, fixed_budget_bytes, lacks)
