"""The role that uses the GPU as a program does: it copies and holds memory."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kiwi_core.errors import GpuError
from kiwi_core.gpu import memory
from kiwi_core.gpu.results import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.memory import OwnGpu

_PROBE_BYTES: Final = 4 << 20
"""Size of the first copy, which finds out how large a piece takes long enough to be timed."""

_WINDOW_BYTES: Final = 1 << 20
"""Size of each of three windows in what is held, which show that all of it came back intact."""


_SCRUBBED_WITHIN_S: Final = 3.0

T = TypeVar("T")


class Bus:
    ENDS_WITHIN_S = 45.0

    def __init__(self) -> None:
        self._gpu: OwnGpu | None = None
        self._pinned = 0
        self._pageable: Any = None
        self._device = 0
        self._held = 0
        self._held_bytes = 0
        self._value = 0

    def open(self, uuid: str) -> dict[str, Any]:
        self._gpu = _patiently(lambda: memory.open_gpu(uuid))
        return {"pci_bus_id": self._gpu.pci_bus_id}

    def near(self, cpus: list[int]) -> None:
        """Run only on these processors, if any: host memory lies near the first touch."""
        if cpus:
            with suppress(OSError):  # not allowed here: change nothing
                os.sched_setaffinity(0, cpus)

    def free_bytes(self) -> int:
        return memory.free_bytes()

    # --- copies ---------------------------------------------------------------------------------

    def probe_bytes_per_s(self) -> float:
        """Return a first guess at the speed of a pinned copy."""
        self.take(_PROBE_BYTES, pinned=True)
        samples = self.copy("in", _PROBE_BYTES, 0.05, 3)
        self.give_back()
        return _PROBE_BYTES / min(samples[1:])

    def take(self, size_bytes: int, pinned: bool) -> None:
        """Take memory for copies, in the GPU and on the host."""
        self._device = memory.allocate(size_bytes)
        if pinned:
            self._pinned = memory.host_allocate(size_bytes)
        else:
            self._pageable = (ctypes.c_char * size_bytes)()
            ctypes.memset(self._pageable, 1, size_bytes)  # touched memory is there

    def give_back(self) -> None:
        if self._pinned:
            memory.host_free(self._pinned)
        if self._device:
            memory.free(self._device)
        self._pinned, self._pageable, self._device = 0, None, 0

    def copy(self, way: str, size_bytes: int, seconds: float, runs_min: int) -> list[float]:
        """Copy again and again for ``seconds``, at least ``runs_min`` times; return the seconds
        of each."""
        stream = memory.new_stream()
        host = self._pinned or ctypes.addressof(self._pageable)
        move = memory.copy_out if way == "out" else memory.copy_in
        samples: list[float] = []
        try:
            began = time.perf_counter()
            while len(samples) < runs_min or time.perf_counter() - began < seconds:
                at = time.perf_counter()
                move(host, self._device, size_bytes, stream)
                memory.synchronize(stream)
                samples.append(time.perf_counter() - at)
        finally:
            memory.end_stream(stream)
        return samples

    def nothing(self, runs: int) -> list[float]:
        """Return the seconds of the cheapest driver call: the cost of Python and the bindings."""
        samples: list[float] = []
        for _ in range(runs):
            at = time.perf_counter()
            memory.nothing()
            samples.append(time.perf_counter() - at)
        return samples

    # --- holding --------------------------------------------------------------------------------

    def hold(self, size_bytes: int) -> None:
        """Take ``size_bytes`` and write to all of it."""
        self._held = _patiently(lambda: memory.allocate(size_bytes))
        self._held_bytes = size_bytes
        self.change()

    def change(self) -> None:
        """Give every byte that is held another value, with different ones in three windows."""
        self._value = (self._value + 1) % 200
        memory.fill(self._held, self._value, self._held_bytes)
        for number, offset in enumerate(self._windows()):
            memory.fill(self._held + offset, self._value + 1 + number, self._window_bytes())

    def intact(self) -> bool:
        """Return whether what ``change`` wrote is still there."""
        size = self._window_bytes()
        host = (ctypes.c_char * size)()
        stream = memory.new_stream()
        good = True
        for number, offset in enumerate(self._windows()):
            memory.copy_out(ctypes.addressof(host), self._held + offset, size, stream)
            memory.synchronize(stream)
            good = good and host.raw == bytes([self._value + 1 + number]) * size
        memory.end_stream(stream)
        return good

    def occupy(self, size_bytes: int) -> None:
        """Take ``size_bytes`` and leave them alone."""
        self._held = memory.allocate(size_bytes)

    def drop(self) -> None:
        if self._held:
            memory.free(self._held)
        self._held = self._held_bytes = 0

    def _window_bytes(self) -> int:
        return min(_WINDOW_BYTES, self._held_bytes // 4)

    def _windows(self) -> list[int]:
        size = self._window_bytes()
        return [0, (self._held_bytes - size) // 2, self._held_bytes - size]

    def close(self) -> None:
        if self._gpu is not None:
            with suppress(GpuError):
                self.give_back()
                self.drop()
                self._gpu.close()


def _patiently(call: Callable[[], T]) -> T:
    """Repeat ``call`` while it finds no memory: freed memory is scrubbed before it can be had."""
    ends_s = time.monotonic() + _SCRUBBED_WITHIN_S
    while True:
        try:
            return call()
        except GpuError as error:
            if error.driver_code != OUT_OF_MEMORY or time.monotonic() > ends_s:
                raise
        time.sleep(0.05)
