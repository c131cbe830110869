"""How much of the GPU each process uses, by NVML, and who works: one reading for many observers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.gpu import processes
from kiwi_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Collection

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.movers.driver_calls import RemoteGpu
    from kiwi_core.pager.footprints import Footprints
    from kiwi_core.units import SessionId

_FRESH_NS: Final = 20 * NS_PER_MS
"""A reading of NVML serves all looks at sessions within this time: a reading costs about a
millisecond, and there may be 1,000 sessions."""

_WINDOW_US: Final = 1_000_000
"""How far back the first look goes: NVML's samples are up to a second late."""


@dataclass(frozen=True)
class DeviceUsage:
    """Bytes by pid, and when NVML last saw each pid work (on its clock; ``None`` if it cannot say).
    ``by_leader`` has the GPU's users, also those paged out, by the leader of their terminal
    session. This finds a worker whose parent has ended."""

    bytes_by_pid: dict[int, int]
    busy_us: dict[int, int] | None
    seen_us: int
    by_leader: dict[int, list[ProcessRef]]


class UsageMeter:
    """Reads NVML for many observers, and says for each whether a process worked since *its* last
    look."""

    def __init__(self, gpu: RemoteGpu, footprints: Footprints) -> None:
        self._gpu = gpu
        self._footprints = footprints
        self._reading = asyncio.Lock()
        self._usage = DeviceUsage({}, {}, 0, {})
        self._fresh_until_ns = 0
        self._looked_us: dict[SessionId, int] = {}

    def forget(self, session: SessionId | None = None) -> None:
        """Read again next time, because an operation moved memory; forget an ended ``session``."""
        self._fresh_until_ns = 0
        if session is not None:
            self._looked_us.pop(session, None)

    @property
    def last(self) -> DeviceUsage:
        """The last reading, even if it is old."""
        return self._usage

    def saw(self, bytes_by_pid: dict[int, int]) -> None:
        """Record what an operation's look has shown. When each process worked is read later."""
        leaders = self._by_leader(bytes_by_pid)
        self._usage = replace(self._usage, bytes_by_pid=bytes_by_pid, by_leader=leaders)
        self._fresh_until_ns = 0

    async def read(self) -> DeviceUsage:
        async with self._reading:
            if clock.now_ns() >= self._fresh_until_ns:
                self._usage = await self._next(self._usage)
                self._fresh_until_ns = clock.now_ns() + _FRESH_NS
            return self._usage

    def busy(self, session: SessionId, pids: Collection[int], usage: DeviceUsage) -> bool | None:
        """Return whether one of ``pids`` used the GPU since the session's last look, if known."""
        if usage.busy_us is None:
            return None
        since_us = self._looked_us.get(session, usage.seen_us - _WINDOW_US)
        self._looked_us[session] = usage.seen_us
        return any(usage.busy_us.get(pid, -1) > since_us for pid in pids)

    async def _next(self, last: DeviceUsage) -> DeviceUsage:
        bytes_by_pid = await self._gpu.bytes_by_pid()
        # From the newest sample seen, not from a clock, because samples are late.
        samples = await self._gpu.samples(last.seen_us)
        if samples is None:
            return DeviceUsage(bytes_by_pid, None, last.seen_us, self._by_leader(bytes_by_pid))
        busy_us = {pid: at for pid, at in (last.busy_us or {}).items() if pid in bytes_by_pid}
        for sample in samples:
            if sample.percent > 0:
                busy_us[sample.pid] = max(sample.time_us, busy_us.get(sample.pid, 0))
        seen_us = max((s.time_us for s in samples), default=last.seen_us)
        return DeviceUsage(bytes_by_pid, busy_us, seen_us, self._by_leader(bytes_by_pid))

    def _by_leader(self, bytes_by_pid: dict[int, int]) -> dict[int, list[ProcessRef]]:
        refs = {ref for pid in bytes_by_pid if (ref := processes.ref_of(pid)) is not None}
        refs.update(ref for ref in self._footprints.all() if processes.alive(ref))
        found: dict[int, list[ProcessRef]] = {}
        for ref in refs:
            stat = processes.stat_of(ref.pid)
            if stat is not None:
                found.setdefault(stat.session, []).append(ref)
        return found
