"""Read how busy the GPU is, which programs outside Kiwi hold its memory, and sessions' RAM.

No decision depends on these figures: they are for people. A mover asks NVML every few seconds; if
NVML does not answer, the figures are missing and everything else goes on. RAM is read only while
somebody watches, and only of sessions that they may see.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from kiwi_core.daemon.base.peers import Owner, user_name
from kiwi_core.daemon.roster.registry import ANOTHER_USER
from kiwi_core.errors import GpuError
from kiwi_core.gpu import containers, host, nvml, processes
from kiwi_core.pager.survey import belongs
from kiwi_core.units import MIB
from kiwi_core.wire.status import GaugesStatus, OutsideProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from kiwi_core.daemon.base.peers import Peer, Rights
    from kiwi_core.movers.driver_calls import RemoteGpu
    from kiwi_core.pager.api import ProcessRef
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

POLL_S: Final = 3.0
"""Interval of looks, as often as people look again; NVML takes a millisecond or two."""

AFTER_A_FAILURE_S: Final = 30.0
"""Interval after a failure: a look that hangs costs a mover, and others need the next one."""

PROGRAMS_MAX: Final = 16
"""Most programs outside Kiwi that are named, the largest first; a status has to fit one line."""

NAMELESS_MIN_BYTES: Final = 32 * MIB
"""Least memory of no process that is looked into: NVML leaves out a few MiB of each context."""

RAM_FOR_S: Final = 4.0
"""How long a reading of a session's RAM is used."""

RAM_READS_MAX: Final = 64
"""Most sessions whose RAM is read for one status: a few milliseconds of the loop."""

NEWS_SHARE: Final = 1 / 32
"""Least relative change to report: power and RAM always vary, and all watchers get each change."""


@dataclass(frozen=True)
class Outside:
    """A program outside Kiwi, whether or not the reader may see it."""

    pid: int
    uid: int
    name: str
    used_bytes: int
    container: str = ""
    left: bool = False
    """The memory is that of a program that has ended, kept by one that was forked from it."""

    @property
    def owner(self) -> Owner:
        return Owner(self.uid, self.container)


@dataclass(eq=False)
class GaugeReader:
    """``kiwis`` returns the roots of all processes that share, ``movers`` the pids of the daemon's
    own workers, ``outside_bytes`` what others hold, ``names`` the names of those programs outside
    Kiwi that somebody has announced. ``device`` is the file that each program with CUDA has open.
    ``changed`` is called after each change."""

    _gpu: RemoteGpu
    kiwis: Callable[[], Collection[ProcessRef]]
    movers: Callable[[], Collection[int]]
    outside_bytes: Callable[[], int]
    names: Callable[[Iterable[int]], Mapping[int, str]]
    device: str
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.now = GaugesStatus()
        self._outside: list[Outside] = []

    async def run(self) -> None:
        """Read the gauges until cancelled."""
        while True:
            wait_s = POLL_S
            before = self.now, self._outside
            try:
                self.now = steadied(GaugesStatus(**asdict(await self._gpu.gauges())), self.now)
                self._outside = await self._programs()
            except Exception as error:  # noqa: BLE001 - a daemon must not end for want of a figure
                log.info("the gauges cannot be read", why=str(error))
                self.now, self._outside = GaugesStatus(), []
                wait_s = AFTER_A_FAILURE_S
            if before != (self.now, self._outside):
                self.changed()
            await asyncio.sleep(wait_s)

    async def _programs(self) -> list[Outside]:
        if self.outside_bytes() <= 0 or not nvml.names_processes():
            return []
        used = await self._gpu.bytes_by_pid()
        roots, own = self.kiwis(), self.movers()
        strangers = [pid for pid in used if pid not in own and not belongs(pid, roots)]
        names = self.names(strangers)
        found = [
            one
            for pid in strangers
            if (one := _outside(pid, used[pid], names.get(pid, ""))) is not None
        ]
        # The driver itself takes memory, too: who merely has the GPU open is not to blame for it.
        nameless_bytes = self.outside_bytes() - sum(one.used_bytes for one in found)
        if nameless_bytes >= NAMELESS_MIN_BYTES:
            openers = await asyncio.to_thread(processes.with_open, self.device)
            kept_by = [
                one.pid
                for one in openers
                if one.pid not in used
                and processes.outlived_its_leader(one)
                and not belongs(one.pid, roots)
            ]
            found += left_behind(kept_by, nameless_bytes)
        found.sort(key=lambda one: (-one.used_bytes, one.pid))
        return found[:PROGRAMS_MAX]

    def outside(self, reader: Peer, rights: Rights) -> list[OutsideProgram]:
        """Return the programs that ``reader`` may see, and last the sum of the others."""
        own = [one for one in self._outside if rights.may_see(reader, one.owner)]
        shown = [
            OutsideProgram(
                pid=one.pid,
                owner=user_name(one.uid),
                name=one.name,
                used_bytes=one.used_bytes,
                left=one.left,
            )
            for one in own
        ]
        rest = sum(one.used_bytes for one in self._outside) - sum(one.used_bytes for one in own)
        if rest > 0:
            other = ANOTHER_USER
            shown.append(OutsideProgram(pid=0, owner=other, name=other, used_bytes=rest))
        return shown


