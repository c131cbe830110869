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
    shares = [one.out_bytes for one in holders]
    left_bytes = max(0, budget_bytes - budget_bytes // SPARED - others_bytes - sum(shares))
    wanted = sorted(
        (_rounded_up(one.owned_bytes - one.out_bytes), i) for i, one in enumerate(holders)
    )
    for done, (most_bytes, i) in enumerate(wanted):
        equal_bytes = left_bytes // (len(wanted) - done) // STEP_BYTES * STEP_BYTES
        shares[i] += min(most_bytes, equal_bytes)
        left_bytes -= min(most_bytes, equal_bytes)
    return shares


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
