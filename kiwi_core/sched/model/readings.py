"""Facts about the GPU and the machine's RAM, by the last readings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, kw_only=True)
class Readings:
    """The part of ``State`` about readings. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``State`` has the slots

    total_bytes: int
    host_budget_bytes: int
    """System RAM that sessions may take when they are paged out."""
    observed: bool = False
    """Whether memory has been read at least once; before that nothing may be restored."""
    read_ns: int = -1
    """When the last reading began that showed what programs outside Kiwi hold."""
    knows_owned: bool = False
    """Whether there has been a session whose memory libraries own."""
    outside_bytes: int = 0
    """GPU memory of programs that are not Kiwi's, by the last observation at rest."""
    capacity_bytes: int = field(init=False)
    """The most GPU memory that Kiwi's sessions can have: all but ``outside_bytes``."""

    def see_outside(self, outside_bytes: int) -> None:
        """Record how much GPU memory programs that are not Kiwi's hold."""
        self.outside_bytes = outside_bytes
        self.capacity_bytes = self.total_bytes - outside_bytes

    def see_all(self, began_ns: int, outside_bytes: int) -> None:
        """Record a reading of the whole GPU during which nothing moved."""
        self.see_outside(outside_bytes)
        self.observed = True
        self.read_ns = max(self.read_ns, began_ns)

    def see_owned(self, some: bool) -> None:
        """Record whether libraries own the memory of some sessions."""
        self.knows_owned = self.knows_owned or some

    def see_host_budget(self, budget_bytes: int) -> None:
        self.host_budget_bytes = budget_bytes
