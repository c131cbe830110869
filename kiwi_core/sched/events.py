"""What happened: everything the scheduler of one GPU can be told. Past tense, never an order.

The daemon makes events from wire messages, from outcomes of pager operations and from its timer;
``Scheduler.handle(event, now_ns)`` is the only place that takes them. They are tagged structs, so
that the journal is simply the list of them.
"""

from __future__ import annotations

from msgspec import Struct

from kiwi_core.states import AntiThrash, Priority, Reason, Residency
from kiwi_core.units import OpId, SessionId


class _Event(Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    pass


# --- sessions -----------------------------------------------------------------------------------


class SessionJoined(_Event, frozen=True, kw_only=True):
    """A process became a session: it said hello, or a restarted daemon found it in its roster.

    ``mid_burst`` is true for a session that a previous daemon suspended in the middle of a burst:
    it is queued by itself, with ``burst``.
    """

    session: SessionId
    residency: Residency = Residency.RESIDENT
    resident_bytes: int = 0
    paged_out_bytes: int = 0
    mid_burst: bool = False
    burst: int = 0
    priority: Priority | None = None
    """``None``: normal, or what it was."""
    guarded: bool | None = None
    """See ``GuardChanged``; ``None``: it is, or what it was."""
    kept_out: str = ""
    """See ``SuspensionRequested``; "": nobody has asked for it, or what it was."""


class PriorityChanged(_Event, frozen=True, kw_only=True):
    """An admin has put the session into another class."""

    session: SessionId
    priority: Priority


class SessionLost(_Event, frozen=True, kw_only=True):
    """The session's process is dead (however it died). Its GPU memory goes with it, but what a
    running operation holds stays on the books until that operation has reported."""

    session: SessionId


class SessionDetached(_Event, frozen=True, kw_only=True):
    """The process lives on but leaves Kiwi (``%kiwi off``, clean goodbye). What is paged out or
    locked must come back before the session is forgotten."""

    session: SessionId


class GuardChanged(_Event, frozen=True, kw_only=True):
    """Whether every process of the session that uses the GPU has Kiwi's gate in front of the
    driver. Before this is told, it has. Without it the session is never stopped in mid-burst."""

    session: SessionId
    guarded: bool


class SessionStopped(_Event, frozen=True, kw_only=True):
    """A process of the session does not run (a signal, a frozen control group, a debugger).
    ``why`` completes "it is ..." for people."""

    session: SessionId
    why: str


class SessionContinued(_Event, frozen=True, kw_only=True):
    """All processes of the session run again."""

    session: SessionId


# --- bursts (a burst = one GPU cell, or one GPU program) ----------------------------------------


class LeaseRequested(_Event, frozen=True, kw_only=True):
    """``burst`` counts up per session; a request for the burst that already runs is a no-op grant
    again (a client that reconnected)."""

    session: SessionId
    burst: int


class LeaseWithdrawn(_Event, frozen=True, kw_only=True):
    """The user interrupted the wait."""

    session: SessionId
    burst: int


class BurstEnded(_Event, frozen=True, kw_only=True):
    """The GPU cell is over. The memory may stay in the GPU until somebody needs the room.

    ``ended_ns`` is when its program said so, on the clock of ``handle``'s ``now_ns``: a reading of
    its memory that began earlier is old. ``None``: what the books say is what it has left."""

    session: SessionId
    burst: int
    ended_ns: int | None = None


class BurstLingered(_Event, frozen=True, kw_only=True):
    """The cell is over but threads or asyncio tasks that it started live on: the burst goes on
    until ``BurstEnded``, or until the GPU has been idle for it long enough, or, where nobody can
    tell (``busy`` unknown), at most until the end of the running quantum."""

    session: SessionId
    burst: int


class ReleaseRequested(_Event, frozen=True, kw_only=True):
    """The user wants this session's memory out of the GPU now (``%kiwi release``). Only while it
    is not in a burst; ignored otherwise."""

    session: SessionId


class SuspensionRequested(_Event, frozen=True, kw_only=True):
    """Somebody wants the session out of the GPU until ``ResumptionRequested`` (``kiwi suspend``).
    If it has the GPU, its turn ends now, as at the end of its quantum; its memory goes out, and it
    gets no turn. ``by`` says who, in words for people that name nobody: "an admin"."""

    session: SessionId
    by: str


class ResumptionRequested(_Event, frozen=True, kw_only=True):
    """The session may have the GPU again (``kiwi resume``): a burst of it joins the queue's end."""

    session: SessionId


class UseExpected(_Event, frozen=True, kw_only=True):
    """A hint: this session's program is about to be used (its notebook became visible, somebody
    types in it). Brings its memory back if that is in nobody's way; see ``hints``."""

    session: SessionId


class RoomWanted(_Event, frozen=True, kw_only=True):
    """The session's program found no GPU memory for an allocation of ``bytes`` and waits for the
    answer to ``request`` (a number of its own, not used for anything else meanwhile)."""

    session: SessionId
    request: int
    bytes: int


class RoomNoLongerWanted(_Event, frozen=True, kw_only=True):
    """Who asked has gone, or has given up."""

    session: SessionId
    request: int


# --- observations and settings ------------------------------------------------------------------


class MemoryObserved(_Event, frozen=True, kw_only=True):
    """What NVML and the driver say right now. ``resident_bytes`` has the sessions that could be
    read (contexts included); ``busy`` those of which the GPU's use in the last interval is known.
    ``free_bytes`` is the whole GPU's. ``began_ns`` is when the reading began, on the clock of
    ``handle``'s ``now_ns``, if that is not just now: numbers from before an operation's end are
    old. ``at_large`` are those that have memory in the GPU and that the driver does not hold;
    ``owned``, of those in ``resident_bytes``, the ones whose memory their libraries own and move.
    ``nowhere``: those that have memory neither in the GPU nor anywhere else."""

    free_bytes: int
    resident_bytes: dict[SessionId, int] = {}
    busy: dict[SessionId, bool] = {}
    at_large: list[SessionId] = []
    owned: list[SessionId] = []
    nowhere: list[SessionId] = []
    began_ns: int | None = None


class HostBudgetObserved(_Event, frozen=True, kw_only=True):
    """How many bytes of system RAM all paged-out memory together may take."""

    budget_bytes: int


class SettingsChanged(_Event, frozen=True, kw_only=True):
    """``None`` leaves a setting as it is."""

    tq_ns: int | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    """One of ``policy.names()``; who makes the event has checked it."""


class DeadlinePassed(_Event, frozen=True, kw_only=True):
    """The time of ``next_deadline_ns()`` has come. Early or repeated ones do no harm."""


# --- outcomes of operations: each carries the id of the order that it answers --------------------


class _Outcome(_Event, frozen=True, kw_only=True):
    op: OpId


class Suspended(_Outcome, frozen=True, kw_only=True):
    """Answers ``Suspend``: the process is held, its memory is still in the GPU.

    ``resident_bytes`` was read while it was held, so it is exact; ``None``: could not be read.
    """

    resident_bytes: int | None = None


class SuspendRefused(_Outcome, frozen=True, kw_only=True):
    reason: Reason
    detail: str = ""


class PagedOut(_Outcome, frozen=True, kw_only=True):
    """Answers ``PageOut``: the memory is in system RAM, the process is held.

    ``moved_bytes`` is all that is out now, whatever an earlier page-out of it had moved already.
    ``stays_bytes`` is in the GPU still: mostly contexts and what a library cannot own, which takes
    the driver to move.
    """

    moved_bytes: int
    elapsed_ns: int
    stays_bytes: int = 0


class PageOutRefused(_Outcome, frozen=True, kw_only=True):
    """Nothing changed, and the process runs (or is free to run) as before."""

    reason: Reason
    detail: str = ""


class PageOutLost(_Outcome, frozen=True, kw_only=True):
    """The contents are gone; the driver says so."""

    detail: str = ""


class PagedIn(_Outcome, frozen=True, kw_only=True):
    """Answers ``PageIn``: the memory is back at its addresses and the process runs."""

    moved_bytes: int
    elapsed_ns: int


class PageInRefused(_Outcome, frozen=True, kw_only=True):
    """Nothing changed: it is still in system RAM and can be tried again."""

    reason: Reason
    detail: str = ""


class PageInLost(_Outcome, frozen=True, kw_only=True):
    detail: str = ""


class Resumed(_Outcome, frozen=True, kw_only=True):
    """Answers ``Resume``: a process that was only suspended runs again."""


class ResumeFailed(_Outcome, frozen=True, kw_only=True):
    """The process is still held; can be tried again. ``paged_out_bytes`` above 0: its memory turned
    out to be in system RAM, because a page-out that an earlier daemon had begun went on."""

    reason: Reason
    detail: str = ""
    paged_out_bytes: int = 0


class OperationOverdue(_Outcome, frozen=True, kw_only=True):
    """The operation has not reported by its deadline (a hung driver call). Its target is avoided
    and its bytes stay on the books until the operation reports after all."""


Event = (
    SessionJoined
    | PriorityChanged
    | SessionLost
    | SessionDetached
    | GuardChanged
    | SessionStopped
    | SessionContinued
    | LeaseRequested
    | LeaseWithdrawn
    | BurstEnded
    | BurstLingered
    | ReleaseRequested
    | SuspensionRequested
    | ResumptionRequested
    | UseExpected
    | RoomWanted
    | RoomNoLongerWanted
    | MemoryObserved
    | HostBudgetObserved
    | SettingsChanged
    | DeadlinePassed
    | Suspended
    | SuspendRefused
    | PagedOut
    | PageOutRefused
    | PageOutLost
    | PagedIn
    | PageInRefused
    | PageInLost
    | Resumed
    | ResumeFailed
    | OperationOverdue
)
