"""What a policy decides. Everything else (room, operations, failures) is the same for all.

A policy only reads sessions. It is asked in the settle pass, many times a second: be quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kiwi_core.sched.session import Session


@dataclass(slots=True)
class Terms:
    """The settings that quanta follow; changed live."""

    tq_ns: int
    min_run_ns: int
    swap_floor_factor: float


class Policy(Protocol):
    def order(self, queue: Collection[Session]) -> Iterable[Session]:
        """The waiters, first served first. ``queue`` is in order of arrival (a session that was
        stopped in mid-burst arrived when it was stopped)."""
        ...

    def victims(self, idle: Iterable[Session], waiters: Sequence[Session]) -> Iterator[Session]:
        """Whose memory goes out, first to go first. Both hold GPU memory; ``idle`` has the least
        recently used first, ``waiters`` the one that has waited longest."""
        ...

    def may_join(self, waiter: Session, holders: int, serialised: bool) -> bool:
        """May ``waiter`` be brought in now, beside so many that hold the lease or are on their
        way in? (Room is checked apart from this.)"""
        ...

    def quantum_ns(self, session: Session, terms: Terms, swap_ns: int) -> int:
        """How long it may run while others wait. ``swap_ns`` is what stopping it costs: its way
        out and back in; 0 where nothing has to move."""
        ...

    def floor_ns(self, session: Session, terms: Terms, swap_ns: int) -> int:
        """How long it runs in any case, even if the runners have outgrown the GPU."""
        ...

    def stop_at_ns(self, runner: Session, waiter: Session, quantum_ns: int) -> int:
        """When ``runner`` makes way for ``waiter``."""
        ...
