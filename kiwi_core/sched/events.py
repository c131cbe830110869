"""Events: every report to the scheduler of one GPU. Past tense, never an order.

The daemon makes events from wire messages, from outcomes of pager operations and from its timer;
only ``Scheduler.handle(event, now_ns)`` takes them. They are tagged structs, so that the journal
can list them as they are.
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

    ``mid_burst`` is true for a session that a previous daemon suspended in the middle of a burst.
    Such a session joins the queue without asking, with ``burst``.
    """

    session: SessionId
    residency: Residency = Residency.RESIDENT
    resident_bytes: int = 0
    paged_out_bytes: int = 0
    mid_burst: bool = False
    burst: int = 0
    priority: Priority | None = None
    """``None``: normal, or as before if the session is known."""
    guarded: bool | None = None
    """See ``GuardChanged``; ``None``: true, or as before."""
    kept_out: str = ""
    """See ``SuspensionRequested``; "": not kept out, or as before."""
    owner: str = ""
    """The owner that turns count for: sessions of one owner share its turns
    (``Config.turns_by_owner``). "": it is its own owner, or as before.
    """


class PriorityChanged(_Event, frozen=True, kw_only=True):
    """An admin has put the session into another priority class."""

    session: SessionId
    priority: Priority


class SessionLost(_Event, frozen=True, kw_only=True):
    """The session's process is dead, for whatever reason. Its GPU memory is freed with it, but the
    bytes that a running operation holds stay counted until that operation has reported."""

    session: SessionId


class SessionDetached(_Event, frozen=True, kw_only=True):
    """The process lives on but leaves Kiwi (``%kiwi off``, clean goodbye). The session is forgotten
    once its memory is back and its process is free."""

    session: SessionId


class GuardChanged(_Event, frozen=True, kw_only=True):
    """``guarded`` is whether all processes of the session that use the GPU have Kiwi's gate before
    the driver (true until this event). Without the gate the session is never suspended in
    mid-burst.
    """

    session: SessionId
    guarded: bool


class SessionStopped(_Event, frozen=True, kw_only=True):
    """A process of the session does not run (a signal, a frozen control group, a debugger).
    ``why`` completes "it is ..." for users."""

    session: SessionId
    why: str


class SessionContinued(_Event, frozen=True, kw_only=True):
    """All processes of the session run again."""

    session: SessionId


# --- bursts (a burst = one GPU cell, or one GPU program) ----------------------------------------


class LeaseRequested(_Event, frozen=True, kw_only=True):
    """``burst`` counts up per session. A request for the burst that already runs (a client that
    reconnected) is granted again and changes nothing else."""

    session: SessionId
    burst: int


class LeaseWithdrawn(_Event, frozen=True, kw_only=True):
    """The user interrupted the wait."""

    session: SessionId
    burst: int


class BurstEnded(_Event, frozen=True, kw_only=True):
    """The GPU cell is over. Its memory may stay in the GPU until another session needs the room.

    ``ended_ns`` is when its program said so, on the clock of ``handle``'s ``now_ns``: a reading of
    its memory that began earlier is stale. ``None``: the memory on record is what it has left."""

    session: SessionId
    burst: int
    ended_ns: int | None = None


class BurstLingered(_Event, frozen=True, kw_only=True):
    """The cell is over but threads or asyncio tasks that it started live on. The burst goes on
    until ``BurstEnded``, or until the GPU has been idle for it long enough, or, where ``busy`` is
    unknown, at most until the end of the running quantum."""

    session: SessionId
    burst: int


class ReleaseRequested(_Event, frozen=True, kw_only=True):
    """The user wants this session's memory out of the GPU now (``%kiwi release``). Ignored during
    a burst."""

    session: SessionId


class SuspensionRequested(_Event, frozen=True, kw_only=True):
    """A user wants the session out of the GPU until ``ResumptionRequested`` (``kiwi suspend``).
    If it has the GPU, its turn ends now, as at the end of its quantum; it is paged out and gets no
    turn. ``by`` says who asked, in words for users, without a name: "an admin"."""

    session: SessionId
    by: str


class ResumptionRequested(_Event, frozen=True, kw_only=True):
    """The session may have the GPU again (``kiwi resume``): its burst, if any, joins the queue."""

    session: SessionId


class UseExpected(_Event, frozen=True, kw_only=True):
    """A hint: this session's program is about to be used (its notebook became visible, a user
    types in it). The session is paged in if that hinders no other session; see ``hints``."""

    session: SessionId


class ResidueWanted(_Event, frozen=True, kw_only=True):
    """A call of the session's program, which needs no lease, waits for what the driver has taken of
    its GPU memory (``MemoryObserved.taken``)."""

    session: SessionId


class RoomWanted(_Event, frozen=True, kw_only=True):
    """The session's program found no GPU memory for an allocation of ``bytes`` and waits for the
    answer to ``request`` (a number that the session uses for no other request meanwhile)."""

    session: SessionId
    request: int
    bytes: int


class RoomNoLongerWanted(_Event, frozen=True, kw_only=True):
    """The asking program has ended or given up."""

    session: SessionId
    request: int


# --- observations and settings ------------------------------------------------------------------


