"""Measure how long each call of virtual memory management takes, by size."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.gpu import memory, vmm

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.memory import OwnGpu

T = TypeVar("T")

RUNS_MIN: Final = 3


def measure(gpu: OwnGpu, size_bytes: int, seconds: float, runs_max: int) -> dict[str, list[float]]:
    """Repeat the five calls that bring memory to an address and take it away, for ``seconds``.
    Return how long each took, in seconds. Only one handle exists at a time."""
    found: dict[str, list[float]] = {
        name: [] for name in ("create", "map", "set_access", "unmap", "release")
    }
    creator = vmm.Creator(gpu)
    address = vmm.reserve(size_bytes)
    try:
        began = time.perf_counter()
        while len(found["release"]) < runs_max and (
            len(found["release"]) < RUNS_MIN or time.perf_counter() - began < seconds
        ):
            _round(creator, address, size_bytes, found)
    finally:
        vmm.unreserve(address, size_bytes)
    return found


def _round(
    creator: vmm.Creator, address: int, size_bytes: int, found: dict[str, list[float]]
) -> None:
    handle = _timed(found["create"], lambda: creator.create(size_bytes))
    try:
        _timed(found["map"], lambda: creator.map(address, size_bytes, handle))
        try:
            _timed(found["set_access"], lambda: creator.set_access(address, size_bytes))
        finally:
            _timed(found["unmap"], lambda: creator.unmap(address, size_bytes))
    finally:
        _timed(found["release"], lambda: creator.release(handle))


def nothing(runs: int) -> list[float]:
    """Return the seconds of the cheapest driver call: the cost of Python and the bindings."""
    samples: list[float] = []
    for _ in range(runs):
        _timed(samples, memory.nothing)
    return samples


def _timed(samples: list[float], call: Callable[[], T]) -> T:
    at = time.perf_counter()
    value = call()
    samples.append(time.perf_counter() - at)
    return value
