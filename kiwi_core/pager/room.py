"""Room in the GPU: a check for space before anything is brought back.

A restore that fails for lack of memory fails for good in the driver (NVIDIA/cuda-checkpoint#44). So
none starts unless NVML says that there is room, and no two restores count on the same room.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Refused
from kiwi_core.pager.ending import Stop
from kiwi_core.pager.stopped import why_stopped
from kiwi_core.states import Reason
from kiwi_core.units import MIB, NS_PER_MS, NS_PER_S, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.movers.driver_calls import RemoteGpu

_POLL_MIN_NS: Final = 2 * NS_PER_MS
_POLL_MAX_NS: Final = 100 * NS_PER_MS

_SETTLES_BYTES: Final = 16 * MIB
"""The free memory of a GPU varies by this much. So a margin is at most what was free before, less
this: a wait for more could last forever. If NVML cannot name the users, the GPU counts as unused if
its free memory is within this of the most ever seen."""


class Reservation:
    """The bytes that one page-in still has to bring back; ``None``: unknown.

    ``spare_bytes`` is what its page-out left free beside them; ``None``: unknown.
    ``safe_bytes`` of them need no margin: a library that lacks room for them can try again.
    ``restores`` is how many processes the driver has to bring back at once: each takes a little
    more than NVML has reported.
    ``still_moving`` says whether it may still take the room after its operation was given up.
    """

    def __init__(
        self,
        need_bytes: int | None,
        own_pids: Collection[int],
        *,
        spare_bytes: int | None = None,
        safe_bytes: int = 0,
        restores: int = 1,
        still_moving: Callable[[], bool] = lambda: False,
    ) -> None:
        self.need_bytes = need_bytes
        self.own_pids = set(own_pids)
        self.spare_bytes = spare_bytes
        self.safe_bytes = safe_bytes
        self.restores = restores
        self.still_moving = still_moving
        self.had_bytes = 0
        """The bytes that its processes had in the GPU when the room was promised, and have got back
        since."""
        self.ended = False

    def spend(self, size_bytes: int | None, *, safe: bool = False) -> None:
        """Count these bytes as back; NVML counts them from now on."""
        if self.need_bytes is not None and size_bytes is not None:
            self.need_bytes = max(0, self.need_bytes - size_bytes)
            self.had_bytes += size_bytes
            self.safe_bytes -= min(self.safe_bytes, size_bytes) if safe else 0

    @property
    def at_risk_bytes(self) -> int:
        """The bytes of which the driver loses all if they do not fit."""
        return max(0, (self.need_bytes or 0) - self.safe_bytes)

    def to_come_bytes(self, bytes_by_pid: Mapping[int, int], used_bytes: int) -> int:
        """Return the bytes that it may still take. Nobody knows when stopped processes (a debugger,
        a freezer) go on, so what NVML already counts for them is not reserved a second time.
        ``used_bytes`` is the use of the whole GPU. It is out of date if it is below the sum of all
        processes; then nothing is deducted."""
        need_bytes = self.need_bytes or 0
        if used_bytes < sum(bytes_by_pid.values()) or not _stands_still(self.own_pids):
            return need_bytes
        has_bytes = sum(bytes_by_pid.get(pid, 0) for pid in self.own_pids)
        return max(0, need_bytes - max(0, has_bytes - self.had_bytes))


def _stands_still(pids: Collection[int]) -> bool:
    refs = map(processes.ref_of, pids)
    return any(ref is not None and why_stopped(ref) for ref in refs)


class GpuRoom:
    """The free memory of one GPU, and the reservations that were promised a part of it."""

    def __init__(self, gpu: RemoteGpu, config: Config) -> None:
        self._gpu = gpu
        self._config = config
        self._deciding = asyncio.Lock()
        """Held between a look at the free memory and a promise, so that no other comes between."""
        self._promised: list[Reservation] = []
        self._most_free_bytes = 0
        self._most_explained_bytes = 0
        """The most bytes ever free or named by NVML. If the sum is less now, NVML does not name
        some user."""

    @contextmanager
    def reserved(self, reservation: Reservation) -> Iterator[None]:
        """Keep the room for ``reservation`` once it was promised: others do not get it inside the
        block, nor later while ``still_moving``."""
        try:
            yield
        finally:
            reservation.ended = True

    def _others(self, but: Reservation) -> list[Reservation]:
        """Return the other reservations that were promised room and may still take it."""
        self._promised = [r for r in self._promised if not r.ended or r.still_moving()]
        return [r for r in self._promised if r is not but and r.need_bytes != 0]

    async def wait(
        self, reservation: Reservation, deadline_ns: int, still_wanted: Callable[[], None]
    ) -> GpuLook:
        """Wait until NVML reports as free what ``reservation`` still needs: freed memory shows up
        late. Return that look. Raises ``Stop(NO_ROOM)`` at ``deadline_ns`` or after
        ``room_wait_ns``; ``still_wanted`` may raise its own."""
        until_ns = min(deadline_ns, clock.now_ns() + self._config.room_wait_ns)
        pause_ns = _POLL_MIN_NS
        while True:
            seen, why = await self._take(reservation)
            if why is None:
                return seen
            still_wanted()
            left_ns = until_ns - clock.now_ns()
            if left_ns <= 0:
                raise Stop(Refused(Reason.NO_ROOM, why))
            await asyncio.sleep(min(pause_ns, left_ns) / NS_PER_S)
            pause_ns = min(2 * pause_ns, _POLL_MAX_NS)

    async def _take(self, reservation: Reservation) -> tuple[GpuLook, str | None]:
        """Promise the room if it is free; otherwise return what is missing, in words."""
        async with self._deciding:
            seen = await self._gpu.look()
            if seen.free_bytes is None:  # NVML says nothing: the driver does
                seen = replace(seen, free_bytes=await self._gpu.free_bytes())
            why = self._missing(reservation, self._others(reservation), seen)
            if why is None and reservation not in self._promised:
                usage = seen.bytes_by_pid
                reservation.had_bytes = sum(usage.get(pid, 0) for pid in reservation.own_pids)
                self._promised.append(reservation)
            return seen, why

    def _missing(
        self, reservation: Reservation, others: list[Reservation], seen: GpuLook
    ) -> str | None:
        now_free_bytes = seen.free_bytes or 0
        usage, named = seen.bytes_by_pid, seen.names_users
        self._most_free_bytes = max(self._most_free_bytes, now_free_bytes)
        alone = not others and set(usage) <= reservation.own_pids
        if reservation.need_bytes is None:
            return None if alone and named else self._of_unknown_size(named)
        if any(other.need_bytes is None for other in others):
            return "A process of unknown size is being brought back."
        if alone and not named:
            alone = self._as_empty_as_ever(now_free_bytes)
        used_bytes = self._gpu.total_bytes() - now_free_bytes
        free_bytes = now_free_bytes - sum(r.to_come_bytes(usage, used_bytes) for r in others)
        margin_bytes = self._margin_of(reservation, alone)
        if free_bytes >= reservation.need_bytes + margin_bytes:
            return None
        spare = f" and {format_bytes(margin_bytes)} to spare" if margin_bytes else ""
        return (
            f"It needs {format_bytes(reservation.need_bytes)} of GPU memory{spare}; "
            f"{format_bytes(max(0, free_bytes))} are free."
        )

    def _of_unknown_size(self, named: bool) -> str:
        if named:
            return "It is not known how much it needs, so it waits for all."
        return (
            "It is not known how much it needs, nor who uses the GPU (NVML cannot name processes "
            "here: a PID namespace?), so it cannot be brought back safely."
        )

    def claims_bytes(
        self,
        size_bytes: int,
        seen: GpuLook,
        outside: Callable[[Collection[int]], Collection[int]],
        spare_bytes: int | None = None,
    ) -> list[int]:
        """Return how much to claim before a restore of ``size_bytes``; the first that can be had
        will do. Empty: only sessions use the GPU. ``outside`` selects the pids of no session.
        ``seen`` is what ``wait`` returned, ``spare_bytes`` as in ``Reservation``."""
        usage, free_bytes = seen.bytes_by_pid, seen.free_bytes or 0
        if not seen.names_users:
            shared = not self._as_empty_as_ever(free_bytes)
        else:
            shared = self._somebody_nameless(free_bytes, usage) or bool(outside(usage))
        if not shared:
            return []
        config = self._config
        more_bytes = self._gpu.total_bytes() // config.restore_claim_share
        more_bytes = min(config.restore_claim_bytes, more_bytes)
        margin_bytes = self._margin(size_bytes, spare_bytes)
        return [size_bytes + max(more_bytes, margin_bytes), size_bytes + margin_bytes]

    def _as_empty_as_ever(self, free_bytes: int) -> bool:
        return free_bytes >= self._most_free_bytes - _SETTLES_BYTES

    def _somebody_nameless(self, free_bytes: int, usage: dict[int, int]) -> bool:
        """Return whether memory is in use for which NVML names no process."""
        explained_bytes = free_bytes + sum(usage.values())
        self._most_explained_bytes = max(self._most_explained_bytes, explained_bytes)
        hidden_bytes = self._config.restore_margin_min_bytes * len(usage)
        return explained_bytes + _SETTLES_BYTES + hidden_bytes < self._most_explained_bytes

    def _margin_of(self, reservation: Reservation, alone: bool) -> int:
        """Return the margin. It is at most what the page-out left free. With nobody else in the GPU
        it is also at most what the empty GPU has beyond the need."""
        if not reservation.restores:
            return 0
        spare_bytes = reservation.spare_bytes
        if alone:
            empty_bytes = max(0, self._most_free_bytes - (reservation.need_bytes or 0))
            spare_bytes = empty_bytes if spare_bytes is None else min(spare_bytes, empty_bytes)
        return self._margin(reservation.at_risk_bytes, spare_bytes, reservation.restores)

    def _margin(self, need_bytes: int, spare_bytes: int | None, restores: int = 1) -> int:
        """Return the margin, which is never more than ``spare_bytes``: a session that filled the
        GPU, or what other programs left of it, must be able to come back."""
        config = self._config
        fraction = config.restore_margin_fraction
        fixed_bytes = min(
            config.restore_margin_fixed_bytes, round(self._gpu.total_bytes() * fraction)
        )
        least_bytes = restores * config.restore_margin_min_bytes
        margin_bytes = max(least_bytes, fixed_bytes)
        margin_bytes += round(need_bytes * fraction)
        if spare_bytes is None:
            return margin_bytes
        least_bytes = min(least_bytes, spare_bytes)
        return min(margin_bytes, max(least_bytes, spare_bytes - _SETTLES_BYTES))