class MemoryObserved(_Event, frozen=True, kw_only=True):
    """A reading of NVML and the driver. ``resident_bytes`` has the sessions that could be read
    (contexts included), ``busy`` those whose GPU use in the last interval is known. ``free_bytes``
    is that of the whole GPU. ``began_ns`` is when the reading began, on the clock of ``handle``'s
    ``now_ns``; ``None``: just now. Numbers from before the end of an operation are stale.
    ``allocated`` lists sessions that have allocations by their libraries' count; ``unsized`` those
    whose bytes are only a share of what is in use, because nobody says what each program has;
    ``at_large`` those that have memory in the GPU and that the driver has not locked; ``owned``
    those in ``resident_bytes`` whose libraries own and move their memory; ``nowhere`` those that
    have memory neither in the GPU nor anywhere else. ``taken`` has, for sessions whose libraries
    have their memory out, what the driver has taken of the rest (contexts, mostly)."""

    free_bytes: int
    resident_bytes: dict[SessionId, int] = {}
    busy: dict[SessionId, bool] = {}
    allocated: list[SessionId] = []
    unsized: list[SessionId] = []
    at_large: list[SessionId] = []
    owned: list[SessionId] = []
    nowhere: list[SessionId] = []
    taken: dict[SessionId, int] = {}
    began_ns: int | None = None


class NeedReported(_Event, frozen=True, kw_only=True):
    """The libraries of a session count what they allocate: it held ``need_bytes`` of GPU memory for
    a moment, contexts included, or would have, had there been room."""

    session: SessionId
    need_bytes: int


class HostBudgetObserved(_Event, frozen=True, kw_only=True):
    """``budget_bytes`` is how much system RAM all paged-out memory together may take."""

    budget_bytes: int


class SettingsChanged(_Event, frozen=True, kw_only=True):
    """``None`` leaves a setting as it is."""

    tq_ns: int | None = None
    anti_thrash: AntiThrash | None = None
    policy: str | None = None
    """One of ``policy.names()``; the maker of the event has checked it."""


class DeadlinePassed(_Event, frozen=True, kw_only=True):
    """The time of ``next_deadline_ns()`` has come. An early or repeated event does no harm."""


# --- outcomes of operations: each carries the id of the order that it answers --------------------


class Outcome(_Event, frozen=True, kw_only=True):
    """A report about an operation."""

    op: OpId


class Suspended(Outcome, frozen=True, kw_only=True):
    """Answers ``Suspend``: the process is suspended, its memory is still in the GPU.

    ``resident_bytes`` was read meanwhile, so it is exact; ``None``: it could not be read.
    """

    resident_bytes: int | None = None


class SuspendRefused(Outcome, frozen=True, kw_only=True):
    reason: Reason
    detail: str = ""


class PagedOut(Outcome, frozen=True, kw_only=True):
    """Answers ``PageOut``: the memory is in system RAM, the process waits.

    ``moved_bytes`` is all that is out now, including what an earlier page-out moved.
    ``stays_bytes`` is still in the GPU: mostly contexts and memory that a library cannot own, which
    only the driver can move.
    """

    moved_bytes: int
    elapsed_ns: int
    stays_bytes: int = 0


class PageOutRefused(Outcome, frozen=True, kw_only=True):
    """Answers ``PageOut``: nothing changed; the process runs or is free to run as before."""

    reason: Reason
    detail: str = ""


class PageOutLost(Outcome, frozen=True, kw_only=True):
    """Answers ``PageOut``: the driver says that the contents are gone."""

    detail: str = ""


class PagedIn(Outcome, frozen=True, kw_only=True):
    """Answers ``PageIn``: the memory is back at its addresses and the process runs."""

    moved_bytes: int
    elapsed_ns: int


class PageInRefused(Outcome, frozen=True, kw_only=True):
    """Answers ``PageIn``: nothing changed. The memory is still in system RAM; try again later."""

    reason: Reason
    detail: str = ""


class PageInLost(Outcome, frozen=True, kw_only=True):
    """Answers ``PageIn`` and ``BringResidueBack``: the contents are gone."""

    detail: str = ""


class ResidueBack(Outcome, frozen=True, kw_only=True):
    """Answers ``BringResidueBack``: the driver has nothing of the session any more. What its
    libraries have out is still out."""

    moved_bytes: int
    elapsed_ns: int


class ResidueRefused(Outcome, frozen=True, kw_only=True):
    """Answers ``BringResidueBack``: nothing changed; try again later."""

    reason: Reason
    detail: str = ""


class Resumed(Outcome, frozen=True, kw_only=True):
    """Answers ``Resume``: a process that was only suspended runs again."""


class ResumeFailed(Outcome, frozen=True, kw_only=True):
    """Answers ``Resume``: the process is still suspended; try again later. ``paged_out_bytes``
    above 0: its memory is in system RAM, because a page-out that an earlier daemon had begun went
    on."""

    reason: Reason
    detail: str = ""
    paged_out_bytes: int = 0


class OperationOverdue(Outcome, frozen=True, kw_only=True):
    """The operation has not reported by its deadline (a hung driver call). Its session gets no
    orders and its bytes stay counted until the operation reports after all."""


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
    | ResidueWanted
    | RoomWanted
    | RoomNoLongerWanted
    | MemoryObserved
    | HostBudgetObserved
    | NeedReported
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
    | ResidueBack
    | ResidueRefused
    | Resumed
    | ResumeFailed
    | OperationOverdue
)
