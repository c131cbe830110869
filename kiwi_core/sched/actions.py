"""What is to be done: everything the scheduler can order. Imperative, never a report.

The daemon performs them: ``Grant``, ``Notify``, ``RoomMade`` and ``RoomDenied`` become wire
messages, the others run in the pager and come back as an outcome event with the same ``op``:

===========  ====================================================
``Suspend``  ``Suspended`` · ``SuspendRefused``
``Resume``   ``Resumed`` · ``ResumeFailed``
``PageOut``  ``PagedOut`` · ``PageOutRefused`` · ``PageOutLost``
``PageIn``   ``PagedIn`` · ``PageInRefused`` · ``PageInLost``
any of them  ``OperationOverdue`` first, if it takes too long
===========  ====================================================
"""

from __future__ import annotations

from msgspec import Struct

from kiwi_core.states import Notice
from kiwi_core.units import OpId, SessionId


class _Action(Struct, frozen=True, kw_only=True, tag=True, tag_field="action"):
    session: SessionId
    cause: str = ""
    """Why, in a few words, for the story and the journal: ``"quantum ended, a waits"``."""


class Grant(_Action, frozen=True, kw_only=True):
    """The session may use the GPU; its memory is in. ``quantum_ns`` is what it may count on
    before others get their turn. Sent again after each suspension in mid-burst."""

    burst: int
    quantum_ns: int


class Notify(_Action, frozen=True, kw_only=True):
    notice: Notice
    detail: str = ""


class RoomMade(_Action, frozen=True, kw_only=True):
    """Answers ``RoomWanted``: the allocation may be tried again."""

    request: int


class RoomDenied(_Action, frozen=True, kw_only=True):
    """Answers ``RoomWanted``: there will be none; ``detail`` is for people."""

    request: int
    detail: str


class _Operation(_Action, frozen=True, kw_only=True):
    op: OpId
    deadline_ns: int
    """When it counts as overdue, on the clock of ``handle``'s ``now_ns``."""


class Suspend(_Operation, frozen=True, kw_only=True):
    """Hold the process at its next driver call; leave its memory in the GPU."""


class Resume(_Operation, frozen=True, kw_only=True):
    """Let a process go that ``Suspend`` holds."""


class PageOut(_Operation, frozen=True, kw_only=True):
    """Hold the process and move all its GPU memory to system RAM. It cannot run before a
    ``PageIn``."""


class PageIn(_Operation, frozen=True, kw_only=True):
    """Bring its memory back, verified room first, and let the process go."""

    need_bytes: int
    """What the restore takes in the GPU; the room for it is reserved in the scheduler's books."""


Operation = Suspend | Resume | PageOut | PageIn
RoomAnswer = RoomMade | RoomDenied
Action = Grant | Notify | RoomMade | RoomDenied | Suspend | Resume | PageOut | PageIn
