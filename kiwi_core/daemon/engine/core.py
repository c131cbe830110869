"""The heart of the daemon: feeds events to the scheduler, publishes its orders, runs operations.

There is exactly one timer: for the scheduler's next deadline or the next operation that becomes
overdue, whichever comes first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.engine.operations import OperationRunner
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Operation, PageOut, Suspend
from kiwi_core.states import Residency
from kiwi_core.units import NS_PER_S, ns_to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.steps import Subscriber
    from kiwi_core.daemon.engine.journal import Journal
    from kiwi_core.daemon.engine.observer import Observer
    from kiwi_core.daemon.links.guards import Guards
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.daemon.roster.roster import RosterSaver
    from kiwi_core.pager.api import Pager
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.states import Priority
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

_IN_BURST: Final = CallerError(
    "in-burst",
    "This session uses the GPU, waits for it, or is being brought back: nothing was moved.",
    "Try again when its cell is over, or end its turn with `kiwi suspend`.",
)
_NO_HOST_MEMORY: Final = CallerError(
    "no-host-memory",
    "System RAM has no room for what this session holds in the GPU: nothing was moved.",
    "Free system RAM, or restart a notebook that is no longer needed.",
)

_REFUSALS: Final = (
    ev.SuspendRefused, ev.ResumeFailed, ev.PageOutRefused, ev.PageInRefused, ev.ResidueRefused,
)  # fmt: skip


@dataclass(eq=False, repr=False)
class Core:
    """Feed each event to the scheduler and carry out the actions. Set the observer, the guards and
    the subscribers before the first event. The observer reads the memory of a session before its
    burst counts as over, because others get the room that it does not hold. The roster is saved
    before an operation begins that holds a process; for a page-out the pager saves it, once it
    knows the sizes, and what comes back is in it already."""

    scheduler: Scheduler
    _registry: SessionRegistry
    _pager: Pager
    _journal: Journal
    _roster: RosterSaver
    last_op: int
    observer: Observer = field(init=False)
    guards: Guards = field(init=False)
    operations: OperationRunner = field(init=False)
    subscribers: list[Subscriber] = field(default_factory=list)
    """The receivers of each step, in this order."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _timer: asyncio.TimerHandle | None = None
    _timer_ns: int | None = None
    _reading: set[SessionId] = field(default_factory=set)
    """Sessions being observed because the scheduler does not know what they have left in the
    GPU."""
    _winding_down: bool = False

    def __post_init__(self) -> None:
        def finished(event: ev.Event) -> None:
            op = event.op  # type: ignore[union-attr]  # only outcomes are posted
            facts: dict[str, object] = {"detail": getattr(event, "detail", "")}
            if isinstance(event, (ev.PagedOut, ev.PagedIn, ev.ResidueBack)):
                seconds = ns_to_seconds(event.elapsed_ns)
                facts = {"bytes": event.moved_bytes, "seconds": round(seconds, 3)}
            elif isinstance(event, _REFUSALS):
                facts = {"reason": event.reason.value, "detail": event.detail}
            log.info("outcome", op=op, what=type(event).__name__, **facts)
            self.operations.finished(op)
            self.feed(event)

        self.operations = OperationRunner(self._pager, finished)

    def feed(self, event: ev.Event) -> None:
        """Tell the scheduler what happened and carry out what it orders."""
        now_ns = clock.now_ns()
        actions = self.scheduler.handle(event, now_ns)
        # First, so that it is recorded before an action is performed, whatever a subscriber does.
        self._journal.record(now_ns, event, actions)
        step = Step(event, actions, self.scheduler.happenings, now_ns)
        for subscriber in self.subscribers:
            subscriber.after(step)
        self._rearm()
        if not self.scheduler.waiting:
            return
        for session in self.scheduler.unread:
            # Others may wait for it, because of what it has left in the GPU.
            record = self._registry.get(session)
            if record is not None and session not in self._reading:
                self._reading.add(session)
                self.observer.after_a_look(record.target, partial(self._reading.discard, session))
        self.observer.hurry()

    def joined(self, record: SessionRecord, priority: Priority | None) -> None:
        """Add a session. Its GPU memory must soon count as its own: until then it counts as held by
        a program outside Kiwi, which nobody can move.
        """
        self.feed(
            ev.SessionJoined(
                session=record.id,
                residency=Residency.RESIDENT,
                priority=priority,
                owner=record.owner,
            )
        )
        self.after_a_look(record, lambda: None)

    def in_burst(self, record: SessionRecord) -> bool:
        """Return whether ``record`` is in a burst, suspended or not, that was not reported as
        over."""
        known = self.scheduler.session(record.id)
        return known is not None and known.in_burst and known.burst != record.over_burst

    def end_burst(self, record: SessionRecord) -> None:
        """End the burst of ``record``; the scheduler receives the event once the memory that the
        session keeps was read."""
        known = self.scheduler.session(record.id)
        if known is None:
            return
        burst = record.over_burst = known.burst
        ended_ns = clock.now_ns()

        def ended() -> None:
            known = self.scheduler.session(record.id)
            if known is not None and known.burst == burst:  # else the next one has ended it
                self.feed(ev.BurstEnded(session=record.id, burst=burst, ended_ns=ended_ns))

        self.after_a_look(record, ended)

    def after_a_look(self, record: SessionRecord, go_on: Callable[[], None]) -> None:
        """Read the memory of ``record``, then call ``go_on``; do it at once if somebody waits."""
        self.observer.after_a_look(record.target, go_on)
        if self.scheduler.waiting:
            self.observer.hurry()

    def release(self, record: SessionRecord, answer: Callable[[CallerError | None], None]) -> None:
        """Release the memory of ``record`` after a look, so never before a burst's end that came
        earlier. ``answer`` gets the reason why nothing is moved, or ``None`` when the move is under
        way.
        """

        def feed() -> None:
            if not self.scheduler.may_release(record.id):
                answer(_IN_BURST)
                return
            self.feed(ev.ReleaseRequested(session=record.id))
            answer(None if self.scheduler.out_or_moving(record.id) else _NO_HOST_MEMORY)

        self.observer.after_a_look(record.target, feed)

    def wind_down(self) -> None:
        """Begin nothing new; running operations still report."""
        self._winding_down = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._journal.flush()

    # --- operations -----------------------------------------------------------------------------

    def after(self, step: Step) -> None:
        """Begin the operations in ``step``: the core is a subscriber, too."""
        for action in step.actions:
            if not isinstance(action, Operation):
                continue
            if self._winding_down:
                log.info("not begun, the daemon is leaving", op=action.op, session=action.session)
                continue
            self.last_op = max(self.last_op, action.op)
            record = self._registry.get(action.session)
            if isinstance(action, Suspend):
                self._roster.save()
            elif not isinstance(action, PageOut):
                self._roster.save_for(action.op, action.session)
            self._journal.flush()
            log.info(
                "operation", op=action.op, what=type(action).__name__, session=action.session,
                cause=action.cause,
            )  # fmt: skip
            if record is None:
                raise AssertionError(f"operation for a session that is not registered: {action}")
            self.operations.start(action, record.target)

    # --- the one timer --------------------------------------------------------------------------

    def _rearm(self) -> None:
        deadlines = (
            self.scheduler.next_deadline_ns(),
            self.operations.next_deadline_ns(),
            self.operations.next_look_ns(),
        )
        wanted_ns = min((d for d in deadlines if d is not None), default=None)
        if wanted_ns == self._timer_ns or self._winding_down:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wanted_ns
        self._timer = (
            None if wanted_ns is None else self._loop.call_at(wanted_ns / NS_PER_S, self._ring)
        )

    def _ring(self) -> None:
        self._timer = self._timer_ns = None
        now_ns = clock.now_ns()
        for session, why in self.operations.look(now_ns).items():
            self.guards.stopped(session, why)
        for overdue in self.operations.take_overdue(now_ns):
            log.error("operation overdue", op=overdue.op)
            self.feed(overdue)
        self.feed(ev.DeadlinePassed())
