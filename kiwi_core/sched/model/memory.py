"""Where the memory of a session is, and how much of it, as far as is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kiwi_core.states import Residency

# Each member under its own name. Python 3.11 takes 100 ns to read a member from its class and 6 ns
# to read a global name, and an event of the scheduler reads some thirty.
RESIDENT: Final = Residency.RESIDENT
SUSPENDED: Final = Residency.SUSPENDED
PAGED_OUT: Final = Residency.PAGED_OUT
LOST: Final = Residency.LOST


@dataclass(eq=False)
class Memory:
    """The part of ``Session`` about its memory. Only this module writes its fields. After a change
    ``State.refresh`` brings the sums in line."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    residency: Residency = RESIDENT
    """Where its memory is, by the last reported outcome."""
    resident_bytes: int = 0
    """Memory in the GPU, by the last observation or outcome. Often 0 when ``residency`` is
    PAGED_OUT, but a library leaves what it cannot own, an interrupted page-out leaves some, and a
    process that had no GPU memory (so the driver could not lock it) may allocate."""
    paged_out_bytes: int = 0
    """Memory in system RAM; counts against the host budget. 0 unless PAGED_OUT."""
    restore_bytes: int = 0
    """GPU memory that a page-in takes (contexts included). Only meaningful while PAGED_OUT."""
    owned: bool = False
    """Libraries in its processes own its memory and move it, by the last observation. They can ask
    for room, and what they cannot own stays in the GPU when the session is out."""
    read_ns: int = -1
    """When the last reading of its memory began."""
    left_ns: int = -1
    """When the session last gave up the lease without reporting what it left in the GPU. A
    reading that began earlier is stale."""

    @property
    def unread(self) -> bool:
        """Return whether its memory has not been read since it gave up the lease."""
        return self.read_ns < self.left_ns

    @property
    def partly_in(self) -> bool:
        """Return whether it is out and cannot run, but has some memory in the GPU."""
        return self.owned and self.residency is PAGED_OUT and self.resident_bytes > 0

    # --- readings -------------------------------------------------------------------------------

    def was_read(self, resident_bytes: int, owned: bool) -> None:
        self.resident_bytes = resident_bytes
        self.owned = owned

    def was_read_at(self, began_ns: int) -> None:
        """Record when a reading of its memory began; an older one changes nothing."""
        if self.read_ns < began_ns:
            self.read_ns = began_ns

    def was_left_at(self, left_ns: int) -> None:
        """Record that its program left the GPU. How much memory it keeps there is unknown."""
        self.left_ns = left_ns

    # --- reports and outcomes -------------------------------------------------------------------

    def found(self, residency: Residency, resident_bytes: int, paged_out_bytes: int) -> None:
        """Take over what the driver or a library reports, without an operation."""
        self.residency = residency
        self.resident_bytes = resident_bytes
        self.paged_out_bytes = paged_out_bytes
        self.restore_bytes = resident_bytes + paged_out_bytes

    def was_suspended(self, resident_bytes: int | None) -> None:
        """Record a suspension that left its memory in the GPU; ``None``: its size is unknown."""
        self.residency = SUSPENDED
        if resident_bytes is not None:
            self.resident_bytes = resident_bytes

    def was_resumed(self) -> None:
        """Record that its process is free to run, and that nothing is in system RAM."""
        self.residency = RESIDENT
        self.paged_out_bytes = self.restore_bytes = 0

    def went_out(self, restore_bytes: int, out_bytes: int, stays_bytes: int) -> None:
        """Record a page-out, after which ``out_bytes`` are in system RAM. What was there before
        (an interrupted page-out) has to come back, too."""
        self.residency = PAGED_OUT
        self.restore_bytes = restore_bytes
        if self.paged_out_bytes < out_bytes:
            self.paged_out_bytes = out_bytes
        self.resident_bytes = stays_bytes if self.owned else 0

    def came_in(self, resident_bytes: int) -> None:
        self.was_resumed()
        self.resident_bytes = resident_bytes

    def contents_lost(self) -> None:
        """Record that the contents are gone, as the driver reports."""
        self.found(LOST, 0, 0)

    def no_longer_counts(self) -> None:
        """Record that Kiwi no longer has anything to do with its memory."""
        self.found(RESIDENT, 0, 0)
