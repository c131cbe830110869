"""What each paged-out process takes in the GPU, and what its page-out left free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.gpu import processes
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kiwi_core.gpu.processes import ProcessRef

_HIDDEN_LEAST_BYTES: Final = 5 * MIB
_HIDDEN_MOST_BYTES: Final = 8 * MIB
"""A process takes more of the GPU than NVML reports for it: 5 and 6 MiB were seen. What is measured
is cut to this range, because others may have allocated or freed memory at the same time."""


@dataclass(frozen=True)
class PageOutReading:
    """What was measured when a process went out: the bytes that were free in the GPU just before,
    with its whole session in, and the bytes that it gave back beyond those that NVML reports for
    it."""

    free_bytes: int
    hidden_bytes: int = _HIDDEN_LEAST_BYTES


class Footprints:
    """The bytes that each paged-out process takes in the GPU, measured while it was locked and so
    could not grow, and what it left free. They are kept until its page-in has committed."""

    def __init__(self) -> None:
        self._bytes: dict[ProcessRef, int] = {}
        self._readings: dict[ProcessRef, PageOutReading] = {}
        self._learnt: dict[ProcessRef, int] = {}

    @property
    def learnt(self) -> Mapping[ProcessRef, int]:
        """The bytes of each process at its last page-out, also if it is back now."""
        return self._learnt

    def get(self, ref: ProcessRef) -> int | None:
        return self._bytes.get(ref)

    def put(self, sizes: dict[ProcessRef, int]) -> None:
        self._bytes.update(sizes)
        self._learnt = {r: n for r, n in self._learnt.items() if processes.alive(r)} | sizes

    def put_readings(self, readings: Mapping[ProcessRef, PageOutReading]) -> None:
        self._readings.update(readings)

    def gave_back(
        self, sizes: Mapping[ProcessRef, int | None], before_bytes: int, after_bytes: int
    ) -> None:
        """Record what was free before and after the page-out of these processes. ``sizes`` are
        NVML's; ``None``: it does not name the process, so the gain is its footprint."""
        gained_bytes = after_bytes - before_bytes
        named_bytes = sum(size for size in sizes.values() if size is not None)
        more_bytes = (gained_bytes - named_bytes) // len(sizes)
        hidden_bytes = min(max(_HIDDEN_LEAST_BYTES, more_bytes), _HIDDEN_MOST_BYTES)
        for ref, size in sizes.items():
            if size is None:
                self.put({ref: max(0, more_bytes)})
            hidden = 0 if size is None else hidden_bytes
            noted = self._readings.get(ref)
            free_bytes = min(before_bytes, noted.free_bytes) if noted else before_bytes
            self._readings[ref] = PageOutReading(free_bytes, hidden)

    def spare_bytes(self, refs: Collection[ProcessRef]) -> int | None:
        """Return what ``refs`` left free beside their footprints when they went out; ``None`` if
        that is not known. If nothing has changed since, it is free now."""
        left = [self._readings.get(ref) for ref in refs]
        known = [reading for reading in left if reading is not None]
        if not known or len(known) < len(left):
            return None
        return min(one.free_bytes for one in known) + sum(one.hidden_bytes for one in known)

    def drop(self, refs: Collection[ProcessRef]) -> None:
        for ref in refs:
            self._bytes.pop(ref, None)
            self._readings.pop(ref, None)

    def all(self) -> dict[ProcessRef, int]:
        return dict(self._bytes)

    def readings(self) -> dict[ProcessRef, PageOutReading]:
        return dict(self._readings)
