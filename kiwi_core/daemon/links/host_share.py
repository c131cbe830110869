"""Divide the host budget among the preloaded libraries: what each may hold in reserve, and who
gives back first when a page-out needs the memory. Pure functions.

Paged-out memory needs RAM. Everything else that libraries hold in system RAM is only for speed:
memory pinned in advance. They keep it as long as nobody needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARED: Final = 8
"""1/SPARED of the budget is nobody's reserve: a page-out that fits into it need not wait for memory
to be given back."""

STEP_BYTES: Final = 64 * MIB
"""Shares are multiples of this; otherwise each allocation would change all of them."""


@dataclass(frozen=True)
class RamUser:
    """One process, as it reports itself. ``out_bytes`` are paged out; ``held_bytes`` is all its
    system RAM, including these. ``owned_bytes`` is all that a page-out would have to hold."""

    owned_bytes: int
    out_bytes: int
    held_bytes: int

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes held only for speed."""
        return max(0, self.held_bytes - self.out_bytes)


def divide(budget_bytes: int, others_bytes: int, users: Sequence[RamUser]) -> list[int]:
    """Return the bytes that each may hold in reserve, including what is paged out.

    Each may hold what it owns. If the budget does not suffice, all get the same, but none more than
    it owns: a small program then moves as fast as if it were alone.

    ``others_bytes`` are paged out and held by no library.
    """
    shares = [one.out_bytes for one in users]
    left_bytes = max(0, budget_bytes - budget_bytes // SPARED - others_bytes - sum(shares))
    wanted = sorted(  # rounded up
        (-(-(one.owned_bytes - one.out_bytes) // STEP_BYTES) * STEP_BYTES, i)
        for i, one in enumerate(users)
    )
    for done, (most_bytes, i) in enumerate(wanted):
        equal_bytes = left_bytes // (len(wanted) - done) // STEP_BYTES * STEP_BYTES
        shares[i] += min(most_bytes, equal_bytes)
        left_bytes -= min(most_bytes, equal_bytes)
    return shares


def who_gives_back(lacking_bytes: int, users: Sequence[RamUser]) -> list[int]:
    """Return the indices in ``users`` of those that give back all RAM that is only for speed,
    until it suffices. The largest come first, so that few have to start again.
    """
    found: list[int] = []
    by_size = sorted(range(len(users)), key=lambda i: -users[i].reclaimable_bytes)
    for i in by_size:
        if lacking_bytes <= 0 or not users[i].reclaimable_bytes:
            break
        found.append(i)
        lacking_bytes -= users[i].reclaimable_bytes
    return found