class RamGauge:
    """The system RAM of sessions, read while somebody watches."""

    def __init__(self) -> None:
        self._known: dict[SessionId, tuple[float, int]] = {}
        self._reads = 0

    def begin(self, there: Callable[[SessionId], bool]) -> None:
        """Begin one status. Forget sessions that are no longer ``there``."""
        self._reads = RAM_READS_MAX
        self._known = {id_: known for id_, known in self._known.items() if there(id_)}

    def of(self, session: SessionId, refs: Callable[[], Iterable[ProcessRef]]) -> int | None:
        """Return the bytes that ``refs()`` have together, read a few seconds ago at most; longer
        ago if too many were due, and ``None`` before the first reading."""
        at_s, known_bytes = self._known.get(session, (-RAM_FOR_S, -1))
        now_s = time.monotonic()
        if now_s - at_s >= RAM_FOR_S and self._reads > 0:
            self._reads -= 1
            try:
                living = [ref for ref in set(refs()) if processes.alive(ref)]
                held_bytes = sum(host.held_bytes(ref.pid) for ref in living)
            except GpuError:
                held_bytes = 0  # no descriptor left: the next reading may succeed
            known_bytes = _near(held_bytes, known_bytes)
            self._known[session] = now_s, known_bytes
        return known_bytes if known_bytes > 0 else None


def _near(new: float, old: float) -> int:
    """Return ``old`` if ``new`` hardly differs from it."""
    return round(old if abs(new - old) < NEWS_SHARE * old else new)


def steadied(new: GaugesStatus, old: GaugesStatus) -> GaugesStatus:
    """Return ``new`` in whole watts, with the power of ``old`` if it hardly differs."""
    power_w = None if new.power_w is None else float(_near(new.power_w, old.power_w or 0.0))
    limit_w = None if new.power_limit_w is None else float(round(new.power_limit_w))
    return msgspec.structs.replace(new, power_w=power_w, power_limit_w=limit_w)


def left_behind(pids: Collection[int], nameless_bytes: int) -> list[Outside]:
    """Return a row for memory that NVML counts for no process and ``pids``, which have the GPU
    open, keep: they were forked from a program that has ended. It is the driver's own, or a failed
    restore's, if there are none."""
    found = [one for pid in sorted(pids) if (one := _outside(pid, nameless_bytes, "")) is not None]
    if not found:
        return []
    first, more = found[0], len(found) - 1
    name = f"{first.name}{f' and {more} more' if more else ''}, left by a program that has ended"
    return [replace(first, name=name, left=True)]


def _outside(pid: int, used_bytes: int, name: str) -> Outside | None:
    """Return ``None`` if the program has ended, or is hidden from the daemon. ``name`` is its
    announced name; "": none."""
    uid = processes.owner_uid(pid)
    if uid is None:
        return None
    name = name or processes.command(pid) or "a program"
    return Outside(pid, uid, name, used_bytes, containers.container_of(pid))
