"""Who a session is, and what it counts for when turns are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.states import Priority

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.units import SessionId


@dataclass(eq=False)
class Standing:
    """The part of ``Session`` that decides its place among others. Only this module writes its
    fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    id: SessionId
    owner: str = ""
    """The owner for whom its turns count. A session without an owner has its own id here."""
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    """The weight of its priority class; a power of two."""
    share: float = 0.0
    """The smallest share of the GPU that its priority class is to have; 0: none."""
    had: float = 0.0
    """GPU time that it has had lately while others waited, as ``RecentUsage`` counts it."""
    favoured: float = 0.0
    """The part of ``had`` that the policy gave it before others, as ``RecentUsage`` counts it."""
    level: int = 0
    """Set by the policy: its place in the queue, or its place before its grant."""
    protected_until_ns: int = 0
    """Set by the policy: the session does not make way before this time."""

    def join_class(self, priority: Priority, config: Config) -> None:
        self.priority = priority
        high = config.high_weight
        self.weight = {Priority.HIGH: high, Priority.LOW: 1.0 / high}.get(priority, 1.0)
        self.share = config.training_share if priority is Priority.TRAINING else 0.0

    def had_turn(self, had: float, favoured: float) -> None:
        self.had += had
        self.favoured += favoured

    def fades(self, fading: float) -> None:
        """Forget a part of what it has had: time has passed."""
        self.had *= fading
        self.favoured *= fading

    def queues_on(self, level: int) -> None:
        """Put it on ``level`` of the queue, unprotected. The policy calls this."""
        self.level = level
        self.protected_until_ns = 0

    def protect(self, until_ns: int) -> None:
        """Let it not make way before ``until_ns``. The policy calls this."""
        self.protected_until_ns = until_ns
