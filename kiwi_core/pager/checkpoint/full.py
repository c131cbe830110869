"""A GPU that is so full that the driver cannot move memory out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.gpu.results import OUT_OF_MEMORY
from kiwi_core.pager.api import Refused
from kiwi_core.pager.checkpoint.ports import Stop
from kiwi_core.pager.checkpoint.unmovable import OfPrograms
from kiwi_core.states import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_core.config import Config
    from kiwi_core.errors import GpuError
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.checkpoint.ports import GpuReadings

# The text has no figure: the user would get a notice at each change of it.
_FULL: Final = Refused(
    Reason.NO_ROOM,
    "The GPU is full to the last megabytes, and the driver needs some tens of MiB of free GPU "
    "memory to move a program's memory out. Free some GPU memory (in PyTorch: "
    "torch.cuda.empty_cache()), or end a program that uses the GPU; Kiwi tries again.",
)


class FullGpu:
    """Checkpoints that the driver refused because hardly any GPU memory was free.

    With less than 2 MiB free, an H200 (driver 580.159.04) answered OUT_OF_MEMORY after 4 s and left
    the process locked and unharmed. With about 65 MiB free it moved a process out.
    """

    def __init__(self, gpu: GpuReadings, config: Config) -> None:
        self._gpu = gpu
        self._config = config
        self._too_few_bytes = OfPrograms[int]()
        """How much was free when the checkpoint of each program was refused."""

    async def check(self, refs: Iterable[ProcessRef]) -> None:
        """Raise ``Stop`` if the driver has refused one of ``refs`` with as much free memory as now:
        an attempt stops the program for seconds. Raises ``GpuError`` if NVML fails.
        """
        known = [self._too_few_bytes.get(ref) for ref in refs]
        too_few_bytes = [size for size in known if size is not None]
        if too_few_bytes and await self._gpu.free_bytes() <= max(too_few_bytes):
            raise Stop(_FULL)

    def refused(
        self, ref: ProcessRef, error: GpuError, frees_bytes: Iterable[int | None]
    ) -> Refused | None:
        """Record that the driver answered ``error`` to a checkpoint of ``ref``. Return a refusal if
        that was for lack of GPU memory. ``frees_bytes`` was free before and after; ``None``: it
        could not be read."""
        free_bytes = min((read for read in frees_bytes if read is not None), default=None)
        if error.driver_code != OUT_OF_MEMORY or free_bytes is None:
            return None
        if free_bytes >= self._needs_bytes():
            return None
        self._too_few_bytes.put(ref, free_bytes)
        return _FULL

    def moved(self, ref: ProcessRef) -> None:
        """Forget the refusals of ``ref``, which has been moved out."""
        self._too_few_bytes.drop(ref)

    def _needs_bytes(self) -> int:
        share_bytes = self._gpu.total_bytes() // self._config.checkpoint_room_share
        return min(self._config.checkpoint_room_bytes, share_bytes)
