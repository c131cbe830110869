"""Restores a process into room that is claimed first: allocated, freed, and used at once.

Free memory that NVML shows is not guaranteed. A program that allocates between the reading and the
restore makes the restore fail, which is permanent in the driver (NVIDIA/cuda-checkpoint#44).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver, memory
from kiwi_core.gpu.results import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_ROOM: Final = "no-room-to-claim"
"""The code of the error of a claim that failed: nothing was tried on the process."""


def claimed_restore(pid: int, gpu_uuid: str, claims_bytes: Sequence[int]) -> None:
    """Allocate the first possible size of ``claims_bytes``, free it, and restore ``pid`` at once.

    The claim needs a context, which stays until the restore has ended: to close it first would
    give other programs time to allocate. Raise ``GpuError``: ``NO_ROOM`` if no size can be
    allocated, else what ``driver.restore`` raises. If no context can be made for another reason (a
    GPU in exclusive mode), the restore is tried without a claim.
    """
    try:
        gpu = memory.open_gpu(gpu_uuid)
    except GpuError as error:
        if error.driver_code == OUT_OF_MEMORY:
            raise _no_room(claims_bytes[-1]) from error
        driver.restore(pid)
        return
    try:
        memory.free(_claimed(claims_bytes))
        driver.restore(pid)
    finally:
        gpu.close()


def _claimed(claims_bytes: Sequence[int]) -> int:
    """Allocate the first possible size and return its address."""
    for size_bytes in claims_bytes:
        try:
            return memory.allocate(size_bytes)
        except GpuError as error:
            if error.driver_code != OUT_OF_MEMORY:
                raise
    raise _no_room(claims_bytes[-1])


def _no_room(size_bytes: int) -> GpuError:
    return GpuError(
        NO_ROOM,
        f"The GPU showed enough free memory, but {size_bytes >> 20} MiB of it could not be had: "
        "programs outside Kiwi use it, too.",
        "Nothing is lost. Kiwi tries again.",
    )
