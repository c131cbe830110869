"""How the host budget is divided among the preloaded libraries: what each may hold beforehand, and
who gives back first when somebody's page-out needs the memory. Pure.

What is out of the GPU must be somewhere. Everything else that libraries hold in system RAM is only
for speed: memory pinned before it is needed. It is theirs as long as nobody needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARED: Final = 8
"""One part in so many of the budget is nobody's beforehand: a page-out that finds it free need not
wait until somebody has given something back."""

STEP_BYTES: Final = 64 * MIB
"""Shares are multiples of this, or each allocation would change all of them."""


@dataclass(frozen=True)
class Holder:
    """One process, by its own word. ``out_bytes``: out of the GPU; ``held_bytes``: all that it
    holds in system RAM, that included. ``owned_bytes``: what a page-out would have to take,
    wherever it is."""

    owned_bytes: int
    out_bytes: int
    held_bytes: int

    @property
    def reclaimable_bytes(self) -> int:
        """Only for speed."""
        return max(0, self.held_bytes - self.out_bytes)


def divide(budget_bytes: int, others_bytes: int, holders: Sequence[Holder]) -> list[int]:
    """The bytes that each may hold without need, what is out included.

    Each may hold what it owns. Where the budget does not reach so far, all get the same, but
    none more than it owns: a small program is as quick to come and go as if it were alone.

    ``others_bytes``: what is out, and no library's.
    """
    may_bytes = budget_bytes - budget_bytes // SPARED - others_bytes
    wanted = [_rounded_up(max(one.owned_bytes, one.out_bytes)) for one in holders]
    level = _level(may_bytes, wanted, holders)
    pairs = zip(wanted, holders, strict=True)
    return [max(holder.out_bytes, min(most, level)) for most, holder in pairs]


def _level(may_bytes: int, wanted: Sequence[int], holders: Sequence[Holder]) -> int:
    """The largest that all can have."""

    def needed(level: int) -> int:
        pairs = zip(wanted, holders, strict=True)
        return sum(max(holder.out_bytes, min(most, level)) for most, holder in pairs)

    highest = max(wanted, default=0)
    if needed(highest) <= may_bytes:
        return highest
    low, high = 0, highest // STEP_BYTES  # low is possible, as far as anything is; high is not
    while high - low > 1:
        middle = (low + high) // 2
        if needed(middle * STEP_BYTES) <= may_bytes:
            low = middle
        else:
            high = middle
    return low * STEP_BYTES


def _rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // STEP_BYTES) * STEP_BYTES


def who_gives_back(lacking_bytes: int, holders: Sequence[Holder]) -> list[int]:
    """The places in ``holders`` of those that give back all that is only for speed, until it is
    enough. Those that hold most of it first, so that as few as possible have to begin anew."""
    found: list[int] = []
    by_size = sorted(range(len(holders)), key=lambda i: -holders[i].reclaimable_bytes)
    for i in by_size:
        if lacking_bytes <= 0 or not holders[i].reclaimable_bytes:
            break
        found.append(i)
        lacking_bytes -= holders[i].reclaimable_bytes
    return found
