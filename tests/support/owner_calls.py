"""Inside a program that runs under the preloaded library: what only tests call of it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

MIB = 1 << 20
LEAF = 2 * MIB
KEY_BYTES = 40_992
WITHIN_NS = 20_000_000_000
FAULTS = ("create", "map", "unmap", "copy_out", "copy_in", "pin", "host", "stall", "hash")
KINDS = ("pool", "managed", "array", "vmm", "ipc", "graph", "external", "legacy", "gpu", "plain")
library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
library.kiwi_preload_test_check.restype = ctypes.c_char_p
library.kiwi_preload_test_ptx.restype = ctypes.c_char_p
library.kiwi_preload_test_clean.restype = ctypes.c_int64
library.kiwi_preload_passed.restype = ctypes.c_uint64


class CudaError(Exception):
    """Its text is the result's name."""


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
    names = ("owned", "resident", "out", "kept", *unowned, "overhead")
    return _numbers(library.kiwi_preload_test_books, names)


def arena() -> dict[str, int]:
    names = ("pinned", "pageable", "used", "limit", "refused")
    return _numbers(library.kiwi_preload_test_arena_books, names)


def moved() -> dict[str, int]:
    names = ("copied", "skipped", "verified", "differed", "unused")
    return _numbers(library.kiwi_preload_test_move_books, names)


def check() -> None:
    """The books are what the table says."""
    assert (wrong := library.kiwi_preload_test_check()) == b"", wrong


def page(function: Any, within_ns: int, *size: ctypes.c_uint64) -> str:
    """ "moved", or the reason and words of a refusal."""
    words = ctypes.create_string_buffer(400)
    what = function(ctypes.c_int64(within_ns), words, ctypes.c_size_t(400), *size)
    return "moved" if what == 0 else ("", "refused ", "lost ")[what] + words.value.decode()


def out(within_ns: int = WITHIN_NS, least: int = 0) -> str:
    """All of it, or at least so many bytes."""
    return page(library.kiwi_preload_test_out, within_ns, ctypes.c_uint64(least))


def back(within_ns: int = WITHIN_NS) -> str:
    """Bring all of it in, and open the gate."""
    return page(library.kiwi_preload_test_in, within_ns)


def clean_slice(most: int) -> tuple[int, bool]:
    """Of background cleaning: the bytes copied (-1: refused), and whether there is more."""
    more = ctypes.c_int()
    size, within = ctypes.c_uint64(most), ctypes.c_int64(WITHIN_NS)
    copied = int(library.kiwi_preload_test_clean(size, within, ctypes.byref(more)))
    return copied, bool(more)


def clean() -> int:
    """All of it at once."""
    copied, more = clean_slice(1 << 40)
    assert not more
    return copied


def swap() -> None:
    for way in (out, back):
        assert (said := way()) == "moved", said
    check()


def passed() -> int:
    return int(library.kiwi_preload_passed())


def unused(*ranges: tuple[int, int], since: int | None = None) -> bool:
    """Says that nobody will read these (address, size); whether the library takes it."""
    columns = zip(*ranges, strict=True)
    addresses, sizes = ((ctypes.c_uint64 * len(ranges))(*column) for column in columns)
    token = ctypes.c_uint64(passed() if since is None else since)
    count = ctypes.c_size_t(len(ranges))
    return bool(library.kiwi_preload_free_ranges(token, count, addresses, sizes))


def fault(kind: str, skip: int = 0, count: int = 1) -> None:
    library.kiwi_preload_test_fault(FAULTS.index(kind), skip, count)


def prepare(limit: int = 2**63) -> None:
    """Pins and loads the hash in the background, as when a daemon is there."""
    library.kiwi_preload_test_arena(1, ctypes.c_uint64(limit))


def until(what: Any, said: str, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, said
        time.sleep(0.01)


def until_hashing() -> None:
    until(library.kiwi_preload_test_hashing, "no hash was loaded")


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
    """Every question about any byte of it tells the allocation as it was asked for."""
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
    """Random allocations, frees and writes across page-outs and page-ins; how often it swapped."""
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
                    drop(held.pop(rng.randrange(len(held))))  # while it is out
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


class Stuck:
    """A host function that ends when it is told to: the GPU is busy for as long."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._wait())
        self._stream = ck(driver.cuStreamCreate(1))
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        ck(driver.cuLaunchHostFunc(self._stream, driver.CUhostFn(address), 0))

    def _wait(self) -> None:
        self._go.wait(60)

    def end(self) -> None:
        self._go.set()
        ck(driver.cuStreamSynchronize(self._stream))


def device_hash(data: bytes, keys: bytes) -> list[tuple[int, int]]:
    """What the library's PTX (on the emulator: its built-in kernel) makes of whole leaves."""
    module = ck(driver.cuModuleLoadData(library.kiwi_preload_test_ptx() + b"\0"))
    function = ck(driver.cuModuleGetFunction(module, b"kiwi_hash_leaves"))
    n = len(data) // LEAF
    at, digests, key = (int(ck(driver.cuMemAlloc(size))) for size in (len(data), 16 * n, len(keys)))
    ck(driver.cuMemcpyHtoD(at, data, len(data)))
    ck(driver.cuMemcpyHtoD(key, keys, len(keys)))
    types = (ctypes.c_uint64,) * 3
    ck(driver.cuLaunchKernel(function, n, 1, 1, 256, 1, 1, 0, 0, ((at, digests, key), types), 0))
    answer = (ctypes.c_uint64 * (2 * n))()
    ck(driver.cuMemcpyDtoH(answer, digests, 16 * n))
    for address in (at, digests, key):
        ck(driver.cuMemFree(address))
    return [(answer[2 * i], answer[2 * i + 1]) for i in range(n)]


def cpu_hash(leaf: bytes, keys: bytes) -> tuple[int, int]:
    answer = (ctypes.c_uint64 * 2)()
    aligned = ctypes.create_string_buffer(KEY_BYTES + 16)
    where = (ctypes.addressof(aligned) + 15) // 16 * 16
    ctypes.memmove(where, keys, KEY_BYTES)
    library.kiwi_preload_test_hash(leaf, ctypes.c_void_p(where), answer)
    return answer[0], answer[1]


def random_keys(seed: int) -> bytes:
    rng = random.Random(seed)
    second = b"".join(rng.randrange(2**61 - 1).to_bytes(8, "little") for _ in range(4096))
    return rng.randbytes(2056 * 4) + second
