"""Functions of the preloaded library that only tests call, for programs that run under it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import time
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

MIB = 1 << 20
WITHIN_NS = 20_000_000_000
FAULTS = (
    "create",
    "map",
    "unmap",
    "copy_out",
    "copy_in",
    "pin",
    "host",
    "stall",
    "reserve",
    "access",
    "pages",
)
KINDS = ("pool", "managed", "array", "vmm", "ipc", "graph", "external", "legacy", "gpu", "plain")
library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
library.kiwi_preload_test_check.restype = ctypes.c_char_p


class CudaError(Exception):
    """A failed call; the text is the result's name."""


def ck(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise CudaError(result[0].name)
    return result[1] if len(result) == 2 else result[1:] or None


def _numbers(function: Any, names: tuple[str, ...]) -> dict[str, int]:
    values = (ctypes.c_uint64 * len(names))()
    function(values)
    return dict(zip(names, values, strict=True))


def books() -> dict[str, int]:
    unowned = tuple(f"unowned_{kind}" for kind in KINDS)
    names = ("owned", "resident", "out", *unowned, "overhead", "driven", "shared")
    return _numbers(library.kiwi_preload_test_books, names)


def arena() -> dict[str, int]:
    names = ("pinned", "pageable", "used", "refused")
    return _numbers(library.kiwi_preload_test_arena_books, names)


def check() -> None:
    """Check that the books agree with the table."""
    assert (wrong := library.kiwi_preload_test_check()) == b"", wrong


def page(function: Any, within_ns: int) -> str:
    """Return "moved", or the reason and the detail of a refusal or a loss."""
    words = ctypes.create_string_buffer(400)
    what = function(ctypes.c_int64(within_ns), words, ctypes.c_size_t(400))
    return "moved" if what == 0 else ("", "refused ", "lost ")[what] + words.value.decode()


def out(within_ns: int = WITHIN_NS) -> str:
    """Page all memory out."""
    return page(library.kiwi_preload_test_out, within_ns)


def back(within_ns: int = WITHIN_NS) -> str:
    """Page all memory in, and open the gate."""
    return page(library.kiwi_preload_test_in, within_ns)


def swap() -> None:
    for way in (out, back):
        assert (said := way()) == "moved", said
    check()


def fault(kind: str, skip: int = 0, count: int = 1) -> None:
    library.kiwi_preload_test_fault(FAULTS.index(kind), skip, count)


def arm() -> None:
    """Take the lease away, as the daemon does."""
    library.kiwi_preload_test_arm(1)


def disarm() -> None:
    """Give it back. What was copied ahead is of no use any more."""
    library.kiwi_preload_test_arm(0)
    forget()


def ahead() -> bool:
    """Copy memory ahead of a page-out; return whether all was copied."""
    return bool(library.kiwi_preload_test_ahead())


def forget() -> None:
    """Give up the copies that were made ahead."""
    library.kiwi_preload_test_forget()


def prepare() -> None:
    """Pin host memory in the background, as with a daemon."""
    library.kiwi_preload_test_arena(1)


def allow(size_bytes: int = 2**64 - 1) -> None:
    """Limit the memory that is held in advance, as a daemon does."""
    library.kiwi_preload_test_allow(ctypes.c_uint64(size_bytes))


def machine_has(size_bytes: int) -> None:
    """Limit the RAM that the library can get from the machine."""
    library.kiwi_preload_test_machine(ctypes.c_uint64(size_bytes))


def until(what: Any, said: str, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, said
        time.sleep(0.01)


@dataclass
class Allocation:
    address: int
    size: int
    digest: str


def make(size: int, seed: int) -> Allocation:
    address = int(ck(driver.cuMemAlloc(size)))
    return write(Allocation(address, size, ""), seed)


def write(a: Allocation, seed: int, offset: int = 0, size: int = 0) -> Allocation:
    data = random.Random(seed).randbytes(size or a.size)
    ck(driver.cuMemcpyHtoD(a.address + offset, data, len(data)))
    a.digest = now(a)
    return a


def now(a: Allocation) -> str:
    data = bytearray(a.size)
    ck(driver.cuMemcpyDtoH(data, a.address, a.size))
    return hashlib.sha256(data).hexdigest()


def same(*allocations: Allocation) -> None:
    for a in allocations:
        assert now(a) == a.digest, f"{a.size} bytes at {a.address:#x} are not what was written"


def drop(a: Allocation) -> None:
    ck(driver.cuMemFree(a.address))


def ranges(a: Allocation) -> None:
    """Check that every question about any byte of the allocation returns its requested range."""
    attribute = driver.CUpointer_attribute
    for offset in {0, a.size // 2, a.size - 1}:
        base, size = ck(driver.cuMemGetAddressRange(a.address + offset))
        assert (int(base), size) == (a.address, a.size)
        start = ck(
            driver.cuPointerGetAttribute(
                attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, a.address + offset
            )
        )
        length = ck(
            driver.cuPointerGetAttribute(
                attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, a.address + offset
            )
        )
        assert (int(start), int(length)) == (a.address, a.size)


def stress(seed: int, steps: int) -> int:
    """Make random allocations, frees and writes across page-outs and page-ins; return the number of
    swaps."""
    rng = random.Random(seed)
    held: list[Allocation] = []
    swaps = 0
    for step in range(steps):
        kind = rng.random()
        if kind < 0.45 and len(held) < 40:
            size = rng.choice((1, 100, 512, 5000, 70_000, MIB, 3 * MIB, 9 * MIB + 5))
            held.append(make(rng.randint(1, size), step))
        elif kind < 0.65 and held:
            drop(held.pop(rng.randrange(len(held))))
        elif kind < 0.85 and held:
            write(rng.choice(held), step)
        else:
            said = out()
            assert said == "moved", said
            for _ in range(rng.randrange(3)):
                if held:
                    drop(held.pop(rng.randrange(len(held))))  # while the memory is out
            said = back()
            assert said == "moved", said
            same(*held)
            check()
            swaps += 1
    for a in held:
        ranges(a)
        drop(a)
    check()
    assert books()["owned"] == 0, books()
    return swaps
