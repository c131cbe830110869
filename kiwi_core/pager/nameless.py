"""GPU memory of processes of which NVML shows no row, or no size.

NVML shows none in a PID namespace of its own (most containers), and no sizes on some machines.
Unknown is not zero: such a process takes what its library counts, and together they take what the
GPU has in use and NVML does not explain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.gpu import processes
from kiwi_core.units import MIB, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.movers.driver_calls import RemoteGpu

SETTLED_NS: Final = NS_PER_S
"""How long a process must have been without a row. A context that is being made has none yet, and
a reading may be older than the context."""

_SIZE_LEAST_BYTES: Final = MIB
"""What a process with a context certainly takes: 0 would mean that it is not in the GPU."""

_MUCH_SHARE: Final = 16
"""More than this part of the GPU in use, and explained by no row, is the memory of programs. The
driver's own is less, and contexts have only small hidden parts."""


@dataclass(frozen=True)
class Nameless:
    """A process without a row. ``counted_bytes`` is what its library counts; ``None``: it has no
    library. ``has_context``: it certainly has a context."""

    ref: ProcessRef
    counted_bytes: int | None
    has_context: bool


class NamelessMemory:
    def __init__(self, gpu: RemoteGpu) -> None:
        self._gpu = gpu
        self._since_ns: dict[ProcessRef, int] = {}
        """When each process was first seen without a row."""
        self._counted: dict[ProcessRef, int] = {}
        """The nameless processes of all sessions, with what the library of each counts."""

    @property
    def some(self) -> bool:
        return any(map(processes.alive, self._counted))

    async def sizes(
        self, found: list[Nameless], others: Mapping[ProcessRef, bool], rows_bytes: int
    ) -> Mapping[ProcessRef, int]:
        """Return the bytes of those among the processes of one session that are really nameless.
        ``found`` have no row; of the ``others``, some have one (true), and some have nothing in the
        GPU (false). All rows come to ``rows_bytes``."""
        for ref in others:
            self._forget(ref)
        if any(others.values()):
            self._gpu.doubt_rows(False)
        if not found:
            return {}
        used_bytes = self._gpu.total_bytes() - await self._gpu.free_bytes()
        unexplained_bytes = used_bytes - rows_bytes
        much = unexplained_bytes > self._gpu.total_bytes() // _MUCH_SHARE
        mine = [one for one in found if self._settled(one.ref) and (one.has_context or much)]
        for one in found:
            if one not in mine:
                self._counted.pop(one.ref, None)
        self._counted.update({one.ref: one.counted_bytes or 0 for one in mine})
        if not mine:
            return {}
        self._gpu.doubt_rows(True)
        rest_bytes = unexplained_bytes - sum(self._counted.values())
        share_bytes = max(_SIZE_LEAST_BYTES, rest_bytes // len(self._counted))
        return {one.ref: self._counted[one.ref] + share_bytes for one in mine}

    def _settled(self, ref: ProcessRef) -> bool:
        now_ns = clock.now_ns()
        if ref not in self._since_ns:
            for old in [one for one in self._since_ns if not processes.alive(one)]:
                self._forget(old)
        return now_ns - self._since_ns.setdefault(ref, now_ns) >= SETTLED_NS

    def _forget(self, ref: ProcessRef) -> None:
        self._since_ns.pop(ref, None)
        self._counted.pop(ref, None)
