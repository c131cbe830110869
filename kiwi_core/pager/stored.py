"""The checkpoint pager with custom storage: keepers move the memory, at the speed of the bus.

All that is not the move itself (who belongs to a session, locking, room, undoing) is the
checkpoint pager's: to it, this is a driver whose ``checkpoint`` and ``restore`` are done by a
keeper. Where one cannot (no keeper, no RAM, an older driver), the driver's own checkpoint is taken
instead, which is decided before anything has begun. What went out one way comes back the same way.

**Unproven on hardware** (ADR 25): used only where it was asked for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import custom_storage, host
from kiwi_core.gpu import driver as real_driver
from kiwi_core.pager.api import Lost
from kiwi_core.pager.checkpoint import CheckpointPager
from kiwi_core.pager.ports import NvmlGpu
from kiwi_core.pager.provisions import Provisions
from kiwi_core.pager.stored_driver import StoredDriver, StoredGpu
from kiwi_core.states import Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Moved, Observation, Outcome, Target
    from kiwi_core.pager.keepers import Keepers

UNPROVEN: Final = (
    "Memory is moved by custom storage, which is unproven on hardware: it was written from "
    "NVIDIA's documentation and has run on the emulated driver only. A keeper that is killed loses "
    "what it keeps."
)

KEEPER_WITHIN_S: Final = 5.0
"""For a keeper to start, where its program is to go out and has none yet; past it the driver does
the move."""


class StoredPager(CheckpointPager):
    """``wanted``: new moves begin by custom storage; without it only what is out by it comes back.

    ``budget_bytes(kept)``: how much RAM what is out may take, ``kept`` included, which is what the
    keepers have now. ``least_bytes``: what has less in the GPU is not worth a keeper's context.
    ``aside()`` are processes that somebody else moves; ``crowded()``: is there anybody to make room
    for? Only then keepers are got ready ahead. The rest is ``CheckpointPager``'s.
    """

    def __init__(
        self,
        gpu_uuid: str,
        config: Config = DEFAULTS,
        *,
        keepers: Keepers,
        wanted: bool,
        budget_bytes: Callable[[int], int],
        least_bytes: int = 0,
        aside: Callable[[], Collection[ProcessRef]] = frozenset,
        crowded: Callable[[], bool] = lambda: True,
        keeper_within_s: float = KEEPER_WITHIN_S,
        prepare: Callable[[], None] = lambda: None,
        remember: Callable[[Target, Mapping[ProcessRef, int]], None] | None = None,
        other_roots: Callable[[], Collection[ProcessRef]] = frozenset,
        host_available_bytes: Callable[[Collection[int]], int] = host.available_host_bytes,
    ) -> None:
        self._keepers = keepers
        self._wanted = wanted
        self._least_bytes = least_bytes
        self._aside = aside
        self._crowded = crowded
        self._available_bytes = host_available_bytes
        self._gpu = StoredGpu(NvmlGpu(gpu_uuid), keepers)
        self._stored = StoredDriver(real_driver, keepers, self._may_begin)
        super().__init__(
            gpu_uuid, config,
            remember=remember, other_roots=other_roots, driver=self._stored, gpu=self._gpu,
            host_available_bytes=self._available_with_reserved,
        )  # fmt: skip
        keepers.look()  # an earlier daemon's
        self._provisions = Provisions(keepers, budget_bytes, keeper_within_s, prepare)
        self._end_unwanted()

    # --- the pager ------------------------------------------------------------------------------

    def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        """Keepers and their RAM are got ready while the session still runs."""
        if self._wanted:
            self._get_ready(target, deadline_ns)
        return super().page_out(target, deadline_ns)

    def page_in(self, target: Target, deadline_ns: int, room_wait_ns: int | None = None) -> Outcome:
        outcome = super().page_in(target, deadline_ns, room_wait_ns)
        self._end_unwanted()
        return outcome

    def observe(self, target: Target) -> Observation:
        seen = super().observe(target)
        if self._wanted and self._crowded():
            aside = self._aside()
            self._provisions.ahead(
                {
                    one.ref: one.resident_bytes
                    for one in seen.processes
                    if one.residency is Residency.RESIDENT
                    and one.resident_bytes > self._least_bytes
                    and one.ref not in aside
                }
            )
        return seen

    def _run(self, target: Target, operation: Callable[[], Moved]) -> Outcome:
        outcome = super()._run(target, operation)
        if isinstance(outcome, Lost):
            refs = [member.ref for member in self._survey.members(target)]
            stories = [story for ref in refs if (story := self._stored.story(ref))]
            return Lost(" ".join(stories) or outcome.detail)
        return outcome

    # --- for the daemon -------------------------------------------------------------------------

    def idle_bytes(self) -> int:
        """RAM that keepers have beside what is out: their next page-outs need no more."""
        states = self._keepers.states().values()
        return sum(max(0, state.arena_bytes - state.out_bytes) for state in states)

    def close(self) -> None:
        """Ends the keepers of programs whose memory is in the GPU. They are no use any more."""
        self._provisions.close()

    # --- inside ---------------------------------------------------------------------------------

    def _end_unwanted(self) -> None:
        """Where no move begins by a keeper any more, one that keeps nothing is only a burden: it
        has RAM, and a context in the GPU."""
        if not self._wanted:
            self._provisions.end_idle()

    def _get_ready(self, target: Target, deadline_ns: int) -> None:
        """Best effort: what is not ready goes out by the driver's own checkpoint."""
        try:
            sizes = self._gpu.bytes_by_pid()
            refs = [member.ref for member in self._survey.members(target)]
        except GpuError:
            return  # the operation itself will meet it, too
        for ref in refs:
            size_bytes = sizes.get(ref.pid, 0)
            if size_bytes > self._least_bytes:
                left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / NS_PER_S)
                self._provisions.now(ref, size_bytes, left_s)

    def _may_begin(self, ref: ProcessRef) -> bool:
        """It is locked, so it cannot grow any more: what NVML counts is more than it will need."""
        if not self._wanted or ref not in self._keepers.states():
            return False
        size_bytes = self._gpu.bytes_by_pid().get(ref.pid, 0)
        return size_bytes > self._least_bytes and self._provisions.topped_up(ref, size_bytes)

    def _available_with_reserved(self, pids: Collection[int]) -> int:
        """What their keepers have reserved is there for them."""
        states = self._keepers.states() if self._wanted else {}
        reserved_bytes = sum(s.arena_bytes for ref, s in states.items() if ref.pid in pids)
        return self._available_bytes(pids) + reserved_bytes


def why_not() -> str:
    """Why this machine cannot move memory this way; "" where it can, as far as is known."""
    try:
        return custom_storage.why_not()
    except GpuError as error:
        return str(error)
