"""Measure how long it takes to pin host memory, allocated by the driver or registered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kiwi_core.bench.work.hostmem import Mapped, in_threads, pieces
from kiwi_core.gpu import memory

if TYPE_CHECKING:
    from kiwi_core.gpu.memory import OwnGpu


def allocate(size_bytes: int, runs: int) -> list[float]:
    """Return the seconds of each ``cuMemHostAlloc``."""
    samples = []
    for _ in range(runs):
        at = time.perf_counter()
        address = memory.host_allocate(size_bytes)
        samples.append(time.perf_counter() - at)
        memory.host_free(address)
    return samples


def register(gpu: OwnGpu, size_bytes: int, threads: int, runs: int) -> list[float]:
    """Map memory with a request for huge pages; each thread touches and registers its part. Return
    the seconds for all of it, of each run."""
    return [_register_once(gpu, size_bytes, threads) for _ in range(runs)]


def _register_once(gpu: OwnGpu, size_bytes: int, threads: int) -> float:
    parts = pieces(size_bytes, threads)
    at = time.perf_counter()
    mapped = Mapped(size_bytes)
    done: list[int] = []

    def one(offset: int, size: int) -> None:
        gpu.enter()
        mapped.touch(offset, size)
        memory.host_register(mapped.address + offset, size)
        done.append(mapped.address + offset)

    try:
        in_threads(one, parts)
        return time.perf_counter() - at
    finally:
        for address in done:
            memory.host_unregister(address)
        mapped.close()
