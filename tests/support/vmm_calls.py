"""Virtual memory management as frameworks call it, for programs that run under the preloaded
library; with the names of ``owner_calls``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from cuda.bindings import driver
from owner_calls import MIB, Allocation, ck, write

FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
NONE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


def prop(device: int = 0) -> driver.CUmemAllocationProp:
    """Ask for a descriptor, too, as JAX and PyTorch always do."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = FD
    return wanted


def create(size: int) -> int:
    return int(ck(driver.cuMemCreate(size, prop(), 0)))


def reserve(size: int) -> int:
    return int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))


def map_at(at: int, size: int, handle: int) -> None:
    ck(driver.cuMemMap(at, size, 0, handle, 0))


def unmap(at: int, size: int) -> None:
    ck(driver.cuMemUnmap(at, size))


def release(handle: int) -> None:
    ck(driver.cuMemRelease(handle))


def access(at: int, size: int, how: driver.CUmemAccess_flags = READ_WRITE) -> None:
    one = driver.CUmemAccessDesc()
    one.location.type = DEVICE
    one.location.id = 0
    one.flags = how
    ck(driver.cuMemSetAccess(at, size, [one], 1))


def may(at: int) -> int:
    where = driver.CUmemLocation()
    where.type = DEVICE
    where.id = 0
    return int(ck(driver.cuMemGetAccess(where, at)))


@dataclass
class Held(Allocation):
    handle: int = 0


def xla(size: int, seed: int) -> Held:
    """Allocate as XLA does: a handle and a range each, kept until the end."""
    handle, at = create(size), reserve(size)
    map_at(at, size, handle)
    access(at, size)
    held = Held(at, size, "", handle)
    write(held, seed)
    return held


def xla_free(a: Held) -> None:
    ck(driver.cuCtxSynchronize())
    unmap(a.address, a.size)
    ck(driver.cuMemAddressFree(a.address, a.size))
    release(a.handle)


@dataclass
class Segment:
    """One of PyTorch's expandable segments: a large range, a handle for each step of it."""

    step: int = 4 * MIB
    room: int = 16
    at: int = 0
    handles: dict[int, int] = field(default_factory=dict)

    def grow(self, first: int, last: int, seed: int) -> Allocation:
        self.at = self.at or reserve(self.room * self.step)
        for i in range(first, last):
            self.handles[i] = create(self.step)
        for i in range(first, last):
            map_at(self.at + i * self.step, self.step, self.handles[i])
        start, size = self.at + first * self.step, (last - first) * self.step
        access(start, size)
        return write(Allocation(start, size, ""), seed)

    def shrink(self, *steps: int) -> None:
        for i in steps:
            unmap(self.at + i * self.step, self.step)
            release(self.handles.pop(i))

    def end(self) -> None:
        self.shrink(*self.handles)
        ck(driver.cuMemAddressFree(self.at, self.room * self.step))


def export(handle: int) -> int:
    """Return a descriptor that stands for the memory."""
    return int(ck(driver.cuMemExportToShareableHandle(handle, FD, 0)))


def import_from(pid: int, descriptor: int, size: int) -> Allocation:
    """Map memory that another process has exported."""
    mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    handle = int(ck(driver.cuMemImportFromShareableHandle(mine, FD)))
    os.close(mine)
    at = reserve(size)
    map_at(at, size, handle)
    access(at, size)
    return Allocation(at, size, "")


def sync_memops(at: int, on: int = 1) -> None:
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    ck(driver.cuPointerSetAttribute(on, attribute, at))


def dma_buf(at: int, size: int) -> int:
    dma = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(ck(driver.cuMemGetHandleForAddressRange(at, size, dma, 0)))


def team(size: int) -> int:
    """Make a multicast object with one device."""
    wanted = driver.CUmulticastObjectProp()
    wanted.numDevices = 1
    wanted.size = size
    group = int(ck(driver.cuMulticastCreate(wanted)))
    ck(driver.cuMulticastAddDevice(group, 0))
    return group


def map_into_array(handle: int) -> str:
    """Return the name of the driver's answer to a sparse array's mapping of the memory."""
    one = driver.CUarrayMapInfo()
    one.memOperationType = driver.CUmemOperationType.CU_MEM_OPERATION_TYPE_MAP
    one.memHandleType = driver.CUmemHandleType.CU_MEM_HANDLE_TYPE_GENERIC
    one.memHandle.memHandle = driver.CUmemGenericAllocationHandle(handle)
    return str(driver.cuMemMapArrayAsync([one], 1, 0)[0].name)
