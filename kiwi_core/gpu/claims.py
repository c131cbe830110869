"""Restores a process into room that is claimed first: allocated, freed, and used at once.

Free memory that NVML shows is not guaranteed. A program that allocates between the reading and the
restore makes the restore fail, which is permanent in the driver (NVIDIA/cuda-checkpoint#44).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver, memory, nvml
from kiwi_core.gpu.results import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_ROOM: Final = "no-room-to-claim"
"""The code of the error of a claim that failed: nothing was tried on the process."""

_CLOSED_WITHIN_S: Final = 0.5
"""Time for the memory of a closed context to show up as free, which happens at once as a rule."""
_POLL_S: Final = 0.002


def claimed_restore(pid: int, gpu_uuid: str, claims_bytes: Sequence[int]) -> None:
    """Allocate the first possible size of ``claims_bytes``, free it, and restore ``pid`` at once.

    The claim needs a context, which stays until the restore has ended: to close it first would
    give other programs time to allocate. But where a process filled all that other programs left,
    the context itself is in its way. Then it is closed, and the restore follows at once if NVML
    reports the last size as free. Raise ``GpuError``: ``NO_ROOM`` if there is no room, else what
    ``driver.restore`` raises. If no context can be made for another reason (a GPU in exclusive
    mode), the restore is tried without a claim.
    """
    least_bytes = claims_bytes[-1]
    try:
        gpu = memory.open_gpu(gpu_uuid)
    except GpuError as error:
        if error.driver_code == OUT_OF_MEMORY:
            raise _no_room(least_bytes) from error
        driver.restore(pid)
        return
    try:
        address = _claimed(claims_bytes)
        if address is not None:
            memory.free(address)
            driver.restore(pid)
            return
        if _free_bytes(gpu_uuid, least_bytes) >= least_bytes:
            raise _no_room(least_bytes)  # what NVML reports as free cannot be had
    finally:
        gpu.close()
    _wait_until_free(gpu_uuid, least_bytes)
    driver.restore(pid)


def _wait_until_free(gpu_uuid: str, size_bytes: int) -> None:
    """Wait until NVML counts the closed context as free. Raise ``NO_ROOM`` if that is not
    enough."""
    until_s = time.monotonic() + _CLOSED_WITHIN_S
    while _free_bytes(gpu_uuid, size_bytes) < size_bytes:
        if time.monotonic() > until_s:
            raise _no_room(size_bytes)
        time.sleep(_POLL_S)


def _free_bytes(gpu_uuid: str, size_bytes: int) -> int:
    """Return what NVML says is free. Raise ``NO_ROOM`` for ``size_bytes`` if it says nothing: an
    error of NVML must not look like one of the restore."""
    try:
        return nvml.memory(gpu_uuid).free_bytes
    except GpuError as error:
        raise _no_room(size_bytes) from error


def _claimed(claims_bytes: Sequence[int]) -> int | None:
    """Allocate the first possible size and return its address; ``None`` if none is possible."""
    for size_bytes in claims_bytes:
        try:
            return memory.allocate(size_bytes)
        except GpuError as error:
            if error.driver_code != OUT_OF_MEMORY:
                raise
    return None


def _no_room(size_bytes: int) -> GpuError:
    return GpuError(
        NO_ROOM,
        f"The GPU showed enough free memory, but {size_bytes >> 20} MiB of it could not be had: "
        "programs outside Kiwi use it, too.",
        "Nothing is lost. Kiwi tries again.",
    )
