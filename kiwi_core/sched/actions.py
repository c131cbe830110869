"""Actions: every order of the scheduler. Imperative, never a report.

The daemon performs them: ``Grant``, ``Notify``, ``RoomMade`` and ``RoomDenied`` become wire
messages; the pager runs the others and reports each in an outcome event with the same ``op``:

===========  ====================================================
``Suspend``  ``Suspended`` · ``SuspendRefused``
``Resume``   ``Resumed`` · ``ResumeFailed``
``PageOut``  ``PagedOut`` · ``PageOutRefused`` · ``PageOutLost``
``PageIn``   ``PagedIn`` · ``PageInRefused`` · ``PageInLost``
``Bring…``   ``ResidueBack`` · ``ResidueRefused`` · ``PageInLost``
any of them  ``OperationOverdue`` first, if it takes too long
===========  ====================================================

``Bring…`` is ``BringResidueBack``.
"""

from __future__ import annotations

from msgspec import Struct

from kiwi_core.states import Notice
from kiwi_core.units import OpId, SessionId


class _Action(Struct, frozen=True, kw_only=True, tag=True, tag_field="action"):
    session: SessionId
    cause: str = ""
    """The reason in a few words, for the story and the journal: ``"quantum ended, a waits"``."""


class Grant(_Action, frozen=True, kw_only=True):
    """Let the session use the GPU; its memory is in. ``quantum_ns`` is the time that it may expect
    to run before others get their turn. Sent again after each suspension in mid-burst."""

    burst: int
    quantum_ns: int


class Notify(_Action, frozen=True, kw_only=True):
    notice: Notice
    detail: str = ""


class RoomMade(_Action, frozen=True, kw_only=True):
    """Answer ``RoomWanted``: the program may try the allocation again."""

    request: int


class RoomDenied(_Action, frozen=True, kw_only=True):
    """Answer ``RoomWanted``: there is no room; ``detail`` is for users."""

    request: int
    detail: str


class _Operation(_Action, frozen=True, kw_only=True):
    op: OpId
    deadline_ns: int
    """When the operation counts as overdue, on the clock of ``handle``'s ``now_ns``."""


class Suspend(_Operation, frozen=True, kw_only=True):
    """Make the process wait at its next driver call; leave its memory in the GPU."""


class Resume(_Operation, frozen=True, kw_only=True):
    """Let a suspended process run again."""


class PageOut(_Operation, frozen=True, kw_only=True):
    """Suspend the process and move all its GPU memory to system RAM. It cannot run before a
    ``PageIn``."""


class PageIn(_Operation, frozen=True, kw_only=True):
    """Verify that there is room, bring the memory back, and resume the process."""

    need_bytes: int
    """GPU memory that the restore takes; the scheduler has reserved room for it."""


class BringResidueBack(_Operation, frozen=True, kw_only=True):
    """Have the driver bring back what a library had left in the GPU and the driver has taken since:
    mostly contexts. What the library has out stays out, and the process stays suspended."""

    need_bytes: int
    """GPU memory that it takes; the scheduler has reserved room for it."""


Operation = Suspend | Resume | PageOut | PageIn | BringResidueBack
RoomAnswer = RoomMade | RoomDenied
Action = Grant | Notify | RoomAnswer | Operation
