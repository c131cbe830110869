"""A page-in by steps, into the room that others' page-outs make while they go on.

Only libraries can do that: what has come in stays held, and goes out again without being copied.
Each step verifies and promises its room like any other page-in. It may still find none, which
changes nothing, and is tried again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kiwi_core.pager.api import Moved, Refused
from kiwi_core.pager.ports import Stop
from kiwi_core.states import Reason, Residency
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.pager.linked import Linked, Links
    from kiwi_core.pager.room import Room
    from kiwi_core.pager.way_out import WayOut

_STEPS: Final = 32
"""About so many, or fewer: each costs a message and a look at the GPU's free memory."""

_LEAST_BYTES: Final = 2 * MIB
_PAUSE_S: Final = 0.002
"""Between looks for more room: a handle of 64 to 256 MiB comes free every few milliseconds."""

_NOTHING_TO_DO_S: Final = 0.05


class Steps:
    """``look`` finds the linked processes; ``still_wanted`` raises ``Stop`` when they are not."""

    def __init__(
        self,
        links: Links,
        room: Room,
        ways: Sequence[WayOut],
        deadline_ns: int,
        look: Callable[[], list[Linked]],
        still_wanted: Callable[[], None],
    ) -> None:
        self._links = links
        self._room = room
        self._ways = ways
        self._deadline_ns = deadline_ns
        self._look = look
        self._still_wanted = still_wanted
        self._came: dict[Linked, int] = {}
        out_bytes = sum(link.told.paged_out_bytes for link in look())
        self._least_bytes = max(_LEAST_BYTES, out_bytes // _STEPS)
        self.moving_ns = 0

    @property
    def moved_bytes(self) -> int:
        return sum(self._came.values())

    def follow(self, *, moving: bool) -> None:
        """Until all ways have ended; without ``moving`` it only waits. Raises ``Stop(NO_ROOM)``
        as soon as one fails, and at the deadline."""
        while not all(way.ended for way in self._ways):
            self._check()
            out = [link for link in self._look() if link.told.paged_out_bytes] if moving else []
            if out and self._step(out[0], [link.ref.pid for link in out]):
                continue
            going = next((way for way in self._ways if not way.ended), self._ways[0])
            going.wait_changed(_PAUSE_S if out else _NOTHING_TO_DO_S)
        self._check()

    def give_back(self, deadline_ns: int) -> str:
        """What came in goes out again; words about what did not."""
        said = []
        for link, came_bytes in self._came.items():
            [outcome] = self._links.perform([link], "page-out", deadline_ns, came_bytes)
            if isinstance(outcome, Refused) and outcome.reason is not Reason.GONE:
                said.append(f"Process {link.ref.pid} has a part in the GPU: {outcome.detail}")
        self._came.clear()
        return " ".join(said)

    def _check(self) -> None:
        self._still_wanted()
        if any(way.failed for way in self._ways):
            raise Stop(Refused(Reason.NO_ROOM, "A page-out that was to make its room did not."))
        if time.monotonic_ns() >= self._deadline_ns:
            detail = "The page-outs that were to make its room did not come to an end in time."
            raise Stop(Refused(Reason.NO_ROOM, detail))

    def _step(self, link: Linked, own_pids: list[int]) -> bool:
        """False: there is too little room just now."""
        most_bytes = link.told.paged_out_bytes
        least_bytes = min(self._least_bytes, most_bytes)
        room = self._room.part(own_pids, least_bytes, most_bytes, lambda: link.moving)
        with room as part_bytes:
            if not part_bytes:
                return False
            began_ns = time.monotonic_ns()
            [outcome] = self._links.perform([link], "page-in", self._deadline_ns, part_bytes)
        if not isinstance(outcome, Moved):
            if isinstance(outcome, Refused) and outcome.reason is Reason.NO_ROOM:
                return False  # somebody was quicker
            if isinstance(outcome, Refused) and outcome.reason is Reason.GONE:
                return False  # that process needs nothing any more
            raise Stop(outcome)
        if not outcome.bytes_moved:  # not one chunk of it is as small
            self._least_bytes = part_bytes + _LEAST_BYTES
            return link.told.residency is not Residency.PAGED_OUT
        self._came[link] = self._came.get(link, 0) + outcome.bytes_moved
        self.moving_ns += time.monotonic_ns() - began_ns
        return True
