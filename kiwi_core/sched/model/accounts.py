"""Sums of what each session has used and cost so far, for accounting. They only grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kiwi_core.sched.events import PagedOut
from kiwi_core.sched.model.turn import Want

if TYPE_CHECKING:
    from kiwi_core.sched.events import PagedIn
    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId


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


def account_of(session: Session, now_ns: int) -> Account:
    """Return the sums of ``session`` until ``now_ns``, including the turn or wait in progress."""
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
    """Computes how many bytes each move moved. It must see every move of every session, in order.

    Where the driver pages out what a library had left, the page-out reports all bytes that are out
    by then (all of them have to come back), so a plain sum would count the first page-out twice.
    """

    def __init__(self) -> None:
        self._out: dict[SessionId, int] = {}
        """Bytes that each session has in system RAM."""

    def of(self, session: SessionId, event: PagedOut | PagedIn) -> int:
        """Return how many bytes this move moved."""
        before_bytes = self._out.pop(session, 0)
        if not isinstance(event, PagedOut):
            return event.moved_bytes
        self._out[session] = max(before_bytes, event.moved_bytes)
        return max(0, event.moved_bytes - before_bytes)

    def forget(self, session: SessionId) -> None:
        """Drop the record of ``session``, which is gone."""
        self._out.pop(session, None)
