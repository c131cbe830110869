"""Gate orders, and calls at a gate that ask for the lease.

The gate of a linked process is open while its session holds the lease. Otherwise it is *armed*
(``Gate(open=False)``): a call at an armed gate requests the lease. (The library *closes* its gate
only for a move.) The burst of such a call belongs to the daemon, not to the client, and ends when
the GPU has been idle for it long enough (it *lingers* from its grant on).

A program that has not started the driver gets a turn for a call at its gate, too. No call of such a
program can be inside the driver: the gate holds calls that come after ``cuInit``. Its turn is
*empty*, and would still last until the GPU has been idle for it for seconds. So it ends as soon as
somebody waits, and the program's next request is delayed. A program that has started the driver is
never delayed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant
from kiwi_core.wire.pager import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.links.links import Links
    from kiwi_core.daemon.roster.registry import SessionRegistry
    from kiwi_core.daemon.sessions.bursts import Bursts
    from kiwi_core.daemon.sessions.rooms import RoomRequests
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

SWEEP_DELAY_S = 0.005
"""Delay of a look at the gates of sessions that an event does not name: a burst of theirs may have
ended with it, and nobody waits for that."""

CONTEXT_PATIENCE_S: Final = 5.0
"""How long a call of NVML waits for its context alone. Then there is no room for that: only a turn
makes room."""

CONTEXT_BACKOFF_S: Final = 4.0
CONTEXT_BACKOFF_MAX_S: Final = 600.0
"""The delay between two turns of a session that only calls of NVML have asked for. It doubles from
the first to the longest one, until the session asks for the GPU: a monitor that reads NVML each
second must not take turns with others for ever."""

BACKOFF_S: Final = 0.25
"""Delay of the request after the first empty turn; doubles with each one. An honest program that is
taken for an idle one loses no more than people notice."""

BACKOFF_MAX_S: Final = 16.0
"""Longest delay: even a hundred such programs together cost others only a look each, six times a
second, and none waits for ever."""


class EmptyTurns:
    """The delay that each session owes for its empty turns. ``now_s`` is any steady clock in
    seconds; ``first_s`` and ``most_s`` are the first delay and the longest one."""

    def __init__(self, first_s: float = BACKOFF_S, most_s: float = BACKOFF_MAX_S) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._owed: dict[SessionId, tuple[float, float]] = {}
        """For each session, the delay after its next empty turn, and the time until which it waits
        now."""

    def was_empty(self, session: SessionId, now_s: float) -> None:
        """Record an empty turn that has just ended."""
        backoff_s, _ = self._owed.get(session, (self._first_s, now_s))
        self._owed[session] = (min(self._most_s, 2 * backoff_s), now_s + backoff_s)

    def forget(self, session: SessionId) -> None:
        """Forget the empty turns of a session that has used the GPU, or has left."""
        self._owed.pop(session, None)

    def left_s(self, session: SessionId, now_s: float) -> float:
        """Return how long the session's next request still has to wait; 0: not at all."""
        _, until_s = self._owed.get(session, (self._first_s, now_s))
        return max(0.0, until_s - now_s)


