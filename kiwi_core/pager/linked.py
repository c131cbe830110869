"""What the pager needs from the daemon: the processes that have Kiwi's library loaded,
what each has told last, and a way to have it do something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kiwi_core.pager.api import Moved
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome, Target
    from kiwi_core.units import SessionId

Step = Literal["hold", "free", "page-out", "page-in", "yield"]


@dataclass(frozen=True)
class Told:
    """The last word of one library: where the memory is that it owns, and how much. ``unowned`` has
    by kind what it cannot move."""

    residency: Residency = Residency.RESIDENT
    resident_bytes: int = 0
    paged_out_bytes: int = 0
    unowned_bytes: int = 0
    unowned: Mapping[str, int] = field(default_factory=dict)
    arena_bytes: int = 0


class Linked(Protocol):
    """One process with the library. Attributes change at any time; ``told`` as a whole."""

    @property
    def ref(self) -> ProcessRef: ...
    @property
    def told(self) -> Told: ...
    @property
    def connected(self) -> bool: ...
    @property
    def owns(self) -> bool:
        """Its library owns the memory and moves it. Else it is only a gate: the driver moves the
        memory, while the gate is shut."""
        ...

    @property
    def expected(self) -> bool:
        """Not connected, but about to be: it can be told to do something, and waits a moment."""
        ...

    @property
    def moving(self) -> bool:
        """It was told to move its memory, and has not said yet how that came out."""
        ...


def all_out(link: Linked) -> bool:
    """Return whether all that the library owns is out, by its own word on this connection."""
    out = link.told.residency is Residency.PAGED_OUT and not link.told.resident_bytes
    return out and link.connected and not link.moving


class Links(Protocol):
    """Called in the loop."""

    def of(self, session: SessionId) -> tuple[Linked, ...]:
        """The session's processes that have the library, or had it when they were last heard of."""
        ...

    def everybody(self) -> tuple[Linked, ...]: ...

    def paged_out(self) -> tuple[Target, ...]:
        """Sessions that have linked processes, each of which is out with all that it owns."""
        ...

    async def perform(self, those: Sequence[Linked], step: Step, deadline_ns: int) -> list[Outcome]:
        """Has each of ``those`` do ``step``, all at once, and waits for the answers: for "hold",
        "free" and "yield" a little past ``deadline_ns`` at most, for a move longer (it may have to
        be undone). ``Refused(GONE)``: that process has ended. ``Refused(LOCK_TIMEOUT)``: it did not
        answer; it may still do what it was told (``moving``), and does nothing else before."""
        ...


async def all_yield(links: Links, those: Sequence[Linked], deadline_ns: int) -> set[ProcessRef]:
    """Tell those libraries to leave the driver alone, and return the processes of which it may take
    the rest of their memory now. A library that does not know of this might bring its memory back
    by itself when it has lost its daemon, and a call into the driver would kill the program then.
    """
    outcomes = await links.perform(those, "yield", deadline_ns)
    pairs = zip(those, outcomes, strict=True)
    return {link.ref for link, outcome in pairs if isinstance(outcome, Moved)}
