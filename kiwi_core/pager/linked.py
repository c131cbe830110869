"""The pager's interface to the daemon: the processes that have Kiwi's library loaded, the last
report of each, and a way to give a library an order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kiwi_core.gpu import processes
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome, Target
    from kiwi_core.units import SessionId

LibraryStep = Literal["shut", "open", "page-out", "page-in", "yield"]
"""An order for a library: of its gate, and of the memory that it owns. ``yield``: leave the driver
alone, which may take the process."""


@dataclass(frozen=True)
class LibraryReport:
    """The last report of one library: where the memory that it owns is, and how much. ``unowned``
    has, by kind, what it cannot move."""

    residency: Residency = Residency.RESIDENT
    resident_bytes: int = 0
    paged_out_bytes: int = 0
    unowned_bytes: int = 0
    unowned: Mapping[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    held_bytes: int = 0
    """The process's allocations in the GPU by the library's own count, contexts apart."""


class LinkedProcess(Protocol):
    """One process with the library. Attributes change at any time; ``report`` as a whole."""

    @property
    def ref(self) -> ProcessRef: ...
    @property
    def report(self) -> LibraryReport: ...
    @property
    def connected(self) -> bool: ...
    @property
    def owns(self) -> bool:
        """Whether the library owns the memory and moves it. Otherwise the library is only a gate:
        the driver moves the memory while the gate is shut."""
        ...

    @property
    def yields(self) -> bool:
        """Whether the library owns memory that only the driver may move any more."""
        ...

    @property
    def expected(self) -> bool:
        """Whether it is about to connect: a step can be sent to it, and waits for a moment."""
        ...

    @property
    def moving(self) -> bool:
        """Return whether it has the order to move its memory and has not reported the outcome
        yet.
        """
        ...

    def compare_gain(self, gained_bytes: int, reported_bytes: int) -> None:
        """Take what NVML says that the GPU gained by a page-out, beside what its library says."""
        ...


def all_out(link: LinkedProcess) -> bool:
    """Return whether all that the library owns is out, by its report on this connection."""
    out = link.report.residency is Residency.PAGED_OUT and not link.report.resident_bytes
    return out and link.connected and not link.moving


class LinkedProcesses:
    """The linked processes of all sessions; here, none. Methods are called in the loop."""

    def of(self, session: SessionId) -> tuple[LinkedProcess, ...]:  # noqa: ARG002
        """Return the session's processes that have the library, or had it at their last report."""
        return ()

    def everybody(self) -> tuple[LinkedProcess, ...]:
        return ()

    def about_to_go_out(self, session: SessionId) -> None:
        """Take notice that the memory of ``session`` is about to be moved out."""

    def paged_out(self) -> tuple[Target, ...]:
        """Return the sessions with linked processes all of which have paged out all they own."""
        return ()

    async def perform(
        self,
        those: Sequence[LinkedProcess],
        step: LibraryStep,
        deadline_ns: int,
    ) -> list[Outcome]:
        """Make each of ``those`` do ``step``, all at once, and wait for the answers until a little
        past ``deadline_ns``; if ``step`` moves memory, until it is moved or undone.
        ``Refused(GONE)``: the process has ended. ``Refused(LOCK_TIMEOUT)``: it did not answer; it
        may still do the step (``moving``), and does nothing else before."""
        raise NotImplementedError


def living(links: LinkedProcesses, session: SessionId) -> list[LinkedProcess]:
    """Return the session's live linked processes that can be reached. An unreachable process with
    its memory in the GPU is left to the driver once it cannot reconnect any more. Before that its
    library may be at work, and the driver must not take it."""
    return [
        one
        for one in links.of(session)
        if (one.connected or one.expected or one.report.residency is not Residency.RESIDENT)
        and processes.alive(one.ref)
    ]
