"""The messages between the daemon and the library that is preloaded into programs (role ``pager``).

Such a connection belongs to one process, not to a session; the daemon knows the session of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, field

from kiwi_core.wire.base import INTEGER_LIMIT, Count, Message

KINDS_MAX = 32
"""Limit for kinds of memory that a library cannot own; there are about ten."""

Kind = Annotated[str, Meta(max_length=64)]
Detail = Annotated[str, Meta(max_length=1024)]
"""Words for people; cut to screen length on arrival."""

Limit = Annotated[int, Meta(ge=-1, lt=INTEGER_LIMIT)]


LibraryState = Literal["resident", "held", "out"]
"""Where the memory that a library owns is. ``resident``: in the GPU; the gate lets calls pass, or
asks for the lease first. ``held``: in the GPU; the gate is closed and nothing is under way.
``out``: in system RAM, some of it at least; the gate is closed."""


class PagerAction(str, Enum):
    HOLD = "hold"
    """Close the gate, let calls under way end, then shut it: no call passes any more."""
    FREE = "free"
    """Open the gate again, if the last ``gate`` said so."""
    PAGE_OUT = "page-out"
    """Hold unless held, then page out."""
    PAGE_IN = "page-in"
    """Page in, then open the gate, if the last ``gate`` said so."""
    YIELD = "yield"
    """For a process whose gate is shut: make no call to the driver, which may now take the process,
    until another move or ``free`` is ordered, even if the daemon is gone."""


class PagerOutcome(str, Enum):
    MOVED = "moved"
    REFUSED = "refused"
    """Nothing changed."""
    LOST = "lost"
    """The contents are gone for good."""


# --- library to daemon --------------------------------------------------------------------------


class PagerState(Message, frozen=True, kw_only=True, tag="pager-state"):
    """The state of this process. Sent right after ``welcome``, at each change of ``state``, and now
    and then when bytes changed. ``unowned`` is what the library cannot move, by kind, and
    ``unowned_bytes`` what of it the driver may move: all but what is shared with others (``ipc``).
    ``arena_bytes`` is all the system RAM that it holds: what is paged out and what it reserves.
    ``held_bytes`` are the process's allocations in the GPU, by the library's own count (contexts
    apart), ``peak_bytes`` the most of all allocations since the last state, and ``lacked_bytes``
    what they would have come to since then, had an allocation not failed for lack of memory, or had
    one that took a share of what was free had the GPU for itself. ``ipc_refused`` counts the
    handles for sharing owned memory that the program has asked for in vain. No answer."""

    state: LibraryState
    resident_bytes: Count = 0
    paged_out_bytes: Count = 0
    unowned_bytes: Count = 0
    unowned: Annotated[dict[Kind, Count], Meta(max_length=KINDS_MAX)] = field(default_factory=dict)
    arena_bytes: Count = 0
    held_bytes: Count = 0
    peak_bytes: Count = 0
    lacked_bytes: Count = 0
    ipc_refused: Count = 0


class PagerDone(Message, frozen=True, kw_only=True, tag="pager-done"):
    """Answers ``pager-do`` of the same ``op``. ``reason`` is one of ``states.Reason``, if it was
    refused. ``bytes`` is what was moved; for a page-out, all that is out now."""

    op: Count
    outcome: PagerOutcome
    reason: Kind = ""
    detail: Detail = ""
    bytes: Count = 0
    elapsed_ns: Count = 0


class WantLease(Message, frozen=True, kw_only=True, tag="want-lease"):
    """A call that uses the GPU waits at the gate. Answered by ``gate`` when its turn comes.
    ``context``: a call of NVML waits, because the driver may have the process. Only the contexts
    have to come back for it; any order but ``yield`` says that they are. (A daemon that does not
    know the field gives the lease, which does for this, too.) ``waits``: false, if no call waits
    for the lease any more, because the user has interrupted it."""

    context: bool = False
    waits: bool = True


class WantRoom(Message, frozen=True, kw_only=True, tag="want-room"):
    """An allocation of ``bytes`` found no memory. Answered by ``room`` with the same ``request``, a
    number that the library chooses and does not use twice at once."""

    request: Count
    bytes: Count


# --- daemon to library --------------------------------------------------------------------------


class Gate(Message, frozen=True, kw_only=True, tag="gate"):
    """``open``: calls pass. If false, the next call waits and sends ``want-lease``. No answer."""

    open: bool


class PagerDo(Message, frozen=True, kw_only=True, tag="pager-do"):
    """Do ``action`` within this time, or refuse. Answered by ``pager-done``."""

    op: Count
    action: PagerAction
    within_ns: Count


class PagerLimits(Message, frozen=True, kw_only=True, tag="pager-limits"):
    """``arena_bytes`` is the system RAM that the library may hold in reserve, paged-out memory
    included; it soon gives back the rest. -1: the library's own rule. ``ahead``: a page-out is
    likely, so the library copies memory ahead into that reserve while it has no lease. No answer.
    """

    arena_bytes: Limit
    ahead: bool = False


class Room(Message, frozen=True, kw_only=True, tag="room"):
    """Answers ``want-room``. ``granted``: try again now. If false, ``detail`` says why not, and
    ``remedy`` what the program's user can do; the library prints it."""

    request: Count
    granted: bool
    detail: str = ""
    remedy: str = ""
