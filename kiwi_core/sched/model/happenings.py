"""Happenings: what the scheduler reports of each event beside its actions.

Each fact is recorded once, by the rule that makes it true. Everything that is kept or counted (the
history, the swaps, the accounts of the sessions, the metrics) is a fold over these records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from kiwi_core.states import HistoryKind
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from kiwi_core.sched.events import Outcome
    from kiwi_core.sched.model.accounts import Account
    from kiwi_core.sched.model.operations import Doing


class _Entry(Struct, frozen=True, gc=False):
    """A stretch of time in which a session did one thing; it has ended."""

    id: int
    serial: int
    """The number of the history's change that ended it; changes are its beginning and its end."""
    session: SessionId
    kind: HistoryKind
    began_ns: int
    ended_ns: int


class StretchEnded(_Entry, frozen=True, gc=False):
    """A session held the lease, or waited for it."""

    then: HistoryKind | None
    """How the turn went on; ``None``: it was over."""


class MoveEnded(_Entry, frozen=True, gc=False):
    """The memory of a session was paged out or in."""

    hinted: bool
    """A hint caused it."""
    ok: bool
    """False: it was refused or failed, and the next two are 0."""
    bytes_moved: int
    elapsed_ns: int
    """How long it took, as the pager measured it."""


class OperationFailed(NamedTuple):
    """An operation was refused, or the contents of the memory are lost."""

    doing: Doing
    outcome: Outcome


class OperationHung(NamedTuple):
    """An operation takes too long. It may still report."""

    doing: Doing


class SessionForgotten(NamedTuple):
    """A session was forgotten."""

    session: SessionId
    account: Account
    """Its final sums."""


Happening = StretchEnded | MoveEnded | OperationFailed | OperationHung | SessionForgotten
