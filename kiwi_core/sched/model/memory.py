"""Where the memory of a session is, and how much of it, as far as is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.states import Residency

if TYPE_CHECKING:
    from kiwi_core.config import Config


LONGEST_PAUSE: Final = 32
"""The longest pause before a residue comes back, in first ones (``Config.residue_pause_ns``). The
pause doubles with each time that the driver takes it before its session has run again, so that a
residue for which there is room only now and then does not go back and forth."""


@dataclass(eq=False)
class Memory:
    """The part of ``Session`` about its memory. Only this module writes its fields. After a change
    ``State.refresh`` brings the sums in line."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    residency: Residency = Residency.RESIDENT
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
    taken_bytes: int = 0
    """What the driver has taken of the residue that libraries had left in the GPU, by the last
    observation. 0 unless PAGED_OUT."""
    residue_wanted: bool = False
    """A call of its program, which needs no lease, waits for that. Only while PAGED_OUT."""
    residue_pause_ns: int = 0
    """The last pause before its residue may come back; 0 once it has run since."""
    residue_not_before_ns: int = 0
    """When its residue may come back for its own sake."""
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
        return self.owned and self.residency is Residency.PAGED_OUT and self.resident_bytes > 0

    # --- readings -------------------------------------------------------------------------------

    def was_read(self, resident_bytes: int, owned: bool) -> None:
        self.resident_bytes = resident_bytes
        self.owned = owned

    def residue_seen(self, taken_bytes: int, config: Config, now_ns: int) -> None:
        """Take what the driver has of its residue, as it was just read."""
        taken_bytes = taken_bytes if self.residency is Residency.PAGED_OUT else 0
        if taken_bytes and not self.taken_bytes and not self.residue_wanted:
            self.residue_waits(config, now_ns)
        self.taken_bytes = taken_bytes

    def residue_waits(self, config: Config, now_ns: int) -> None:
        """Leave its residue where it is for a while: it was taken, or could not be brought back."""
        first_ns = config.residue_pause_ns
        doubled_ns = max(first_ns, 2 * self.residue_pause_ns)
        self.residue_pause_ns = min(doubled_ns, LONGEST_PAUSE * first_ns)
        self.residue_not_before_ns = now_ns + self.residue_pause_ns

    def wants_residue(self, now_ns: int) -> None:
        if not self.residue_wanted:
            self.residue_wanted = True
            self.residue_not_before_ns = now_ns

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
        self.taken_bytes = 0
        self.residue_wanted = False

    def was_suspended(self, resident_bytes: int | None) -> None:
        """Record a suspension that left its memory in the GPU; ``None``: its size is unknown."""
        self.residency = Residency.SUSPENDED
        if resident_bytes is not None:
            self.resident_bytes = resident_bytes

    def was_resumed(self) -> None:
        """Record that its process is free to run, and that nothing is in system RAM."""
        self.residency = Residency.RESIDENT
        self.paged_out_bytes = self.restore_bytes = 0
        self.taken_bytes = self.residue_pause_ns = 0
        self.residue_wanted = False

    def went_out(self, restore_bytes: int, out_bytes: int, stays_bytes: int) -> None:
        """Record a page-out, after which ``out_bytes`` are in system RAM. What was there before
        (an interrupted page-out) has to come back, too."""
        self.residency = Residency.PAGED_OUT
        self.restore_bytes = restore_bytes
        if self.paged_out_bytes < out_bytes:
            self.paged_out_bytes = out_bytes
        self.resident_bytes = stays_bytes if self.owned else 0

    def residue_came_in(self, moved_bytes: int) -> None:
        """Record that the driver has brought back what it had taken. Only libraries leave a
        residue, so it is owned, too."""
        self.paged_out_bytes = min(self.paged_out_bytes, max(0, self.restore_bytes - moved_bytes))
        self.resident_bytes += moved_bytes
        self.owned = True
        self.taken_bytes = 0
        self.residue_wanted = False

    def came_in(self, resident_bytes: int) -> None:
        self.was_resumed()
        self.resident_bytes = resident_bytes

    def contents_lost(self) -> None:
        """Record that the contents are gone, as the driver reports."""
        self.found(Residency.LOST, 0, 0)

    def no_longer_counts(self) -> None:
        """Record that Kiwi no longer has anything to do with its memory."""
        self.found(Residency.RESIDENT, 0, 0)
