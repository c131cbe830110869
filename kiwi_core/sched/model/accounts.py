"""What each session has had and cost so far: sums that only grow, for whoever keeps accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kiwi_core.sched.events import PagedOut
from kiwi_core.sched.model.session import Want

if TYPE_CHECKING:
    from kiwi_core.sched.events import PagedIn
    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId


class Account(NamedTuple):
    """Of one session since it joined. Nanoseconds and bytes."""

    held_ns: int = 0
    """Had the lease. Sessions that run side by side are each counted in full."""
    waited_ns: int = 0
    """Waited for the lease, suspended or not yet begun."""
    suspended_ns: int = 0
    """The part of ``waited_ns`` after its bursts had begun."""
    moving_ns: int = 0
    """Its memory was moved, out or in: the driver's time, of moves that succeeded."""
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    bursts: int = 0
    """That began."""
    suspensions: int = 0

    def since(self, earlier: Account) -> Account:
        return Account(*(now - then for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: Account) -> Account:
        return Account(*(one + another for one, another in zip(self, other, strict=True)))


def account_of(session: Session, now_ns: int) -> Account:
    """Until now, what goes on included."""
    held_ns, waited_ns = session.held_ns, session.waited_ns
    suspended_ns = session.suspended_ns
    if session.want is Want.RUNNING or session.stopping:
        held_ns += now_ns - session.granted_ns
    elif session.want is Want.QUEUED:
        waiting_ns = now_ns - session.queued_ns
        waited_ns += waiting_ns
        suspended_ns += waiting_ns if session.mid_burst else 0
    return Account(
        held_ns,
        waited_ns,
        suspended_ns,
        session.moving_ns,
        session.moved_out_bytes,
        session.moved_in_bytes,
        session.bursts_begun,
        session.suspensions,
    )


class MovedBytes:
    """Say how many bytes each move moved. It is told of every move of every session, in order.

    Where the driver takes what a library had left, the page-out reports all that is out by then
    (that is what has to come back), so a plain sum would count the first page-out twice.
    """

    def __init__(self) -> None:
        self._out: dict[SessionId, int] = {}
        """By session: what it has in system RAM."""

    def of(self, session: SessionId, event: PagedOut | PagedIn) -> int:
        """Return what this move moved, in bytes."""
        before_bytes = self._out.pop(session, 0)
        if not isinstance(event, PagedOut):
            return event.moved_bytes
        self._out[session] = max(before_bytes, event.moved_bytes)
        return max(0, event.moved_bytes - before_bytes)

    def forget(self, session: SessionId) -> None:
        """Drop what is known of ``session``, which is gone."""
        self._out.pop(session, None)
