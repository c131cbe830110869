"""The texts that Kiwi shows in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.states import Notice
from kiwi_core.units import format_duration_s, ordinal
from kiwi_core.wire.words import expected_text, waiting_text

if TYPE_CHECKING:
    from kiwi_core.wire.messages import UserNotice, Waiting

SHOWN_NOTICES: Final = frozenset(
    {
        Notice.LOST,
        Notice.STUCK,
        Notice.PAGE_IN_REFUSED,
        Notice.LITTLE_RAM,
    }
)
"""Notices that users must see in the notebook itself; ``%kiwi status`` shows the others."""

INTERRUPTED: Final = (
    "KeyboardInterrupt: interrupted while waiting for the GPU. Nothing that uses the GPU ran in"
    " this cell."
)

IN_A_CALL: Final = "A call in this cell needs it."

LOST: Final = (
    "GpuMemoryLost: what this notebook had in GPU memory is gone, so nothing that uses the GPU ran"
    " in this cell. Restart this kernel. To save what is in CPU memory first, put `%%kiwi cpu` on"
    " top of a cell: it runs all the same."
)


def waiting_line(waiting: Waiting | None, waited_s: float) -> str:
    """Return one line about a wait, for people."""
    if waiting is None:
        return f"Waiting for the GPU ({format_duration_s(waited_s)})"
    return waiting_text(waiting)


def unforeseen_line(waiting: Waiting, waited_s: float) -> str:
    """Return one line about a call that waits although its cell did not request the GPU
    beforehand.
    """
    return f"{waiting_line(waiting, waited_s)}. {IN_A_CALL}"


def suspended_line(waiting: Waiting) -> str:
    """Return one line about a cell that was suspended, and when it goes on."""
    if waiting.blocked is not None:
        return f"Suspended in mid-cell. {waiting.detail}"
    place = f"{ordinal(waiting.position)} in line" if waiting.position > 0 else ""
    holder = f"{waiting.holder} has the GPU" if waiting.holder else ""
    expected = expected_text(waiting)
    when = "by itself" if not expected else f"in {expected}"
    goes_on = "goes on " + when.replace("in any moment", "any moment")
    known = ", ".join(filter(None, (place, holder, waiting.activity)))
    return f"Suspended in mid-cell: {f'{known}; this cell ' if known else ''}{goes_on}"


def share_done(waiting: Waiting | None, waited_s: float) -> float | None:
    """Return how much of the wait is over, from 0 to 1; ``None`` if that is not known."""
    if waiting is None or waiting.expected_wait_s is None or waiting.blocked is not None:
        return None
    whole_s = waited_s + waiting.expected_wait_s
    return 0.0 if whole_s <= 0 else min(1.0, waited_s / whole_s)


def told(notice: UserNotice) -> str:
    return f"Kiwi: {notice.text} {notice.remedy}".rstrip()
