"""The scheduler of one GPU: takes every event, answers with actions. See the package's docstring.

Called by the daemon's loop (one thread), by replay, and by tests. No call blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import audit
from kiwi_core.sched.forecast.forecast import Forecast
from kiwi_core.sched.model.accounts import account_of
from kiwi_core.sched.model.session import Home, Want
from kiwi_core.sched.model.state import State
from kiwi_core.sched.policy import DEFAULT, make
from kiwi_core.sched.rules import arrivals, hints, observations, outcomes
from kiwi_core.sched.rules import immovable as fixed
from kiwi_core.sched.rules.settle import settle
from kiwi_core.sched.snapshot import snapshot, state_of
from kiwi_core.states import AntiThrash, SessionState

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.sched.actions import Action
    from kiwi_core.sched.events import Event
    from kiwi_core.sched.model.accounts import Account
    from kiwi_core.sched.model.stories import StoryLine
    from kiwi_core.sched.view import GpuView, HistoryView
    from kiwi_core.units import SessionId

_HANDLERS = {
    **arrivals.HANDLERS,
    **fixed.HANDLERS,
    **outcomes.HANDLERS,
    **observations.HANDLERS,
}


class Scheduler:
    """``now_ns`` is any monotonic clock, always the same one; times in actions and deadlines are
    on it. ``first_op`` is the first operation id to use: a daemon that restarts goes on counting.
    ``policy`` is one of ``policy.names()``; else ``CallerError("unknown-policy")`` is raised.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        config: Config = DEFAULTS,
        tq_ns: int | None = None,
        anti_thrash: AntiThrash = AntiThrash.ON,
        host_budget_bytes: int,
        first_op: int = 1,
        policy: str = DEFAULT,
        checks: bool = False,
    ) -> None:
        tq_ns = config.tq_ns if tq_ns is None else tq_ns
        self._st = State(
            total_bytes, config, tq_ns, anti_thrash, host_budget_bytes, first_op, make(policy)
        )
        self._forecast = Forecast()
        self._checks = checks

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Record ``event``, decide everything that can be decided, and say what is to be done, in
        order. An event of an unknown session, a stale burst or an unknown operation changes
        nothing and is counted."""
        st = self._st
        st.now_ns = now_ns
        actions: list[Action] = []
        st.actions = actions
        _HANDLERS[type(event)](st, event)
        settle(st)
        if self._checks:
            audit.check(st)
        return actions

    def next_deadline_ns(self) -> int | None:
        """When to send ``DeadlinePassed`` unless another event comes before; ``None``: never."""
        return self._st.wake_ns

    @property
    def tq_ns(self) -> int:
        return self._st.terms.tq_ns

    @property
    def policy(self) -> str:
        """Its name."""
        return self._st.policy.name

    @property
    def anti_thrash(self) -> AntiThrash:
        return self._st.anti_thrash

    @property
    def holders(self) -> tuple[SessionId, ...]:
        """Who may be at work on the GPU: those that hold the lease or are being stopped."""
        return self._st.at_work

    @property
    def loose(self) -> tuple[SessionId, ...]:
        """Who was stopped in mid-burst without anything that the driver could hold it by: worth a
        close look, since it may begin to use the GPU at any moment."""
        queue = self._st.queue.values()
        return tuple(session.id for session in queue if session.mid_burst and session.loose)

    @property
    def unread(self) -> tuple[SessionId, ...]:
        """Those that gave up the lease and were not looked at since: others may wait for that."""
        return tuple(self._st.unread)

    @property
    def waiting(self) -> bool:
        """Does anybody wait for the lease, or to be brought back?"""
        return bool(self._st.queue)

    def state_of(self, session: SessionId) -> SessionState | None:
        """What ``view`` says of one session, at the cost of one; ``None``: there is none."""
        known = self._st.sessions.get(session)
        return None if known is None or known.gone else state_of(known)

    def view(self, now_ns: int, *, ahead: bool = False) -> GpuView:
        """``ahead``: with what waiters are told, which costs up to a millisecond a few times a
        second: where people will read it. Otherwise expected waits are a rough sum."""
        told = self._forecast.look(self._st, now_ns) if ahead else None
        return snapshot(self._st, now_ns, self._forecast, told)

    def accounts(self, now_ns: int) -> dict[SessionId, Account]:
        """What each session has had so far, until now."""
        return {id_: account_of(s, now_ns) for id_, s in self._st.sessions.items()}

    def take_departed(self) -> list[tuple[SessionId, Account]]:
        """The final sums of those that were forgotten since this was asked last; to be asked after
        each event, or some are missing."""
        departed = list(self._st.departed)
        self._st.departed.clear()
        return departed

    def story(self, session: SessionId) -> tuple[StoryLine, ...]:
        """The last things that happened to ``session``, oldest first; also for a while after it
        left. Empty for one that nobody remembers."""
        return self._st.stories.lines(session)

    def may_release(self, session: SessionId) -> bool:
        """Whether ``ReleaseRequested`` would be heeded: it is at rest, or goes out already."""
        known = self._st.sessions.get(session)
        return known is not None and arrivals.may_release(known)

    def moves_out(self, session: SessionId) -> bool:
        """Whether the memory of ``session`` is out, or on its way (or there is none)."""
        known = self._st.sessions.get(session)
        return known is None or known.op is not None or not known.resident_bytes

    def may_compute(self, session: SessionId) -> bool:
        """May calls of its program that use the GPU pass? While it holds the lease, and when
        there is nothing (left) to protect."""
        known = self._st.sessions.get(session)
        return known is None or known.want is Want.RUNNING or known.home is Home.LOST

    def at_rest(self, session: SessionId) -> bool:
        """Whether ``session`` wants nothing, so that a request for a lease would be its first."""
        known = self._st.sessions.get(session)
        return known is not None and known.want is Want.NONE and not known.leaving

    def believed_in(self, session: SessionId, since_ns: int | None = None) -> bool:
        """Is its memory in the GPU and its program free, by the books, with nothing under way? And
        has nothing been under way ``since_ns``?"""
        known = self._st.sessions.get(session)
        if known is None or known.home is not Home.IN or known.op is not None:
            return False
        return since_ns is None or known.moved_at_ns <= since_ns

    def out_bytes(self, session: SessionId) -> int | None:
        """What is in system RAM by the books; ``None``: it is not out, or an operation goes on."""
        known = self._st.sessions.get(session)
        if known is None or known.home is not Home.OUT or known.op is not None:
            return None
        return known.paged_out_bytes

    def hint_hindrance(self, session: SessionId, now_ns: int) -> str:
        """Why ``UseExpected`` for ``session`` would lead to nothing just now, in words for
        people; "": it would bring its memory back."""
        return hints.hindrance(self._st, session, now_ns)

    @property
    def history_serial(self) -> int:
        """Of the newest change in the history."""
        return self._st.history.serial

    def history(self, since: int, now_ns: int) -> tuple[HistoryView, ...]:
        """What began or ended after the change ``since`` (0: all that is kept), in the order of
        the changes; what goes on has no end. Also of sessions that left."""
        return self._st.history.since(since, self._st.sessions.values(), now_ns)

    def remembered(self) -> frozenset[SessionId]:
        """Sessions that the history still speaks of, present ones included."""
        return self._st.history.sessions() | frozenset(self._st.sessions)

    def check(self) -> None:
        """Recompute every derived count from scratch; ``AssertionError`` where one is wrong."""
        audit.check(self._st)
