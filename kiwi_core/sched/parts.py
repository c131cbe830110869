"""How much of a session's memory goes out, where that can be less than all of it.

What stays in the GPU need not come back. But each further page-out of the same session closes and
drains its program again, so one takes more than is short just now, and takes all rather than leave
crumbs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from kiwi_core.sched.session import Running, Session
    from kiwi_core.sched.state import State

GRAIN_MAX_BYTES: Final = 256 * MIB
GRAIN_SHARE: Final = 64
"""Parts are multiples of a grain: 256 MiB, or a 64th of a GPU of less than 16 GiB. No library moves
in larger pieces, so it takes at most one grain more than it was told."""

LEAST_SHARE: Final = 16
"""A sixteenth of the GPU at least: 5 of 80 GB, a tenth of a second on a fast bus. Half as much is a
crumb where a session would have no more than that left."""


RESIDUE_SHARE: Final = 8
"""Of the GPU: contexts, and what a library cannot own, take no more (1 of 8 GB; few have less)."""


def grain_bytes(total_bytes: int) -> int:
    return min(GRAIN_MAX_BYTES, total_bytes // GRAIN_SHARE)


def is_residue(st: State, session: Session) -> bool:
    """Is all that it has in the GPU what its library cannot move (contexts)? The driver can, but
    slowly, and again at each turn: only for somebody who really lacks room. (After a restart
    nobody knows what of it can be moved; what is larger is taken for that.)"""
    if not session.partly_in or session.left_bytes:
        return False
    return session.resident_bytes <= st.total_bytes // RESIDUE_SHARE


def part_bytes(st: State, session: Session, short_bytes: int) -> int:
    """What of ``session`` is to go out where ``short_bytes`` are short; 0: everything."""
    if not session.partial:
        return 0
    least_bytes = st.total_bytes // LEAST_SHARE
    again_bytes = session.paged_out_bytes // 2  # of the same one again: ever more at once
    part = _whole_grains(st, max(short_bytes, least_bytes, again_bytes) + st.grain_bytes - 1)
    return part if part + least_bytes // 2 < session.resident_bytes else 0


def part_that_fits_bytes(st: State, session: Session, ram_bytes: int) -> int:
    """What of ``session`` goes out where system RAM cannot take all that should; 0: nothing."""
    if not session.partial:
        return 0
    return max(0, _whole_grains(st, ram_bytes - st.grain_bytes))


def ram_bytes(st: State, session: Session, part: int) -> int:
    """What a page-out of ``part`` (0: everything) may take in system RAM."""
    resident = session.resident_bytes
    return min(resident, part + st.grain_bytes) if part else resident


def freed_bytes(session: Session, page_out: Running) -> int:
    """What its page-out that is under way will take off the books."""
    if not page_out.bytes:
        return session.counted_claim_bytes
    return session.counted_claim_bytes - session.resident_bytes + page_out.bytes


def _whole_grains(st: State, size_bytes: int) -> int:
    return size_bytes // st.grain_bytes * st.grain_bytes
