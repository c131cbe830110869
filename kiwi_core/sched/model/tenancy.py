"""How long the user of a session pauses, and since when the session has had its place in the GPU.

``rules.tenancy`` decides by these figures.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

PAUSES_KEPT: Final = 40
"""The best time to keep a place is a minimum over these. With 12 of them chance decided too often:
under load 1 % more of the GPU's time was lost in simulations."""


@dataclass(eq=False)
class Tenancy:
    """The part of ``Session`` about its pauses and its place. Only this module writes its
    fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    pauses_ns: deque[int] = field(default_factory=lambda: deque(maxlen=PAUSES_KEPT))
    """The last times from the end of a burst to the request for the next one, oldest first."""
    tenant_ns: int | None = None
    """When it was granted the lease for the first time since its memory came into the GPU; ``None``
    before that, and once its memory has been paged out."""

    came_back: bool = False
    """Whether its present turn, or the last one, came first because its place had been kept."""

    def comes_back(self, back: bool) -> None:
        """Record before a grant whether it comes first because its place was kept."""
        self.came_back = back

    def paused_for(self, pause_ns: int) -> None:
        """Record that it asked for its next burst ``pause_ns`` after the end of the last one."""
        self.pauses_ns.append(pause_ns)

    def takes_its_place(self, now_ns: int) -> bool:
        """Record a grant; return whether it is the first one since its memory came in."""
        if self.tenant_ns is not None:
            return False
        self.tenant_ns = now_ns
        return True

    def gives_up_its_place(self) -> None:
        """Record that its memory was paged out."""
        self.tenant_ns = None
