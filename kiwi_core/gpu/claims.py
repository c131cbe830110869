"""A restore into room that was claimed first: taken by an allocation, given up, and used at once.

Free memory that NVML shows is nobody's promise. A program that allocates between a look and a
restore makes the restore fail, and that is permanent in the driver (NVIDIA/cuda-checkpoint#44).
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
    """Allocate the first of ``claims_bytes`` that can be had, free it, and restore ``pid`` at once.

    The claim needs a context. It stays until the restore has ended, since to end it takes longer
    than others need to come in between. Raises ``GpuError``: ``NO_ROOM`` where nothing can be had,
    else what ``driver.restore`` raises. Where no context can be made for another reason (a GPU in
    exclusive mode), the restore is tried without a claim.
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
    """Return the address."""
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
