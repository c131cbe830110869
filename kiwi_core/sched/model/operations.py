"""The operation in progress on a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from kiwi_core.units import OpId


class Doing(Enum):
    # Enum's own hash is a Python function, and each operation looks members up in dicts.
    __hash__ = object.__hash__

    SUSPENDING = "suspending"
    RESUMING = "resuming"
    PAGING_OUT = "paging-out"
    PAGING_IN = "paging-in"
    RESIDUE_IN = "residue-in"


class OngoingOperation(Struct, eq=False):
    """An operation that has not reported yet. It is in ``State.ops`` under ``op`` exactly as long
    as the session's ``op`` field refers to it."""

    op: OpId
    doing: Doing
    started_ns: int
    ends_turn: bool = False
    """The operation ends the turn of a session, which counts as a holder until it reports."""
    hinted: bool = False
    """The operation follows from a hint; no session waits for it."""
    move_id: int = 0
    """The id of its entry in the history; 0 unless it moves memory."""
    overdue: bool = False


@dataclass(eq=False)
class Operations:
    """The part of ``Session`` about operations. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    op: OngoingOperation | None = None
    """The operation in progress."""
    moved_at_ns: int = -1
    """When its last operation reported; a reading from before that is stale."""

    @property
    def stuck(self) -> bool:
        return self.op is not None and self.op.overdue

    @property
    def turn_ending(self) -> bool:
        """Return whether its turn is being ended; it may run until the operation reports."""
        return self.op is not None and self.op.ends_turn

    def op_begins(self, op: OngoingOperation) -> None:
        self.op = op

    def op_reports(self, now_ns: int) -> None:
        self.op = None
        self.moved_at_ns = now_ns
