"""Orders to a preloaded library, and its answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.daemon.links.library_words import AFTER
from kiwi_core.pager.api import Refused
from kiwi_core.states import Reason
from kiwi_core.units import NS_PER_S
from kiwi_core.wire.pager import PagerAction

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.pager.api import Outcome
    from kiwi_core.pager.linked import LibraryReport
    from kiwi_core.wire.pager import PagerDone

ANSWER_GRACE_S = 2.0
"""Extra time for a library to report that its own time limit passed: the machine may be busy."""

MOVE_GRACE_S = 90.0
"""Extra time, beyond its own limit, for a library in the middle of a move: it first brings back
what it has begun to move out (60 s at most), and ends copies under way. After this it counts as
stuck, and whoever waits for it goes on."""

FASTEST_BYTES_PER_S: Final = 1_000_000_000_000
"""No bus to a GPU is faster (NVLink-C2C: 450 GB/s each way); a report above this is wrong."""


@dataclass(eq=False)
class PagerCall:
    """An action that an operation orders from a library and waits for."""

    action: PagerAction
    deadline_ns: int
    outcome: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    op: int | None = None
    """``None`` until it is sent."""
    out_bytes: int = 0
    """Bytes that were out when it was sent."""
    sent_ns: int = 0

    @property
    def moves(self) -> bool:
        return self.action in (PagerAction.PAGE_OUT, PagerAction.PAGE_IN)

    @property
    def left_ns(self) -> int:
        return max(0, self.deadline_ns - clock.now_ns())

    @property
    def grace_s(self) -> float:
        return MOVE_GRACE_S if self.op is not None and self.moves else ANSWER_GRACE_S

    def later(self, seconds: float, what: Callable[[PagerCall], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, what, self)

    def resolve(self, outcome: Outcome) -> None:
        if not self.outcome.done():  # the waiting task may have been cancelled
            self.outcome.set_result(outcome)

    # --- its answer -----------------------------------------------------------------------------

    def elapsed_ns(self, answer: PagerDone) -> int:
        """Return the time that it reports, but at most the time since the order, and at least that
        of the fastest bus. Everybody's turns are measured against what a move takes."""
        fastest_ns = answer.bytes * NS_PER_S // FASTEST_BYTES_PER_S
        since_ns = clock.now_ns() - self.sent_ns
        return max(fastest_ns, min(answer.elapsed_ns, since_ns))

    def moved(self, report: LibraryReport, moved_bytes: int) -> LibraryReport:
        """Return ``report`` after the move, unless the library has reported that state itself."""
        if self.action is PagerAction.YIELD or report.residency is AFTER[self.action]:
            return report
        owned_bytes = max(report.resident_bytes + report.paged_out_bytes, moved_bytes)
        out = self.action is PagerAction.PAGE_OUT
        return replace(
            report,
            residency=AFTER[self.action],
            resident_bytes=0 if out else owned_bytes,
            paged_out_bytes=owned_bytes if out else 0,
        )


def refusal(answer: PagerDone, pid: int) -> Refused:
    """Return the refusal that process ``pid`` answers with."""
    try:
        reason = Reason(answer.reason)
    except ValueError:
        reason = Reason.DRIVER
    if reason is Reason.GONE:  # a process that can answer is not gone
        reason = Reason.DRIVER
    return Refused(reason, answer.detail or f"Process {pid} refused ({reason.value}).")
