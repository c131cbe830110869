"""Sums of what each session has used and cost so far, for accounting. They only grow."""

from __future__ import annotations

from typing import NamedTuple


class Account(NamedTuple):
    """The sums of one session since it joined, in nanoseconds and bytes."""

    held_ns: int = 0
    """Time with the lease. Sessions that run side by side are each counted in full."""
    waited_ns: int = 0
    """Time spent waiting for the lease, with the burst suspended or not yet begun."""
    suspended_ns: int = 0
    """The part of ``waited_ns`` in which a burst was suspended."""
    moving_ns: int = 0
    """Time in which the driver paged its memory out or in; only moves that succeeded."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    bursts: int = 0
    """Bursts that have begun."""
    suspensions: int = 0

    def since(self, earlier: Account) -> Account:
        return Account(*(now - then for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: Account) -> Account:
        return Account(*(one + another for one, another in zip(self, other, strict=True)))
