"""The role that uses the GPU as a program does: it copies, pins, maps and holds memory."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kiwi_core.bench.work import pinned, pinning, vmm_calls
from kiwi_core.bench.work.hostmem import Mapped
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
        self._pinned: dict[str, int] = {}
        self._pageable: dict[str, Mapped] = {}
        self._device: dict[str, int] = {}
        self._held = 0
        self._held_bytes = 0
        self._value = 0

    @property
    def gpu(self) -> OwnGpu:
        assert self._gpu is not None
        return self._gpu

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
        self.take(["in"], _PROBE_BYTES, pinned=True)
        samples = self.copy("in", _PROBE_BYTES, 0.05)
        self.give_back()
        return _PROBE_BYTES / min(samples[1:] or samples)

    def take(self, ways: list[str], size_bytes: int, pinned: bool) -> None:
        """Take memory for copies, a pair of buffers for each way."""
        for way in ways:
            self._device[way] = memory.allocate(size_bytes)
            if pinned:
                self._pinned[way] = memory.host_allocate(size_bytes)
            else:
                self._pageable[way] = Mapped(size_bytes)
                self._pageable[way].touch(0, size_bytes)

    def give_back(self) -> None:
        for address in self._pinned.values():
            memory.host_free(address)
        for mapped in self._pageable.values():
            mapped.close()
        for address in self._device.values():
            memory.free(address)
        self._pinned, self._pageable, self._device = {}, {}, {}

    def copy(
        self, way: str, size_bytes: int, seconds: float, start_ns: int = 0, runs_min: int = 3
    ) -> list[float]:
        """Copy again and again for ``seconds``, at least ``runs_min`` times; return the seconds
        of each. Start at ``start_ns`` of the monotonic clock, which all processes share."""
        self.gpu.enter()
        stream = memory.new_stream()
        host = self._pinned[way] if way in self._pinned else self._pageable[way].address
        move = memory.copy_out if way == "out" else memory.copy_in
        samples: list[float] = []
        try:
            _wait_until(start_ns)
            began = time.perf_counter()
            while len(samples) < runs_min or time.perf_counter() - began < seconds:
                at = time.perf_counter()
                move(host, self._device[way], size_bytes, stream)
                memory.synchronize(stream)
                samples.append(time.perf_counter() - at)
        finally:
            memory.end_stream(stream)
        return samples

    def copy_both(self, size_bytes: int, seconds: float) -> dict[str, list[float]]:
        """Copy out and in at once, each in a thread."""
        found: dict[str, list[float]] = {}
        errors: list[GpuError] = []
        start_ns = time.monotonic_ns() + 20_000_000

        def work(way: str) -> None:
            try:
                found[way] = self.copy(way, size_bytes, seconds, start_ns)
            except GpuError as error:
                errors.append(error)

        _together([lambda: work("out"), lambda: work("in")])
        if errors:
            raise errors[0]
        return found

    # --- pinning, driver calls ------------------------------------------------------------------

    def pin_allocate(self, size_bytes: int, runs: int) -> list[float]:
        return pinning.allocate(size_bytes, runs)

    def pin_register(self, size_bytes: int, threads: int, runs: int) -> list[float]:
        return pinning.register(self.gpu, size_bytes, threads, runs)

    def vmm(self, size_bytes: int, seconds: float, runs_max: int) -> dict[str, list[float]]:
        return vmm_calls.measure(self.gpu, size_bytes, seconds, runs_max)

    def nothing(self, runs: int) -> list[float]:
        return vmm_calls.nothing(runs)

    # --- holding --------------------------------------------------------------------------------

    def hold(self, size_bytes: int) -> None:
        """Take ``size_bytes`` and write to all of it."""
        self._held = _patiently(lambda: memory.allocate(size_bytes))
        self._held_bytes = size_bytes
        self.change()

    def until_pinned(self, limit_s: float) -> int | None:
        """Wait until all that is held has pinned memory to go to, at most ``limit_s``; return how
        many bytes have it, or ``None`` if the driver moves them."""
        pinned_bytes = pinned.until_pinned(limit_s)
        return pinned_bytes if pinned_bytes is None else min(pinned_bytes, self._held_bytes)

    def change(self) -> None:
        """Give every byte that is held another value, with different ones in three windows."""
        self._value = (self._value + 1) % 200
        memory.fill(self._held, self._value, self._held_bytes)
        for number, offset in enumerate(self._windows()):
            memory.fill(self._held + offset, self._value + 1 + number, self._window_bytes())

    def intact(self) -> bool:
        """Return whether what ``change`` wrote is still there."""
        size = self._window_bytes()
        host = Mapped(size)
        stream = memory.new_stream()
        good = True
        for number, offset in enumerate(self._windows()):
            memory.copy_out(host.address, self._held + offset, size, stream)
            memory.synchronize(stream)
            good = good and host.equal(bytes([self._value + 1 + number]) * size)
        memory.end_stream(stream)
        host.close()
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


def _wait_until(start_ns: int) -> None:
    while (left_ns := start_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)


def _together(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
