"""Virtual memory management as frameworks call it, for programs that run under the preloaded library; with the names of
``owner_calls``."""

from __future__ import annotations

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
