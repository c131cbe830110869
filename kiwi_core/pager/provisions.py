"""Keepers and their RAM, got ready before they are needed, within what system RAM allows."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.errors import GpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.keeper.messages import State
    from kiwi_core.pager.keepers import Keepers

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 10.0
"""Keepers hear from their daemon as often; one that hears nothing for long, and keeps nothing,
ends."""


class Provisions:
    """``budget_bytes(kept)``: how much RAM all keepers may have, ``kept`` of which they have now.
    ``keeper_within_s``: for a keeper to start. ``prepare()`` is called once, in the background."""

    def __init__(
        self,
        keepers: Keepers,
        budget_bytes: Callable[[int], int],
        keeper_within_s: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._keepers = keepers
        self._budget_bytes = budget_bytes
        self._keeper_within_s = keeper_within_s
        self._prepare = prepare
        self._wanted: dict[ProcessRef, int] = {}
        self._wake = threading.Condition()
        self._ended = False
        threading.Thread(target=self._work, name="keepers", daemon=True).start()

    def ahead(self, sizes: Mapping[ProcessRef, int]) -> None:
        """In the background: what these processes may need soon. Does not block."""
        if not sizes:
            return
        with self._wake:
            self._wanted.update(sizes)
            self._wake.notify()

    def now(self, ref: ProcessRef, size_bytes: int, within_s: float) -> bool:
        """A keeper that has so much RAM. False: there is none, and the log says why."""
        within_s = min(within_s, self._keeper_within_s)
        ready = _told("a keeper", partial(self._keepers.ready, ref, within_s))
        return ready and self.topped_up(ref, size_bytes)

    def topped_up(self, ref: ProcessRef, size_bytes: int) -> bool:
        """As ``now``, of one that has a keeper."""
        return _told("its RAM", partial(self._reserve, ref, size_bytes))

    def close(self) -> None:
        """Ends the keepers that keep nothing."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self._keepers.look()
        self.end_idle()

    def end_idle(self) -> None:
        """Ends the keepers that keep nothing, as far as they have been heard of."""
        for ref, state in self._keepers.states().items():
            if state.way == "in":
                _told("ending a keeper", partial(self._keepers.end, ref))

    # --- inside ---------------------------------------------------------------------------------

    def _reserve(self, ref: ProcessRef, size_bytes: int) -> None:
        """What others keep only to save copies goes first. Raises ``GpuError``."""
        states = self._keepers.states()
        over_bytes = self._over_bytes(states, ref, size_bytes)
        idle = [one for one, state in states.items() if state.way == "in" and one != ref]
        idle.sort(key=lambda one: states[one].arena_bytes, reverse=True)
        for one in idle:
            if over_bytes <= 0:
                break
            _told("trimming a keeper", partial(self._keepers.trim, one))
            over_bytes = self._over_bytes(self._keepers.states(), ref, size_bytes)
        if over_bytes > 0:
            raise GpuError("no-host-memory", "The budget of system RAM does not allow it.")
        self._keepers.reserve(ref, size_bytes)

    def _over_bytes(self, states: Mapping[ProcessRef, State], ref: ProcessRef, size: int) -> int:
        """By how much all keepers together would have too much, if ``ref``'s had ``size``."""
        kept_bytes = sum(state.arena_bytes for state in states.values())
        mine_bytes = states[ref].arena_bytes if ref in states else 0
        return kept_bytes + max(0, size - mine_bytes) - self._budget_bytes(kept_bytes)

    def _work(self) -> None:
        self._prepare()
        look_at_s = time.monotonic() + LOOK_EVERY_S
        while not self._ended:
            with self._wake:
                if not self._wanted:
                    self._wake.wait(max(0.0, look_at_s - time.monotonic()))
                wanted, self._wanted = self._wanted, {}
            if time.monotonic() >= look_at_s and not self._ended:
                self._keepers.look()
                look_at_s = time.monotonic() + LOOK_EVERY_S
            for ref, size_bytes in wanted.items():
                if not self._ended:
                    _told("a keeper ahead", partial(self._aim, ref, size_bytes))

    def _aim(self, ref: ProcessRef, size_bytes: int) -> None:
        states = self._keepers.states()
        state = states.get(ref) or self._keepers.ready(ref, self._keeper_within_s)
        enough = state.ready and size_bytes <= state.arena_bytes == state.pinned_bytes
        if not enough and self._over_bytes(states, ref, size_bytes) <= 0:
            self._keepers.aim(ref, size_bytes)


def _told(what: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except GpuError as error:
        log.info("custom storage steps aside", what=what, why=str(error))
        return False
    return True
