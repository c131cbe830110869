"""What a daemon knows of its machine: the GPU, its free memory, the RAM, and the pager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError
from kiwi_core.movers import Movers, RemoteDriver, RemoteGpu
from kiwi_core.movers.remote import gpus
from kiwi_core.pager.checkpoint import CheckpointPager
from kiwi_core.pager.fitness import MIG, unfit, unreached
from kiwi_core.pager.sessions import SessionPager
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from kiwi_core.config import Config
    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Target
    from kiwi_core.pager.fitness import Unfit
    from kiwi_core.pager.linked import Linked, Links

    MakeRoom = Callable[[Target, int], Awaitable[None]]
    OtherRoots = Callable[[], Collection[ProcessRef]]


@dataclass
class Machine:
    """``fixed_budget_bytes`` is the admin's word on system RAM; ``None``: the machine is asked."""

    gpu: GpuInfo
    config: Config
    movers: Movers
    fixed_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        self._remote = RemoteGpu(self.movers, self.gpu.uuid, self.gpu.total_bytes)

    def pager(
        self,
        links: Links,
        *,
        make_room: MakeRoom,
        remember: Callable[[], None],
        other_roots: OtherRoots,
    ) -> SessionPager:
        def why_unfit(ref: ProcessRef) -> Unfit | None:
            its = next((link for link in links.everybody() if link.ref == ref), None)
            return self._unfit(ref, its)

        checkpoint = CheckpointPager(
            RemoteDriver(self.movers), self._remote, self.config,
            make_room=make_room, remember=remember, other_roots=other_roots, unfit=why_unfit,
        )  # fmt: skip
        return SessionPager(checkpoint, links, self.config)

    def _unfit(self, ref: ProcessRef, link: Linked | None) -> Unfit | None:
        """``link``: that of its library, if it was ever heard of."""
        unowned = link.told.unowned if link is not None else {}
        told = {kind for kind, amount in unowned.items() if amount}
        why = unfit(ref, self.gpu.driver_version, mig=self.gpu.mig, told=told)
        # A gate that was shut when its connection was lost stays so: the driver may have it.
        reached = link is not None and (
            link.connected or link.told.residency is not Residency.RESIDENT
        )
        return why or (None if reached else unreached(ref))

    def warnings(self) -> list[str]:
        """Return what keeps Kiwi from sharing this GPU fully, in sentences."""
        return [f"{MIG} Who fits runs; the others wait."] if self.gpu.mig else []

    async def free_bytes(self) -> int:
        return await self._remote.free_bytes()


async def this_machine(gpu_uuid: str, config: Config, fixed_budget_bytes: int | None) -> Machine:
    """Start the movers. Raises ``KiwiError`` where this machine cannot do it."""
    movers = Movers()
    movers.start()
    gpu = next((gpu for gpu in await gpus(movers) if gpu.uuid == gpu_uuid), None)
    if gpu is None:
        raise CallerError("no-such-gpu", f"There is no GPU {gpu_uuid} on this machine.")
    return Machine(gpu, config, movers, fixed_budget_bytes)
