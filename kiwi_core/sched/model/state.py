"""The state of the scheduler of one GPU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.sched.actions import Notify
from kiwi_core.sched.model.derived import Derived
from kiwi_core.sched.model.happenings import SessionForgotten
from kiwi_core.sched.model.history import History
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.model.speed import SwapSpeed
from kiwi_core.sched.model.stories import Stories
from kiwi_core.states import AntiThrash, Notice

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.model.operations import OngoingOperation
    from kiwi_core.sched.model.policy import Policy, TurnSettings
    from kiwi_core.sched.model.session import RoomRequest
    from kiwi_core.units import OpId, SessionId


@dataclass(frozen=True, slots=True)
class PlaceKept:
    """The place of an idle session, which is kept in case its user's next cell comes."""

    session: Session
    until_ns: int
    """When its memory goes out unless its user has asked before."""
    ends_ns: int
    """When its tenancy ends, however often its user asks."""


@dataclass(slots=True, eq=False, kw_only=True)
class State(Derived):
    """Everything that the scheduler of one GPU knows. The scheduler creates it, and a forecast
    copies it.

    As with ``Session``, each of its parts, the base classes, is in a module of its own, which alone
    writes the fields of the part.
    """

    config: Config
    policy: Policy
    turn_settings: TurnSettings
    next_op: int
    """The id of the next operation."""
    margin_bytes: int = field(init=False)

    now_ns: int = 0
    """The time of the event being handled."""
    actions: list[Action] = field(default_factory=list)
    """The actions that the event being handled has led to, in order."""
    wake_ns: int | None = None
    """When the settle pass must run again even if nothing happens; always after ``now_ns``."""

    sessions: dict[SessionId, Session] = field(default_factory=dict)
    """All sessions by id, including those that are gone but not yet forgotten."""
    queue: OrderedDict[SessionId, Session] = field(default_factory=OrderedDict)
    """The sessions that wait, in order of arrival. A session that was suspended in mid-burst
    arrived when it was suspended."""
    kept_out: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions that are to stay out of the GPU, whatever they want, in the order in which this
    was requested. None of them is in the queue."""
    chosen: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions in the queue whose turn has begun: they are being brought in, and once in the
    GPU they are considered before all others."""
    out_for: dict[SessionId, SessionId] = field(default_factory=dict)
    """The waiter for which a session was paged out (``rules.tenancy``), by that session's id; until
    a session that has come in is granted the lease, or the waiter leaves the queue."""
    contended_ns: int = 0
    """When the queue last ceased to be empty."""
    keeps: PlaceKept | None = None
    """The place in the GPU that is kept although a waiter needs it, as of the last settle pass."""
    stays_ns: dict[SessionId, int] = field(default_factory=dict)
    """Only in a forecast: until when a session keeps its place, its next cells included."""
    runners: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions that hold the lease and are not being suspended."""
    stopped: set[SessionId] = field(default_factory=set)
    """The sessions whose process does not run (``Session.stopped``)."""
    ops: dict[OpId, Session] = field(default_factory=dict)
    """The sessions of operations that have not reported, hung ones included."""
    lingerers: dict[SessionId, Session] = field(default_factory=dict)
    """At least the sessions that run and linger; the settle pass drops the others."""
    cramped: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions that cannot be paged out because their own job or container has too little RAM
    (``Session.cramped_ns``)."""
    unread: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions that gave up the lease and whose remaining GPU memory has not been read
    since."""
    room_requests: dict[tuple[SessionId, int], RoomRequest] = field(default_factory=dict)
    """The requests for room by session and number, oldest first."""
    hinted: Session | None = None
    """The session that is about to be used: room is being made for it, or will be in this settle
    pass."""

    residues_look_ns: int = 0
    """When all residues are looked at again (``rules.residues``)."""
    moved_at_ns: int = -1
    """When an operation last began or reported."""
    speed: SwapSpeed = field(default_factory=SwapSpeed)
    stories: Stories = field(init=False)
    history: History = field(init=False)
    ignored_events: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.margin_bytes = max(
            config.room_margin_min_bytes, int(self.total_bytes * config.room_margin_fraction)
        )
        self.see_outside(0)
        self.set_anti_thrash(self.anti_thrash)
        self.serialise(self.anti_thrash is AntiThrash.ALWAYS)
        self.stories = Stories(config.story_max)
        self.history = History(config.history_max, config.history_kept_ns)
        self.policy.adopt(self)

    # --- the event being handled ----------------------------------------------------------------

    def handle(self, now_ns: int) -> list[Action]:
        """Begin with an event at ``now_ns``; return the list of the actions that follow from it."""
        self.now_ns = now_ns
        self.wake_ns = None
        if self.history.happenings:
            self.history.happenings = []
        actions: list[Action] = []
        self.actions = actions
        self.keeps = None
        return actions

    def ignore(self) -> None:
        """Count the event as ignored: it is late, or of something unknown."""
        self.ignored_events += 1

    def wake_at(self, at_ns: int) -> None:
        """Have the settle pass run again at ``at_ns`` at the latest."""
        if at_ns > self.now_ns and (self.wake_ns is None or at_ns < self.wake_ns):
            self.wake_ns = at_ns

    # --- operations -----------------------------------------------------------------------------

    def op_begins(self, session: Session, op: OngoingOperation) -> None:
        session.op_begins(op)
        self.moved_at_ns = self.now_ns
        self.ops[op.op] = session
        self.recount(session)

    def op_reports(self, session: Session, op: OngoingOperation) -> None:
        """Record that ``op`` of ``session`` has reported. The caller records the outcome."""
        del self.ops[op.op]
        session.op_reports(self.now_ns)
        self.moved_at_ns = self.now_ns

    # --- residues -------------------------------------------------------------------------------

    def look_at_residues(self, at_ns: int) -> None:
        """Have the residues looked at in the first settle pass from ``at_ns`` on."""
        self.residues_look_ns = at_ns

    # --- too little RAM -------------------------------------------------------------------------

    def cramp(self, session: Session) -> None:
        """Record that its own job or container has too little RAM for ``session`` to be paged
        out."""
        session.is_cramped(self.now_ns)
        self.cramped[session.id] = session

    def uncramp(self, session: Session) -> None:
        """Record that ``session`` can be paged out, as far as is known."""
        if session.cramped_ns >= 0:
            session.is_cramped_no_more()
            del self.cramped[session.id]

    # --- sessions -------------------------------------------------------------------------------

    def known(self, session_id: SessionId) -> Session | None:
        """Return the living session with this id. If there is none, count its event as ignored and
        return ``None``."""
        session = self.sessions.get(session_id)
        if session is None or session.gone:
            self.ignore()
            return None
        return session

    def now_runs(self, session: Session) -> None:
        """Record that ``session``, already out of the queue, holds the lease."""
        if session.takes_its_place(self.now_ns):
            self.out_for = {}
        self.runners[session.id] = session
        self.usage.runs(session)
        self.policy.served(session)
        if session.lingering:
            self.lingerers[session.id] = session

    def runs_no_more(self, session: Session) -> None:
        """Record that ``session`` gave up the lease or is being suspended."""
        del self.runners[session.id]
        self.usage.stops(session)

    def line_up(self, session: Session) -> None:
        """Put ``session`` at the tail of the queue, or beside the queue if it is kept out. All that
        the policy reads must be up to date."""
        if session.kept_out:
            session.block(Notice.KEPT_OUT, f"by {session.kept_out}")
            self.notify(session, Notice.KEPT_OUT, session.blocked_detail)
            return
        if not self.queue:
            self.usage.somebody_waits(self.now_ns)
            self.contended_ns = self.now_ns
        self.queue[session.id] = session
        self.policy.joined(self, session)

    def leave_line(self, session: Session) -> None:
        if session.kept_out:
            return
        self.policy.left(self, session)
        del self.queue[session.id]
        self.chosen.pop(session.id, None)
        if self.out_for:
            self.out_for = {out: id_ for out, id_ in self.out_for.items() if id_ != session.id}
        if not self.queue:
            self.usage.nobody_waits(self.now_ns)

    def choose(self, session: Session) -> None:
        """Begin the turn of a session in the queue: it is brought in."""
        self.chosen[session.id] = session

    def keep_place(self, kept: PlaceKept) -> None:
        """Let a waiter wait while the place of another session is kept, and have the settle pass
        run again when that is over."""
        self.keeps = kept
        self.wake_at(kept.until_ns)

    def foresee_stay(self, session: Session, until_ns: int) -> None:
        """In a forecast: let ``session`` keep its place until then."""
        self.stays_ns[session.id] = until_ns

    def goes_out_for(self, session: Session, waiter: Session) -> None:
        """Record that ``session`` is paged out to make room for ``waiter``."""
        self.out_for[session.id] = waiter.id

    def choose_no_more(self, session: Session) -> None:
        """Let ``session`` wait in the queue like others, if it was chosen."""
        self.chosen.pop(session.id, None)

    def lingers(self, session: Session) -> None:
        """Record that its cell is over, but not what the cell started."""
        session.cell_ends(self.now_ns)
        self.lingerers[session.id] = session

    def drop_lingerer(self, session: Session) -> None:
        del self.lingerers[session.id]

    def process_stops(self, session: Session, why: str) -> None:
        session.process_stops(why)
        session.stands_still(self.now_ns)
        self.stopped.add(session.id)

    def process_continues(self, session: Session) -> None:
        session.process_runs()
        session.goes_on(self.now_ns)
        session.forget_refusals_while_stopped()
        self.stopped.discard(session.id)

    # --- readings -------------------------------------------------------------------------------

    def left_gpu(self, session: Session, left_ns: int) -> None:
        """Record that ``session`` no longer uses the GPU and its memory has not been read since."""
        session.was_left_at(left_ns)
        if session.unread and self.read_ns < left_ns:
            self.unread[session.id] = session

    def memory_read(self, session: Session, at_ns: int) -> None:
        """Record that the session's memory was read at ``at_ns``."""
        session.was_read_at(at_ns)
        if self.unread and not session.unread:
            self.unread.pop(session.id, None)

    def all_read(self, began_ns: int, outside_bytes: int) -> None:
        """Record a reading of the whole GPU during which nothing moved. What sessions left in the
        GPU before counts as outside Kiwi until their own memory is read."""
        self.see_all(began_ns, outside_bytes)
        for session in tuple(self.unread.values()):
            if session.left_ns <= began_ns:
                del self.unread[session.id]

    # --- coming and going -----------------------------------------------------------------------

    def join(self, session_id: SessionId, owner: str) -> Session:
        session = Session(session_id, owner)
        session.story = self.stories.begin(session_id)
        self.sessions[session_id] = session
        return session

    def forget_leaver(self, session: Session) -> None:
        """Forget a session that left Kiwi and lives on: from now on its GPU memory counts as held
        by a program outside Kiwi."""
        self.tell(session, "left Kiwi")
        self.see_outside(self.outside_bytes + session.resident_bytes)
        self.forget(session)

    def process_died(self, session: Session) -> None:
        """Forget ``session``, but only count it until its operation in progress has reported."""
        if session.op is None:
            self.forget(session)
        else:
            session.gone = True
            self.refresh(session)

    def forget(self, session: Session) -> None:
        """Remove ``session`` from all records; its story stays a while."""
        final = session.account(self.now_ns)
        self.history.happenings.append(SessionForgotten(session.id, final))
        session.no_longer_counts()
        session.gone = True
        self.refresh(session)
        self.uncramp(session)
        self.unread.pop(session.id, None)
        self.stopped.discard(session.id)
        self.out_for.pop(session.id, None)
        del self.sessions[session.id]
        self.stories.end(session.id)

    # --- small helpers for the other modules ----------------------------------------------------

    @property
    def at_work(self) -> tuple[SessionId, ...]:
        """The sessions that hold the lease or are being suspended."""
        ending = (s.id for s in self.ops.values() if s.turn_ending and not s.gone)
        return (*self.runners, *ending)

    @property
    def holders(self) -> int:
        """The number of runners and of sessions being suspended that may still run. One whose
        operation hangs is not counted: no session waits for it."""
        holders = len(self.runners)
        for session in self.ops.values():
            op = session.op
            if op is not None and op.ends_turn and not op.overdue:
                holders += 1
        return holders

    def swap_floor_ns(self, session: Session) -> int:
        """Return how long ``session`` runs at least for what its swap costs; 0 while all fit
        together."""
        if self.active_need_bytes + self.margin_bytes <= self.capacity_bytes:
            return 0
        swap_ns = int(session.footprint_bytes * self.speed.round_trip_ns_per_byte)
        factor = self.turn_settings.swap_floor_factor
        return swap_ns if factor == 1.0 else round(factor * swap_ns)

    def moving_ns(self, session: Session) -> int:
        """Return the time to page ``session`` out and in again, whether or not it has to move."""
        return self.speed.round_trip_ns(session.footprint_bytes)

    def fit_together(self, one: Session, other: Session) -> bool:
        """Return whether both needs fit into the GPU if all other sessions are paged out."""
        return one.need_bytes + other.need_bytes + self.margin_bytes <= self.capacity_bytes

    def rivals(self, session: Session) -> int:
        """Return how many turns of others may come before a turn of ``session``. This is the number
        of other sessions that wait or run. If its owner has k of them, it is k turns of each owner
        less one, if that is more."""
        owners = self.usage.owners
        return max(self.active, len(owners) * owners.get(session.owner, 1)) - 1

    def quantum_ns(self, session: Session) -> int:
        return self.policy.quantum_ns(self, session)

    def typical_swap_ns(self) -> int:
        """Return the time to page a session of the mean size of those that wait or run out and in
        again; 0 while all fit together."""
        if self.active_need_bytes + self.margin_bytes <= self.capacity_bytes:
            return 0
        return self.speed.round_trip_ns(self.active_need_bytes // max(1, self.active))

    def tell(self, session: Session, text: str, *arguments: object) -> None:
        """Add a line to the session's story."""
        session.story.append((self.now_ns, text, arguments))

    def notify(self, session: Session, notice: Notice, detail: str = "", cause: str = "") -> None:
        self.actions.append(Notify(session=session.id, notice=notice, detail=detail, cause=cause))
