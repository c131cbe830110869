"""How much the bench uses, and how large its pieces are. Pure: numbers in, numbers out.

No piece is larger than a stated share of the free memory, and none takes longer than a stated time
at the speed measured first. Sizes are rounded down to 2 MiB, the granularity of device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError
from kiwi_core.units import GIB, MIB, format_bytes

GPU_SHARE: Final = 0.5
"""Share of the free GPU memory for everything but the switch."""

SWITCH_GPU_SHARE: Final = 0.95
"""Share of the free GPU memory for a switch: the bench must take the rest so that two programs do
not fit together. A twentieth stays for contexts that others make."""

RAM_SHARE: Final = 0.25
"""Share of the system RAM that may still be used, within cgroup limits."""

GPU_FREE_MIN_BYTES: Final = 96 * MIB
RAM_FREE_MIN_BYTES: Final = 256 * MIB

_GRANULARITY: Final = 2 * MIB
_COPY_MAX_BYTES: Final = 1 * GIB
"""At 55 GB/s it takes 20 ms, so that the cost of starting a copy does not matter."""
_PAGED_MAX_BYTES: Final = 16 * GIB
_PAIRS: Final = 3
"""Copy buffers that may exist at once: one for each way, and one to spare."""
_FIRST_PAGED_BYTES: Final = 256 * MIB
_PAGED_ROUNDS: Final = 4.5
_SWITCHES_MAX: Final = 4
_BESIDE_SWITCHES: Final = 2.5
"""Moves out and in before and after those that are timed."""


@dataclass(frozen=True)
class TimeLimits:
    """Time limits. ``row_s``: one row of copies or calls; ``copy_s``: one copy; ``paging_s``:
    page-outs and page-ins of all backends; ``switch_s``: their switches; ``total_s``: everything,
    with starts and ends of processes."""

    row_s: float = 1.0
    copy_s: float = 0.1
    paging_s: float = 14.0
    switch_s: float = 18.0
    total_s: float = 110.0
    rounds: int = 400
    """Number of leases."""

    def shared(self, backends: int) -> TimeLimits:
        """Return the limits for each one of ``backends`` backends."""
        count = max(1, backends)
        return replace(self, paging_s=self.paging_s / count, switch_s=self.switch_s / count)


EMULATED: Final = TimeLimits(row_s=0.3, paging_s=2.0, switch_s=4.0, rounds=100)
"""For emulated GPUs. Their speeds mean nothing, so nobody should wait for them."""


@dataclass(frozen=True)
class FreeMemory:
    """The free memory before anything is measured."""

    gpu_total_bytes: int
    gpu_free_bytes: int
    ram_bytes: int

    @property
    def gpu_bytes(self) -> int:
        return _whole(self.gpu_free_bytes * GPU_SHARE)

    @property
    def switch_bytes(self) -> int:
        return _whole(self.gpu_free_bytes * SWITCH_GPU_SHARE)

    @property
    def host_bytes(self) -> int:
        return _whole(self.ram_bytes * RAM_SHARE)

    @property
    def margin_bytes(self) -> int:
        """The bytes that the daemon keeps free beside its sessions."""
        fraction = round(self.gpu_total_bytes * DEFAULTS.room_margin_fraction)
        return max(DEFAULTS.room_margin_min_bytes, fraction)


def check(room: FreeMemory) -> None:
    """Raise ``CallerError`` if there is too little memory to measure anything."""
    if room.gpu_free_bytes < GPU_FREE_MIN_BYTES:
        raise CallerError(
            "no-gpu-memory",
            f"Only {format_bytes(room.gpu_free_bytes)} of GPU memory are free; the bench needs "
            f"{format_bytes(GPU_FREE_MIN_BYTES)}.",
            "End programs that use the GPU (kiwi status, nvidia-smi), or emulate a larger one.",
        )
    if room.ram_bytes < RAM_FREE_MIN_BYTES:
        raise CallerError(
            "no-host-memory",
            f"Only {format_bytes(room.ram_bytes)} of system RAM may still be used; the bench "
            f"needs {format_bytes(RAM_FREE_MIN_BYTES)}.",
            "End other programs, or raise the memory limit of this cgroup.",
        )


def copy_bytes(room: FreeMemory, bytes_per_s: float, patience: TimeLimits) -> int:
    """Return the size of one copy, which takes about ``copy_s``."""
    most = min(_COPY_MAX_BYTES, room.gpu_bytes // _PAIRS, room.host_bytes // _PAIRS)
    return max(_GRANULARITY, _whole(min(bytes_per_s * patience.copy_s, most)))


def first_paged_bytes(room: FreeMemory) -> int:
    """Return the size moved once to find out how much can be moved in the time."""
    return max(_GRANULARITY, _whole(min(_FIRST_PAGED_BYTES, _paged_most(room) / 2)))


def paged_bytes(room: FreeMemory, round_trip_s_per_byte: float, patience: TimeLimits) -> int:
    fits = patience.paging_s / _PAGED_ROUNDS / round_trip_s_per_byte
    return max(first_paged_bytes(room), _whole(min(fits, _paged_most(room))))


def pinning_s(size_bytes: int) -> float:
    """Return how long a program's preloaded library may take to pin that much: the time until the
    daemon has allowed it, and a second per GiB (hosts are known to take 0.2 to 0.5 s)."""
    return 2.0 + size_bytes / GIB


def _paged_most(room: FreeMemory) -> float:
    return min(_PAGED_MAX_BYTES, room.gpu_bytes, room.host_bytes)


@dataclass(frozen=True)
class Switch:
    """Two programs of ``program_bytes`` each (contexts not counted), and how often they switch."""

    program_bytes: int
    runs: int

    def space_bytes(self, resident_bytes: int, margin_bytes: int) -> int:
        """Return the room to leave for both programs, where one takes ``resident_bytes``: enough
        for one and the margin, too little for two."""
        return _whole(max(1.5 * resident_bytes, resident_bytes + 1.2 * margin_bytes))


def switch(
    room: FreeMemory, round_trip_s_per_byte: float, patience: TimeLimits, context_bytes: int
) -> Switch | str:
    """Return the plan, or why there is none. Programs are as large as the time allows for several
    switches. If two of that size would fit together, they are larger and switch less often."""
    # Both may be out for a moment, and each has its context, too.
    most = min(_paged_most(room) / 2, room.host_bytes / 2 - context_bytes)
    least = max(_GRANULARITY, 1.45 * room.margin_bytes - context_bytes)
    fits = patience.switch_s / (_SWITCHES_MAX + _BESIDE_SWITCHES) / round_trip_s_per_byte
    size = _whole(min(max(fits, least), most))
    if size < _whole(least):
        return (
            "two programs that do not fit together would have to take "
            f"{format_bytes(_whole(least))} each here, more than the bench's share of free memory"
        )
    resident = size + context_bytes
    space = Switch(size, 1).space_bytes(resident, room.margin_bytes)
    if space > room.switch_bytes:
        return f"{format_bytes(space)} of GPU memory would have to be free"
    possible = patience.switch_s / (size * round_trip_s_per_byte) - _BESIDE_SWITCHES
    if possible < -1:
        return f"moving {format_bytes(size)}, as much as it takes, is too slow here"
    return Switch(size, min(_SWITCHES_MAX, max(1, int(possible))))


def _whole(size_bytes: float) -> int:
    return int(size_bytes) // _GRANULARITY * _GRANULARITY