@dataclass(eq=False, repr=False)
class Gates:
    """A subscriber (``steps``). ``uses_driver`` returns whether the driver knew a process of a
    session at its last look."""

    _core: Core
    _links: Links
    _registry: SessionRegistry
    _bursts: Bursts
    _rooms: RoomRequests
    _uses_driver: Callable[[SessionId], bool]
    _empty_turns: EmptyTurns = field(default_factory=EmptyTurns)
    _on_trial: dict[SessionId, int] = field(default_factory=dict)
    """Bursts that a call at the gate caused, by session, of programs that have not been seen to use
    the driver."""
    _looked_at: set[SessionId] = field(default_factory=set)
    """Sessions on trial that are being observed, because somebody waits."""
    _put_off: set[SessionId] = field(default_factory=set)
    """Sessions whose request is made once their back-off is over."""
    _context_turns: EmptyTurns = field(
        default_factory=lambda: EmptyTurns(CONTEXT_BACKOFF_S, CONTEXT_BACKOFF_MAX_S)
    )
    _contexts_due: set[SessionId] = field(default_factory=set)
    """Sessions with a timer after which the lease is requested for their contexts."""
    _sweep_due: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    # --- after each event -----------------------------------------------------------------------

    def after(self, step: Step) -> None:
        """Answer, and give orders to gates. Costs nothing while no library is linked."""
        event, actions = step.event, step.actions
        self._rooms.answer(actions)
        if not self._links and not self._on_trial:
            return
        named = {action.session for action in actions}
        if (its := getattr(event, "session", None)) is not None:
            named.add(its)
        self._order(named)
        if not self._sweep_due:

            def sweep() -> None:
                self._sweep_due = False
                self._order(tuple(self._links.sessions))

            self._sweep_due = True
            self._loop.call_later(SWEEP_DELAY_S, sweep)
        if isinstance(event, ev.SessionDetached):
            self._rooms.session_leaves(event.session)
        if isinstance(event, (ev.SessionDetached, ev.SessionLost)):
            self._on_trial.pop(event.session, None)
            self._empty_turns.forget(event.session)
            self._context_turns.forget(event.session)
        for action in actions:
            record = self._registry.get(action.session)
            if isinstance(action, Grant) and record is not None and record.own_burst:
                self._on_trial[action.session] = action.burst
        if not self._core.scheduler.waiting:
            return
        # Check whether the sessions on trial can use their turns at all, as somebody waits.
        for session, burst in tuple(self._on_trial.items()):
            record, known = self._registry.get(session), self._core.scheduler.session(session)
            current = known is not None and known.burst == burst
            if record is None or not current or not self._core.in_burst(record):
                del self._on_trial[session]
            elif session not in self._looked_at:
                self._looked_at.add(session)
                self._core.after_a_look(record, partial(self._judge, session, burst))

    def _order(self, sessions: Iterable[SessionId]) -> None:
        """Give their orders to the gates of ``sessions``, and judge the turns that have ended. A
        session may have no gate left: then its last linked process has died, and the burst that its
        call began is over."""
        scheduler = self._core.scheduler
        for session in sessions:
            opens = scheduler.may_compute(session)
            if not opens and session in self._on_trial and scheduler.at_rest(session):
                self._judge_ended(session)
            links = self._links.of(session)
            for link in links:
                self.tell(link, opens)
            if any(link.wants_lease for link in links):
                self._loop.call_soon(self._ask, session)

    def tell(self, link: Link, opens: bool) -> None:
        """Order the gate to be open or armed, unless that is the last order."""
        if link.gate_open is opens or link.connection is None:
            return
        link.gate_open = opens
        if opens:
            link.wants_lease = False
        link.connection.send(Gate(open=opens))

    # --- empty turns ----------------------------------------------------------------------------

    def _judge(self, session: SessionId, burst: int) -> None:
        """Decide about ``session``, which has just been observed."""
        self._looked_at.discard(session)
        if self._on_trial.get(session) != burst:
            return
        if self._uses_driver(session):
            del self._on_trial[session]
            self._empty_turns.forget(session)
        elif self._core.scheduler.waiting:
            log.info("a turn of a program without the driver ends: others wait", session=session)
            self._core.feed(ev.BurstEnded(session=session, burst=burst))

    def _judge_ended(self, session: SessionId) -> None:
        """Decide after the turn on trial has ended by itself; runners are observed all the time. A
        turn that was taken back, or that the client's next burst has ended, says nothing."""
        record, known = self._registry.get(session), self._core.scheduler.session(session)
        burst = self._on_trial[session]
        if record is None or known is None or known.burst != burst or record.over_burst == burst:
            return
        del self._on_trial[session]
        if self._uses_driver(session):
            self._empty_turns.forget(session)
        else:
            self._empty_turns.was_empty(session, self._loop.time())

    # --- the lease ------------------------------------------------------------------------------

    def lease_wanted(self, link: Link) -> None:
        if link.session is None:
            link.gate_open = None
            self.tell(link, opens=True)
            return
        if link.gate_open:
            return  # the order to open is on its way
        link.wants_lease = True
        self._context_turns.forget(link.session)
        self._ask(link.session)

    def lease_unwanted(self, link: Link) -> None:
        """Withdraw the request, or end the burst that it began, if no other process of the session
        needs it: an interrupt has ended the wait, and a turn that nobody uses would move memory for
        nothing."""
        link.wants_lease = False
        record = self._registry.get(link.session) if link.session else None
        if record is None or self._core.scheduler.may_compute(record.id):
            return
        if not any(one.wants_lease or one.wants_context for one in self._links.of(record.id)):
            log.info("the call at the gate was interrupted", session=record.id)
            self._bursts.withdraw_own(record)

    def context_wanted(self, link: Link) -> None:
        """Bring back the context for a call of NVML. Where a library moves the memory, the context
        comes alone, which takes nobody's turn. Otherwise, and where there is no room, the session
        takes a turn."""
        if link.session is None or link.gate_open:
            return  # the order to open is on its way
        link.wants_context = True
        alone = link.owns and not link.yields
        if alone:
            self._core.feed(ev.ResidueWanted(session=link.session))
        self._ask_for_context(link.session, CONTEXT_PATIENCE_S if alone else 0.0)

    def _ask_for_context(self, session: SessionId, after_s: float = 0.0) -> None:
        now_s = self._loop.time()
        after_s = max(after_s, self._context_turns.left_s(session, now_s))
        if after_s and session not in self._contexts_due:

            def due() -> None:
                self._contexts_due.discard(session)
                self._ask_for_context(session)

            self._contexts_due.add(session)
            self._loop.call_later(after_s, due)
        elif not after_s:
            record = self._registry.get(session)
            wanted = any(link.wants_context for link in self._links.of(session))
            if record is not None and wanted and self._core.scheduler.at_rest(session):
                self._context_turns.was_empty(session, now_s)
                log.info("a call of NVML asks for the lease", session=session)
                self._bursts.request(record, 0)

    def _ask(self, session: SessionId) -> None:
        """Request the lease for ``session``, after its back-off, or after a look that shows that it
        has started the driver. Do nothing if it already waits or is in a burst: the gate opens with
        the grant of that burst."""
        record = self._registry.get(session)
        wanted = any(link.wants_lease for link in self._links.of(session))
        if record is None or not wanted or not self._core.scheduler.at_rest(session):
            return
        left_s = self._empty_turns.left_s(session, self._loop.time())
        if not left_s:
            log.info("a call at the gate asks for the lease", session=session)
            self._bursts.request(record, 0)
        elif session not in self._put_off:

            def over() -> None:
                self._put_off.discard(session)
                self._ask(session)

            def looked() -> None:
                if self._uses_driver(session):
                    self._empty_turns.forget(session)
                    self._ask(session)

            self._put_off.add(session)
            self._loop.call_later(left_s, over)
            self._core.after_a_look(record, looked)
