"""Small questions to a driver, each answered by a JSON line: what questions.py runs.

question_program.py GPU_BYTES       sizes above an eighth of GPU_BYTES are left out
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from job import check, say

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
SIZES_MIB = (2, 20, 64, 256, 1024, 16384)
REPEATED = 5
STACK_BYTES = (1024, 512, 0)
LARGE_BYTES = 1024 * MIB


class Asking:
    """A context, and the questions."""

    def __init__(self, gpu_bytes: int) -> None:
        from cuda.bindings import driver

        self.cu = driver
        self.most_bytes = gpu_bytes // 8
        check(driver.cuInit(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))

    def unmap_beside_a_copy(self) -> dict[str, Any]:
        """Does an unmap wait for a copy that runs elsewhere in the context? If so, each chunk that
        leaves makes a bubble in a page-out."""
        cu, size = self.cu, min(LARGE_BYTES, self.most_bytes)
        stream, host = check(cu.cuStreamCreate(1)), check(cu.cuMemHostAlloc(size, 0))
        source, mapped = check(cu.cuMemAlloc(size)), self._map(min(256 * MIB, size))
        began_s = time.perf_counter()
        check(cu.cuMemcpyDtoHAsync(host, source, size, stream))
        unmap_s = self._timed(lambda: check(cu.cuMemUnmap(*mapped)))
        runs_on = int(cu.cuStreamQuery(stream)[0]) != 0
        check(cu.cuStreamSynchronize(stream))
        copy_s = time.perf_counter() - began_s
        check(cu.cuMemFree(source))
        check(cu.cuMemFreeHost(host))
        check(cu.cuStreamDestroy(stream))
        return {
            "waits": not runs_on, "unmap_ms": round(unmap_s * 1e3, 3),
            "copy_ms": round(copy_s * 1e3, 3),
        }  # fmt: skip

    def stack_of_an_idle_context(self) -> dict[str, Any]:
        """Does a lower stack limit give memory of a live context back, and does it come again?"""
        cu, limit = self.cu, self.cu.CUlimit.CU_LIMIT_STACK_SIZE
        before = self._free()
        found: dict[str, Any] = {}
        for size in STACK_BYTES:
            code = int(cu.cuCtxSetLimit(limit, size)[0])
            found[f"{size} bytes"] = {"code": code, "freed_mib": (self._free() - before) / MIB}
        back_s = self._timed(lambda: cu.cuCtxSetLimit(limit, STACK_BYTES[0]))
        found["back"] = {"ms": round(back_s * 1e3, 3), "freed_mib": (self._free() - before) / MIB}
        return found

    def virtual_memory(self) -> dict[str, Any]:
        """What does each call of virtual memory cost, by size, with what frameworks ask for?"""
        kinds = {"plain": self._prop(), "rdma": self._prop(), "descriptor": self._prop()}
        kinds["rdma"].allocFlags.gpuDirectRDMACapable = 1
        handle = self.cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        kinds["descriptor"].requestedHandleTypes = handle
        return {
            f"{mib} MiB, {name}": self._costs(mib * MIB, prop)
            for mib in SIZES_MIB
            if mib * MIB <= self.most_bytes
            for name, prop in kinds.items()
        }

    # --- helpers --------------------------------------------------------------------------------

    def _costs(self, size: int, prop: Any) -> dict[str, float]:
        cu = self.cu
        took_s: dict[str, list[float]] = {}

        def add(name: str, call: Callable[[], Any]) -> Any:
            began_s = time.perf_counter()
            result = call()
            took_s.setdefault(name, []).append(time.perf_counter() - began_s)
            return check(result)

        at = int(check(cu.cuMemAddressReserve(size, 0, 0, 0)))
        for _ in range(REPEATED):
            memory = add("create", lambda: cu.cuMemCreate(size, prop, 0))
            add("map", lambda memory=memory: cu.cuMemMap(at, size, 0, memory, 0))
            add("access", lambda: cu.cuMemSetAccess(at, size, [self._access()], 1))
            add("unmap", lambda: cu.cuMemUnmap(at, size))
            add("release", lambda memory=memory: cu.cuMemRelease(memory))
        check(cu.cuMemAddressFree(at, size))
        return {
            name: round(sorted(all_s)[REPEATED // 2] * 1e6, 1) for name, all_s in took_s.items()
        }

    def _map(self, size: int) -> tuple[int, int]:
        cu = self.cu
        at = int(check(cu.cuMemAddressReserve(size, 0, 0, 0)))
        memory = check(cu.cuMemCreate(size, self._prop(), 0))
        check(cu.cuMemMap(at, size, 0, memory, 0))
        check(cu.cuMemSetAccess(at, size, [self._access()], 1))
        check(cu.cuMemRelease(memory))
        return at, size

    def _prop(self) -> Any:
        cu = self.cu
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = 0
        return prop

    def _access(self) -> Any:
        cu = self.cu
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _free(self) -> int:
        return int(check(self.cu.cuMemGetInfo())[0])

    def _timed(self, call: Callable[[], Any]) -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s


def main() -> int:
    asking = Asking(int(sys.argv[1]))
    for ask in (asking.unmap_beside_a_copy, asking.stack_of_an_idle_context, asking.virtual_memory):
        try:
            say(question=ask.__name__, answer=ask())
        except Exception as error:  # noqa: BLE001 - it is the answer
            say(question=ask.__name__, failed=f"{type(error).__name__}: {error}"[:300])
    return 0


if __name__ == "__main__":
    sys.exit(main())
