"""Virtual memory management: addresses, physical memory and access as three separate things.

See ``memory`` for which GPU this is and how errors are raised. Sizes are multiples of
``granularity``. Unmapping does not reliably wait for work in progress: synchronise first.

Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiwi_core.gpu.memory import call, cuda

if TYPE_CHECKING:
    from kiwi_core.gpu.memory import OwnGpu


def granularity(gpu: OwnGpu) -> int:
    """Return the smallest size that can be created (2 MiB on all known GPUs)."""
    least = cuda().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    what = "asking for the granularity"
    return int(call(what, cuda().cuMemGetAllocationGranularity, _properties(gpu), least))


def reserve(size_bytes: int) -> int:
    """Reserve addresses without memory behind them."""
    return int(call("reserving addresses", cuda().cuMemAddressReserve, size_bytes, 0, 0, 0))


def unreserve(address: int, size_bytes: int) -> None:
    call("giving addresses back", cuda().cuMemAddressFree, address, size_bytes)


class Creator:
    """Creates and maps physical memory of one GPU. It builds the arguments ahead, so that
    measurements time only the driver's calls."""

    def __init__(self, gpu: OwnGpu) -> None:
        self._properties = _properties(gpu)
        self._access = _read_write(gpu)

    def create(self, size_bytes: int) -> Any:
        return call("creating memory", cuda().cuMemCreate, size_bytes, self._properties, 0)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        call("mapping memory", cuda().cuMemMap, address, size_bytes, 0, handle, 0)

    def set_access(self, address: int, size_bytes: int) -> None:
        call("setting access", cuda().cuMemSetAccess, address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        call("unmapping memory", cuda().cuMemUnmap, address, size_bytes)

    def release(self, handle: Any) -> None:
        call("releasing memory", cuda().cuMemRelease, handle)


def _properties(gpu: OwnGpu) -> Any:
    properties = cuda().CUmemAllocationProp()
    properties.type = cuda().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = gpu.device
    return properties


def _read_write(gpu: OwnGpu) -> Any:
    access = cuda().CUmemAccessDesc()
    access.location.type = cuda().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.device
    access.flags = cuda().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
